"""The formats in which safetensors files store matrices, in the order in which they are looked for.

A new format is one module (describe, check, read, perhaps write) and its entry in `FORMATS`. GGUF's types are
in `gguf_types`: its files name the type of each tensor, so nothing is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from . import awq, exl2, gptq
from .packed import PackedWeight
from .quantization_config import QuantizationConfig, QuantMethod


class ReadMatrix(Protocol):
    """Checks the tensors of one matrix, named by their suffixes, and makes a weight of them, without a bias."""

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        in_features: int,
        out_features: int,
        where: str,
        config: QuantizationConfig,
        /,
    ) -> PackedWeight:
        """`where` names file and matrix in errors; `config` is what the JSON beside the weights says."""
        ...


DescribeMatrix = Callable[[Mapping[str, tuple[int, ...]], Callable[[str], Tensor], QuantizationConfig], str]
"""(shapes by suffix, how to read a tensor by its suffix, config) → widths and group sizes in a few words."""


@dataclass(frozen=True)
class MatrixFormat:
    """One way to store a matrix in named tensors of safetensors files.

    A matrix `key` has the tensors `key.suffix`. The one called `marker` tells the format; where two formats
    share it, the `quant_method` in the JSON beside the weights decides.
    """

    name: str  # in `exlm info` and in errors
    marker: str
    tensors: tuple[str, ...] = ()  # suffixes of all its tensors but the bias
    read: ReadMatrix | None = None  # None: exlm cannot read it, and says its name
    describe: DescribeMatrix | None = None
    quant_method: QuantMethod | None = None  # None: the marker is enough


DENSE = MatrixFormat("dense", "weight", ("weight",))
"""Plain floats. `checkpoint` reads them itself: there is nothing to decode, and they are cast as they are
copied."""

FORMATS: tuple[MatrixFormat, ...] = (
    MatrixFormat("exl2", "q_weight", exl2.TENSORS, exl2.read, exl2.describe),
    MatrixFormat("gptq", "qweight", gptq.TENSORS, gptq.read, gptq.describe, quant_method="gptq"),
    MatrixFormat("awq", "qweight", gptq.TENSORS, awq.read, gptq.describe, quant_method="awq"),
    MatrixFormat("EXL3", "trellis"),
    MatrixFormat("compressed-tensors", "weight_packed"),
    DENSE,
)
