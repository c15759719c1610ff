"""`WeightFormat`: what the module of a format provides, so that `checkpoint` finds and reads its matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .gptq_config import GptqConfig, QuantMethod
from .packed import PackedWeight


class ReadMatrix(Protocol):
    """Checks the tensors of one matrix, named by their suffixes, and makes a weight of them."""

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        in_features: int,
        out_features: int,
        bias: Tensor | None,
        where: str,
        config: GptqConfig,
        /,
    ) -> PackedWeight:
        """`where` names file and matrix in errors; `config` is what the JSON beside the weights says."""
        ...


DescribeMatrix = Callable[[Mapping[str, tuple[int, ...]], Callable[[str], Tensor], GptqConfig], str]
"""(shapes by suffix, how to read a tensor by its suffix, config) → widths and group sizes in a few words."""


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a matrix in named tensors of safetensors files; `registry.FORMATS` lists them.

    A matrix `key` has the tensors `key.suffix`. The one called `marker` tells the format; where two formats
    share it, the `quant_method` in the JSON beside the weights decides.
    """

    name: str  # in `exlm info` and in errors
    marker: str
    tensors: tuple[str, ...] = ()  # suffixes of all its tensors but the bias
    read: ReadMatrix | None = None  # None: exlm cannot read it, and says its name
    describe: DescribeMatrix | None = None
    quant_method: QuantMethod | None = None  # None: the marker is enough
