"""What a stored matrix is: the protocol `Weight`, and plain floats, `DenseWeight`.

A `Weight` is data; multiplying with it fast is the work of `kernels`. `dequantize()` in plain torch defines
what the stored bits mean and is the oracle of every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

Range = tuple[int, int]


class Weight(Protocol):
    """A matrix of `in_features` by `out_features` (y = x @ W + bias) in some stored form."""

    @property
    def in_features(self) -> int:
        """Rows of W: the width of x."""
        ...

    @property
    def out_features(self) -> int:
        """Columns of W: the width of y."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """Added to y, shape (out_features,)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held, bias included."""
        ...

    def describe(self) -> str:
        """The stored form in a few words for `exlm info`: `dense float16`, `exl2 4.1 bit`."""
        ...

    def dequantize(self) -> Tensor:
        """W itself, (in_features, out_features): floats in their stored dtype, codes in that of their format."""
        ...

    def split(self, dim: int, ranges: Sequence[Range]) -> list[Self]:
        """Cut along inputs (dim 0: only the first piece keeps the bias) or outputs (dim 1)."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        ...


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A matrix of plain floats of any precision, kept as files store it: (out_features, in_features).

    `split` gives views into the same memory.
    """

    data: Tensor
    bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        return int(self.data.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.data.shape[0])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def describe(self) -> str:
        return f"dense {str(self.data.dtype).removeprefix('torch.')}"

    def dequantize(self) -> Tensor:
        return self.data.T

    def split(self, dim: int, ranges: Sequence[Range]) -> list[DenseWeight]:
        if dim == 1:
            return [DenseWeight(self.data[a:b], None if self.bias is None else self.bias[a:b]) for a, b in ranges]
        return [DenseWeight(self.data[:, a:b], None if n else self.bias) for n, (a, b) in enumerate(ranges)]

    def to(self, device: torch.device) -> DenseWeight:
        return DenseWeight(self.data.to(device), None if self.bias is None else self.bias.to(device))
