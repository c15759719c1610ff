"""Softmax attention over every key a query may see, for any cache: the meaning of all attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import KeyValues, Rotation, Where


@dataclass(frozen=True)
class Attend:
    """Turn, store the new keys and values, then let each query look back."""

    rotate: Rotation
    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: KeyValues, where: Where) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        q, k = self.rotate(q, k, where.positions)
        keys, values = kv.update(k, v, where)
        seen = visible(q.shape[1], where, self.window)
        attend = self._plain if self.softcap is None else self._capped
        y = attend(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), seen)
        return y.transpose(1, 2).flatten(2)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        causal = seen is None and q.shape[2] > 1
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=causal, scale=self.scale, enable_gqa=shared
        )

    def _capped(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        assert self.softcap is not None
        if seen is None:
            shape = (q.shape[2], k.shape[2])
            seen = torch.ones(shape, dtype=torch.bool, device=q.device).tril(shape[1] - shape[0])
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = (q @ k.transpose(2, 3)).float() * self.scale
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~seen, float("-inf"))
        return scores.softmax(-1).to(v.dtype) @ v


def visible(tokens: int, where: Where, window: int | None) -> Tensor | None:
    """(rows or 1, 1, tokens, longest) which keys each query sees; None where plain causality says it all.

    A query always sees itself: padding that saw nothing would turn into NaN and spoil its neighbours.
    """
    total = where.max_kv_len
    reach = total if window is None else min(window, total)
    if where.uniform and reach == total and (tokens == 1 or tokens == total):
        return None
    device = where.past_lens.device
    keys = torch.arange(total, device=device)
    if where.uniform:
        query = torch.arange(total - tokens, total, device=device)[None]  # (1, tokens)
    else:
        query = where.past_lens[:, None] + torch.arange(tokens, device=device)  # (rows, tokens)
    distance = query[:, :, None] - keys  # (rows, tokens, longest)
    seen = distance >= 0
    if reach < total:
        seen &= distance < reach
    if where.mask is not None:
        seen &= where.mask[:, None, :]
        seen |= distance == 0
    return seen[:, None]
