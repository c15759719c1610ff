"""The two plain MLPs."""

from __future__ import annotations

from torch import Tensor

from ..kernels import interface as b
from .batch import Batch
from .linear import Linear


class GatedMlp:
    """down(act(gate) · up)."""

    def __init__(self, act: b.GatedActivationFn, gate: Linear, up: Linear, down: Linear) -> None:
        self.act = act
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        hidden = self.act(self.gate.forward(x, batch), self.up.forward(x, batch))
        return self.down.forward(hidden, batch)


class PlainMlp:
    """down(act(up))."""

    def __init__(self, act: b.ActivationFn, up: Linear, down: Linear) -> None:
        self.act = act
        self.up, self.down = up, down

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        return self.down.forward(self.act(self.up.forward(x, batch)), batch)
