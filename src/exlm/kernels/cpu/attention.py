"""Attention of a few new tokens, in one call: turn, store, look back over float pages.

Prompts, hidden keys, coded caches and three-plane positions are left to the reference.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ... import spec
from ..backend import Attend, KeyValues, Where
from ..reference.rope import Rotation
from .library import Call, Layer, Library, check

FEW = 4
"""New tokens of a row up to which this is faster than torch's kernel for many."""


class TurningTables(Rotation):
    """The reference's tables, and how they are applied."""

    def __init__(self, rope: spec.Rope, length: int, device: torch.device) -> None:
        super().__init__(rope, length, device)
        self.pairs = rope.style != "neox"


class PagedAttention:
    """Softmax over every key up to the query's own, in the order they lie."""

    def __init__(self, library: Library, attn: spec.Attention, rotate: TurningTables, other: Attend) -> None:
        self._attend = library.attend
        self._other = other
        self._rotate = rotate  # holds the tables
        self._width = attn.heads * attn.head_dim
        self._layer = Layer(
            cos=rotate.cos.data_ptr(),
            sin=rotate.sin.data_ptr(),
            heads=attn.heads,
            kv_heads=attn.kv_heads,
            head_dim=attn.head_dim,
            turned=rotate.dim,
            pairs=int(rotate.pairs),
            window=attn.window or 0,
            scale=attn.scale,
        )
        self._address = ctypes.addressof(self._layer)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: KeyValues, where: Where) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        rows, tokens = q.shape[:2]
        pages = kv.paged if tokens <= FEW else None
        if pages is None or not self._fits(pages.keys[0], pages.coding, where):
            return self._other(q, k, v, kv, where)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        table, past, positions = where.pages, where.past.contiguous(), where.positions.contiguous()
        out = torch.empty(rows, tokens, self._width)
        call = Call(
            *(self._address, q.data_ptr(), k.data_ptr(), v.data_ptr()),
            *(pages.keys[0].data_ptr(), pages.values[0].data_ptr()),
            *(table.data_ptr(), past.data_ptr(), positions.data_ptr(), out.data_ptr(), None),
            *(0, rows, tokens, pages.size, table.stride(0)),
        )
        check(self._attend(call, where.longest, torch.get_num_threads()))
        return out

    def _fits(self, keys: Tensor, coding: tuple[str, str], where: Where) -> bool:
        return (
            keys.dtype is torch.float32
            and coding == ("float", "float")
            and where.mask is None
            and where.positions.dim() == 2
            and where.pages.dtype is where.past.dtype is where.positions.dtype is torch.int64
            and where.pages.stride(1) == 1
        )
