"""A matrix in its place: one bound kernel and the widths of its two sides."""

from __future__ import annotations

from torch import Tensor

from ..kernels import interface as b
from .batch import Batch


class Linear:
    """y = x @ W + bias, by whatever kernel the loader bound."""

    def __init__(self, kernel: b.LinearFn, in_features: int, out_features: int) -> None:
        self.kernel = kernel
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, in_features) → (rows, tokens, out_features)."""
        return self.kernel(x)
