"""What a stored matrix means. A `Weight` is data; how to multiply with it fast is a kernel's business.

`dequantize()` in plain torch is the specification of a format and the oracle of every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch

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
    def bias(self) -> torch.Tensor | None:
        """Added to y, shape (out_features,)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held, bias included."""
        ...

    def describe(self) -> str:
        """The stored form in a few words for `exlm info`: `dense float16`, `exl2 4.1 bit`."""
        ...

    def dequantize(self) -> torch.Tensor:
        """W itself, (in_features, out_features), in the stored or the defined precision."""
        ...

    def split(self, dim: int, ranges: Sequence[Range]) -> list[Self]:
        """Cut along inputs (dim 0: only the first piece keeps the bias) or outputs (dim 1)."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        ...
