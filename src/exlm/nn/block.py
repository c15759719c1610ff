"""One decoder layer, in its two shapes:

Block            x ─┬─ norm ─ attention ─ post ─(+)─┬─ norm ─ mlp ─ post ─(+)─
                    └───────────────────────────┘   └──────────────────────┘

ParallelBlock    x ─┬─ norm ─┬─ attention ─(+)─(+)─
                    │        └─ mlp ────────┘   │
                    └───────────────────────────┘

The last addition of a block is left to the next one's first norm, so that a backend may do both at once: what
flows from block to block is a sum and a part still to be added.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..kernels import interface as b
from .attention import Attention
from .batch import Batch


class MlpLike(Protocol):
    """Dense or sparse."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → the same shape."""
        ...


class BlockLike(Protocol):
    """A decoder layer of either shape."""

    @property
    def attn(self) -> Attention:
        """Its first half."""
        ...

    @property
    def mlp(self) -> MlpLike:
        """Its second half."""
        ...

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: b.LayerKVCache
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream in and out, (rows, tokens, hidden): the sum so far, and what belongs to it."""
        ...

    def fill_kv(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: b.LayerKVCache) -> None:
        """What `forward` leaves in the layer's cache, when nobody asks for its answer."""
        ...


class Block:
    """Attention, then MLP, each added to what came in."""

    def __init__(
        self,
        attn: Attention,
        mlp: MlpLike,
        attn_norm: b.AddNormFn,
        mlp_norm: b.AddNormFn,
        attn_post_norm: b.NormFn,
        mlp_post_norm: b.NormFn,
    ) -> None:
        self.attn, self.mlp = attn, mlp
        self.attn_norm, self.mlp_norm = attn_norm, mlp_norm
        self.attn_post_norm, self.mlp_post_norm = attn_post_norm, mlp_post_norm

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: b.LayerKVCache
    ) -> tuple[Tensor, Tensor]:
        """The residual stream in, the residual stream out."""
        x, normed = self.attn_norm(x, pending_residual)
        x, normed = self.mlp_norm(x, self.attn_post_norm(self.attn.forward(normed, batch, kv)))
        return x, self.mlp_post_norm(self.mlp.forward(normed, batch))

    def fill_kv(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: b.LayerKVCache) -> None:
        """Attention alone."""
        self.attn.head_outputs(self.attn_norm(x, pending_residual)[1], batch, kv)


class ParallelBlock:
    """Attention and MLP on the same normalised input."""

    def __init__(self, attn: Attention, mlp: MlpLike, norm: b.AddNormFn, post_norm: b.NormFn) -> None:
        self.attn, self.mlp = attn, mlp
        self.norm, self.post_norm = norm, post_norm

    def forward(
        self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: b.LayerKVCache
    ) -> tuple[Tensor, Tensor]:
        """The residual stream in, the residual stream out."""
        x, normed = self.norm(x, pending_residual)
        return x, self.post_norm(self.attn.forward(normed, batch, kv) + self.mlp.forward(normed, batch))

    def fill_kv(self, x: Tensor, pending_residual: Tensor | None, batch: Batch, kv: b.LayerKVCache) -> None:
        """Attention alone."""
        self.attn.head_outputs(self.norm(x, pending_residual)[1], batch, kv)
