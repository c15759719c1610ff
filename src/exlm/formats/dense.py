"""A matrix stored as plain floats, kept as the files keep it: one row for each output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .weight import Range


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """Floats of any precision, (out_features, in_features)."""

    data: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def in_features(self) -> int:
        """Width of x."""
        return int(self.data.shape[1])

    @property
    def out_features(self) -> int:
        """Width of y."""
        return int(self.data.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes held, bias included."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def describe(self) -> str:
        """For `exlm info`."""
        return f"dense {str(self.data.dtype).removeprefix('torch.')}"

    def dequantize(self) -> torch.Tensor:
        """(in_features, out_features), as stored."""
        return self.data.T

    def split(self, dim: int, ranges: Sequence[Range]) -> list[DenseWeight]:
        """Views into the same memory."""
        if dim == 1:
            return [
                DenseWeight(self.data[a:b], None if self.bias is None else self.bias[a:b]) for a, b in ranges
            ]
        return [DenseWeight(self.data[:, a:b], None if n else self.bias) for n, (a, b) in enumerate(ranges)]

    def to(self, device: torch.device) -> DenseWeight:
        """The same weight on another device."""
        return DenseWeight(self.data.to(device), None if self.bias is None else self.bias.to(device))
