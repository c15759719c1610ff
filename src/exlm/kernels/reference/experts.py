"""A mixture of experts, one expert after the other, each on the tokens that chose it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import Activation, Linear


@dataclass(frozen=True, eq=False)
class Experts:
    """Softmax over all experts in float32, the best `active`, and their shares as weights.

    Of equal experts the first are chosen, on every device.
    """

    active: int
    renormalize: bool
    act: Activation
    gate: list[Linear]
    up: list[Linear]
    down: list[Linear]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """(rows, tokens, hidden) and (rows, tokens, experts) → (rows, tokens, hidden)."""
        flat = x.flatten(0, 1)
        ranked = logits.flatten(0, 1).float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        shares, chosen = (part[:, : self.active] for part in ranked)
        if self.renormalize:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for expert in range(len(self.gate)):
            token, slot = torch.where(chosen == expert)
            if len(token):
                part = flat[token]
                answer = self.down[expert](self.act(self.gate[expert](part)) * self.up[expert](part))
                out.index_add_(0, token, answer * shares[token, slot, None].to(answer.dtype))
        return out.view_as(x)
