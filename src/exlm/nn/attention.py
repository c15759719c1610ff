"""Attention: projections, QK norm, RoPE, attention, output projection. Absent parts are identities."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..kernels.interface import AttentionFn, LayerKVCache, NormFn, QKNormFn
from .batch import Batch
from .linear import Linear


class Qkv(Protocol):
    """The q, k and v projections."""

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, tokens, hidden) → three of (rows, tokens, heads · head_dim)."""
        ...


class QkvProjection:
    """q, k and v as three matrices."""

    def __init__(self, q: Linear, k: Linear, v: Linear) -> None:
        self.q, self.k, self.v = q, k, v

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, tokens, hidden) → three of (rows, tokens, heads · head_dim)."""
        return self.q.forward(x, batch), self.k.forward(x, batch), self.v.forward(x, batch)


class ClampedQkv:
    """Projections whose outputs are clamped to ±limit (DBRX, OLMo)."""

    def __init__(self, inner: Qkv, limit: float) -> None:
        self.inner, self.limit = inner, limit

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The inner projections, clamped."""
        q, k, v = self.inner.forward(x, batch)
        low, high = -self.limit, self.limit
        return q.clamp(low, high), k.clamp(low, high), v.clamp(low, high)


class PerHeadNorm:
    """QK norm of each head by itself."""

    def __init__(self, q: NormFn, k: NormFn) -> None:
        self.q, self.k = q, k

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, tokens, heads, head_dim) each."""
        return self.q(q), self.k(k)


class AllHeadsNorm:
    """QK norm of all heads of a token together."""

    def __init__(self, q: NormFn, k: NormFn) -> None:
        self.q, self.k = q, k

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, tokens, heads, head_dim) each."""
        return self.q(q.flatten(2)).view_as(q), self.k(k.flatten(2)).view_as(k)


def no_qk_norm(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """No QK norm."""
    return q, k


class Attention:
    """Attention (MHA, GQA, MQA) over a layer's cache."""

    def __init__(self, head_dim: int, qkv: Qkv, norm: QKNormFn, attend: AttentionFn, o: Linear) -> None:
        self.head_dim = head_dim
        self.qkv = qkv
        self.norm = norm
        self.attend = attend
        self.o = o

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape; stores the new tokens in the layer's cache."""
        return self.o.forward(self.head_outputs(x, batch, kv), batch)

    def head_outputs(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """`forward` without the output projection: (rows, tokens, heads · head_dim)."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (part.view(shape) for part in self.qkv.forward(x, batch))
        q, k = self.norm(q, k)
        return self.attend(q, k, v, kv, batch)
