"""A router and its experts."""

from __future__ import annotations

from torch import Tensor

from ..kernels import backend as b
from .linear import Linear


class SparseMlp:
    """Each token is answered by a few of many MLPs."""

    def __init__(self, router: Linear, experts: b.Experts) -> None:
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self.experts(x, self.router.forward(x))
