"""Softmax attention in plain torch over any cache: the definition of all attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interface import AttnMetadata, LayerKVCache, RopeFn


@dataclass(frozen=True)
class ReferenceAttention:
    """RoPE, store new keys and values in the cache, attend."""

    rope: RopeFn
    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKVCache, metadata: AttnMetadata) -> Tensor:
        """(rows, tokens, heads, head_dim) q, k, v → (rows, tokens, heads · head_dim)."""
        q, k = self.rope(q, k, metadata.positions)
        keys, values = kv.update(k, v, metadata)
        mask = attention_mask(q.shape[1], metadata, self.window)
        attend = self._sdpa if self.softcap is None else self._softcapped
        y = attend(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask)
        return y.transpose(1, 2).flatten(2)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        causal = mask is None and q.shape[2] > 1
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=gqa
        )

    def _softcapped(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert self.softcap is not None
        if mask is None:
            shape = (q.shape[2], k.shape[2])
            mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(shape[1] - shape[0])
        q_per_kv = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(q_per_kv, 1), v.repeat_interleave(q_per_kv, 1)
        scores = (q @ k.transpose(2, 3)).float() * self.scale
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1).to(v.dtype) @ v


def attention_mask(tokens: int, metadata: AttnMetadata, window: int | None) -> Tensor | None:
    """(rows or 1, 1, tokens, max_kv_len) boolean mask; None where `is_causal` is enough.

    A query always sees itself: the softmax of a padding row without keys would be NaN and spread.
    """
    total = metadata.max_kv_len
    window_size = total if window is None else min(window, total)
    if metadata.uniform and window_size == total and (tokens == 1 or tokens == total):
        return None
    device = metadata.past_lens.device
    keys = torch.arange(total, device=device)
    if metadata.uniform:
        query = torch.arange(total - tokens, total, device=device)[None]  # (1, tokens)
    else:
        query = metadata.past_lens[:, None] + torch.arange(tokens, device=device)  # (rows, tokens)
    distance = query[:, :, None] - keys  # (rows, tokens, max_kv_len)
    mask = distance >= 0
    if window_size < total:
        mask &= distance < window_size
    if metadata.mask is not None:
        mask &= metadata.mask[:, None, :]
        mask |= distance == 0
    return mask[:, None]
