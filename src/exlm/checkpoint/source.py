"""`WeightSource`: the weights of one model by role, whatever files hold them; `open_source` opens a path."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..formats import Weight
from ..formats.quantization_config import QuantizationConfig
from ..spec.tensor_names import TensorNames
from .gguf_checkpoint import GgufCheckpoint
from .safetensors_checkpoint import SafetensorsCheckpoint
from .tensor_index import Shape


class WeightFiles(Protocol):
    """The files of a source."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        ...


class WeightSource(Protocol):
    """The weights of one model, by role."""

    @property
    def files(self) -> WeightFiles:
        """Where they are read from."""
        ...

    def has(self, role: str) -> bool:
        """Whether the files hold this role, in whatever form."""
        ...

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored form in a few words and its stored bytes, from headers alone."""
        ...

    def unused(self) -> list[str]:
        """Stored names that were not asked for so far."""
        ...

    def tensor(
        self,
        role: str,
        shape: Shape | tuple[Shape, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        suffix: str = "weight",
        finite: bool = False,
    ) -> Tensor:
        """A float tensor that is no matrix to multiply with."""
        ...

    def weight(
        self,
        role: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device,
        fallback: str | None = None,
    ) -> Weight:
        """A matrix to multiply with, in whatever form it is stored."""
        ...


def open_source(path: Path, names: TensorNames, quantization: QuantizationConfig | None = None) -> WeightSource:
    """The weights at a path: a GGUF file, or a folder of safetensors spelt as `names` says."""
    if path.is_file():
        return GgufCheckpoint.open(path)
    return SafetensorsCheckpoint.open(path, names, quantization)
