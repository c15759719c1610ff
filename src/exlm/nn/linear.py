"""One matrix: a bound kernel and its two widths."""

from __future__ import annotations

from torch import Tensor

from ..kernels import interface as b
from .batch import Batch


class Linear:
    """y = x @ W + bias; LoRA and tensor parallel replace or wrap it."""

    def __init__(self, kernel: b.LinearFn, in_features: int, out_features: int) -> None:
        self.kernel = kernel
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, in_features) → (rows, tokens, out_features)."""
        return self.kernel(x)
