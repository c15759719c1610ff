"""The last step: hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import interface as b
from .batch import Batch
from .linear import Linear


class Head:
    """Final norm, one wide matrix, then a factor and a cap."""

    def __init__(self, norm: b.AddNormFn, linear: Linear, scale: float, softcap: float | None) -> None:
        self.norm = norm
        self.linear = linear
        self.scale = scale
        self.softcap = softcap

    def forward(self, x: Tensor, pending_residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """The residual stream → (rows, tokens, vocabulary) in float32, and the state that enters the norm."""
        state, normed = self.norm(x, pending_residual)
        return self.scale_logits(self.linear.forward(normed, batch)), state

    def scale_logits(self, output: Tensor) -> Tensor:
        """What the matrix answers, as logits."""
        logits = output.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
