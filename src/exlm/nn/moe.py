"""A router and its experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..kernels import interface as b
from .batch import Batch
from .linear import Linear


class Expert(NamedTuple):
    """The three matrices of one gated MLP."""

    gate: Linear
    up: Linear
    down: Linear


class Experts:
    """Many MLPs behind one kernel, which sends each token to a few of them."""

    def __init__(self, kernel: b.MoeFn, experts: Sequence[Expert]) -> None:
        self.kernel = kernel
        self.experts = experts  # what the kernel was bound to

    def forward(self, x: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) and the router's (rows, tokens, experts) → (rows, tokens, hidden)."""
        return self.kernel(x, logits)


class MoeMlp:
    """Each token is answered by a few of many MLPs."""

    def __init__(self, router: Linear, experts: Experts) -> None:
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self.experts.forward(x, self.router.forward(x, batch), batch)
