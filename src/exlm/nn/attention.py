"""Attention: projections, QK norm, RoPE, attention, output projection. Absent parts are identities."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.interface import AttentionFn, LayerKVCache, NormFn, QKNormFn
from .batch import Batch
from .linear import Linear


class Projection(Protocol):
    """One matrix, or a product of several."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, inputs) → (rows, tokens, outputs)."""
        ...


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

    def fill_cache(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> None:
        """Project and attend; the output is not used."""
        self.head_outputs(x, batch, kv)

    def head_outputs(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """`forward` without the output projection: (rows, tokens, heads · head_dim)."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (part.view(shape) for part in self.qkv.forward(x, batch))
        q, k = self.norm(q, k)
        return self.attend(q, k, v, kv, batch)


class GatedAttention(Attention):
    """Attention whose heads' outputs are multiplied by sigmoid(gate)."""

    def __init__(self, head_dim: int, qkv: Qkv, norm: QKNormFn, attend: AttentionFn, gate: Linear, o: Linear) -> None:
        super().__init__(head_dim, qkv, norm, attend, o)
        self.gate = gate

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape; stores the new tokens in the layer's cache."""
        gate = self.gate.forward(x, batch).sigmoid()
        return self.o.forward(self.head_outputs(x, batch, kv) * gate, batch)


class LatentQkv:
    """MLA's projections: q, maybe of low rank, and keys and values expanded from one latent a token.

    Each key head ends with `rope_dim` numbers that all heads share; values are padded to a key's width.
    """

    def __init__(
        self,
        widths: tuple[int, int, int, int],
        q: Projection,
        kv_down: Linear,
        norm: NormFn,
        k_up: Linear,
        v_up: Linear,
    ) -> None:
        """`widths`: the latent, and a head's own part of a key, its shared part, and a value."""
        self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim = widths
        self.q, self.kv_down, self.norm, self.k_up, self.v_up = q, kv_down, norm, k_up, v_up

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, tokens, hidden) → three of (rows, tokens, heads · (nope_dim + rope_dim))."""
        latent, shared = self.kv_down.forward(x, batch).split_with_sizes((self.kv_rank, self.rope_dim), -1)
        latent = self.norm(latent.contiguous())
        own = self.k_up.forward(latent, batch).view(*x.shape[:2], -1, self.nope_dim)
        keys = torch.cat((own, shared.unsqueeze(2).expand(-1, -1, own.shape[2], -1)), -1)
        values = self.v_up.forward(latent, batch).view(*x.shape[:2], -1, self.value_dim)
        padded = F.pad(values, (0, self.nope_dim + self.rope_dim - self.value_dim))
        return self.q.forward(x, batch), keys.flatten(2), padded.flatten(2)


class LowRankQuery:
    """q of low rank, with a norm between its matrices."""

    def __init__(self, down: Linear, norm: NormFn, up: Linear) -> None:
        self.down, self.norm, self.up = down, norm, up

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) → (rows, tokens, heads · head_dim)."""
        return self.up.forward(self.norm(self.down.forward(x, batch)), batch)


class LatentAttention(Attention):
    """MLA over expanded heads: the padding of the values is cut off before the output projection."""

    def __init__(self, head_dim: int, value_dim: int, qkv: Qkv, attend: AttentionFn, o: Linear) -> None:
        super().__init__(head_dim, qkv, no_qk_norm, attend, o)
        self.value_dim = value_dim

    def forward(self, x: Tensor, batch: Batch, kv: LayerKVCache) -> Tensor:
        """(rows, tokens, hidden) → the same shape; stores the new tokens in the layer's cache."""
        heads = self.head_outputs(x, batch, kv).view(*x.shape[:2], -1, self.head_dim)
        return self.o.forward(heads[..., : self.value_dim].flatten(2), batch)
