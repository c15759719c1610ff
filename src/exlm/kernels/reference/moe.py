"""A mixture of experts, one expert after the other, each on the tokens that chose it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..interface import ActivationFn, LinearFn


@dataclass(frozen=True, eq=False)
class ReferenceMoe:
    """Softmax over all experts in float32, the best `active`, and their shares as weights.

    Of equal experts the first are chosen, on every device.
    """

    active: int
    renormalize: bool
    act: ActivationFn
    gate: list[LinearFn]
    up: list[LinearFn]
    down: list[LinearFn]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """(rows, tokens, hidden) and (rows, tokens, experts) → (rows, tokens, hidden)."""
        flat = x.flatten(0, 1)
        ranked = logits.flatten(0, 1).float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        routing_weights, expert_ids = (rows[:, : self.active] for rows in ranked)
        if self.renormalize:
            routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for expert in range(len(self.gate)):
            token, slot = torch.where(expert_ids == expert)
            if len(token):
                rows = flat[token]
                output = self.down[expert](self.act(self.gate[expert](rows)) * self.up[expert](rows))
                out.index_add_(0, token, output * routing_weights[token, slot, None].to(output.dtype))
        return out.view_as(x)
