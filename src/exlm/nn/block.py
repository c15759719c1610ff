"""One decoder layer, in its two shapes:

Block            x ─┬─ norm ─ attention ─ post ─(+)─┬─ norm ─ mlp ─ post ─(+)─
                    └───────────────────────────┘   └──────────────────────┘

ParallelBlock    x ─┬─ norm ─┬─ attention ─(+)─(+)─
                    │        └─ mlp ────────┘   │
                    └───────────────────────────┘
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..kernels import backend as b
from .attention import Attention
from .batch import Batch


class MlpLike(Protocol):
    """Dense or sparse."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        ...


class BlockLike(Protocol):
    """A decoder layer of either shape."""

    attn: Attention
    mlp: MlpLike

    def forward(self, x: Tensor, batch: Batch, kv: b.KeyValues) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        ...


class Block:
    """Attention, then MLP, each added to what came in."""

    def __init__(
        self,
        attn: Attention,
        mlp: MlpLike,
        attn_norm: b.Norm,
        mlp_norm: b.Norm,
        attn_post: b.Norm,
        mlp_post: b.Norm,
    ) -> None:
        self.attn, self.mlp = attn, mlp
        self.attn_norm, self.mlp_norm = attn_norm, mlp_norm
        self.attn_post, self.mlp_post = attn_post, mlp_post

    def forward(self, x: Tensor, batch: Batch, kv: b.KeyValues) -> Tensor:
        """The residual stream in, the residual stream out."""
        x = x + self.attn_post(self.attn.forward(self.attn_norm(x), batch, kv))
        return x + self.mlp_post(self.mlp.forward(self.mlp_norm(x)))


class ParallelBlock:
    """Attention and MLP on the same normalised input."""

    def __init__(self, attn: Attention, mlp: MlpLike, norm: b.Norm, post: b.Norm) -> None:
        self.attn, self.mlp = attn, mlp
        self.norm, self.post = norm, post

    def forward(self, x: Tensor, batch: Batch, kv: b.KeyValues) -> Tensor:
        """The residual stream in, the residual stream out."""
        n = self.norm(x)
        return x + self.post(self.attn.forward(n, batch, kv) + self.mlp.forward(n))
