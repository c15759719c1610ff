"""Attention in one call: turn, store, look back over pages of floats or codes.

Hidden keys, few tokens over truncated codes, and three-plane positions are left to the reference.
"""

from __future__ import annotations

import ctypes
from struct import Struct

import torch
from torch import Tensor

from ... import spec
from ..interface import AttentionFn, AttnMetadata, KVCacheDtype, KVPages, LayerKVCache
from ..reference import RotaryEmbedding
from .bindings import AttnParams, Library, check

_CALL = Struct("11Pq5i4x")  # what C calls a Call
_CODES = Struct("2Pq2Pqq")  # what follows it in a CodedCall
FLOATS = bytes(_CODES.size)
"""What follows it where nothing is coded."""

CODED = _CALL.size + _CODES.size
"""Bytes of a CodedCall."""

_BITS: dict[KVCacheDtype, int] = {"hadamard8": 8, "hadamard4": 4, "fp8_e5m2": 1}
_MAX_DECODE_TOKENS = 8  # new tokens of a row up to which no truncated codes are taken
_NARROW = {torch.float32: 0, torch.float16: 1}


class RopeTables(RotaryEmbedding):
    """The reference's tables, and how they are applied; where C can, by C."""

    def __init__(self, rope: spec.Rope, length: int, device: torch.device, library: Library) -> None:
        super().__init__(rope, length, device)
        self.interleaved = rope.style != "neox"
        self._rope = library.rope
        self._params: dict[int, AttnParams] = {}  # for each width of heads

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Heads in, heads out; only the first `dim` of each head turn."""
        plain = q.dtype is k.dtype is torch.float32 and positions.dtype is torch.int64
        if not plain or not positions.shape == q.shape[:2] == k.shape[:2] or not positions.numel():
            return super().__call__(q, k, positions)
        least, most = positions.aminmax()
        if least < 0 or most >= len(self.cos):
            raise IndexError(f"positions {least} to {most} are not all in 0 to {len(self.cos) - 1}")
        positions = positions.contiguous()
        return self._apply_in_c(q.contiguous(), positions), self._apply_in_c(k.contiguous(), positions)

    def _apply_in_c(self, x: Tensor, positions: Tensor) -> Tensor:
        heads, width = x.shape[2:]
        if width not in self._params:
            tables = {"cos": self.cos.data_ptr(), "sin": self.sin.data_ptr()}
            self._params[width] = AttnParams(
                **tables, head_dim=width, turned=self.dim, pairs=int(self.interleaved)
            )
        out = torch.empty_like(x)
        self._rope(
            *(ctypes.addressof(self._params[width]), x.data_ptr(), positions.data_ptr(), positions.numel()),
            *(heads, out.data_ptr(), torch.get_num_threads()),
        )
        return out


Pointers = tuple[int, int, int, int]
NULL_POINTERS: Pointers = (0, 0, 0, 0)


class BatchPointers:
    """Where the tokens of a step stand, as C is told: worked out once for all layers of a step."""

    def __init__(self) -> None:
        self._last: tuple[AttnMetadata, Pointers | None] | None = None

    def of(self, metadata: AttnMetadata) -> Pointers | None:
        """Pages, pasts, positions, and the step between rows of the first; None if C cannot take them."""
        last = self._last
        if last is None or last[0] is not metadata:
            self._last = last = metadata, self._pointers(metadata)
        return last[1]

    @staticmethod
    def _pointers(metadata: AttnMetadata) -> Pointers | None:
        table, past, positions = metadata.pages, metadata.past_lens, metadata.positions
        if metadata.mask is not None or positions.dim() != 2 or table.stride(1) != 1:
            return None
        if not (table.dtype is past.dtype is positions.dtype is torch.int64):
            return None
        if not (past.is_contiguous() and positions.is_contiguous()):
            return None
        return table.data_ptr(), past.data_ptr(), positions.data_ptr(), table.stride(0)


class PagedAttention:
    """Softmax over every key up to the query's own, in the order they lie."""

    def __init__(
        self,
        library: Library,
        attn: spec.Attention,
        rotate: RopeTables,
        batch_pointers: BatchPointers,
        other: AttentionFn,
    ) -> None:
        self._attention = library.attention
        self._attention_q = library.attention_q
        self.batch_pointers = batch_pointers
        self._other = other
        self._rotate = rotate  # holds the tables
        self._width = attn.heads * attn.head_dim
        self._hadamard_interleave = 2 if attn.kv_heads * attn.head_dim % 64 == 0 else 1
        self._quantizable = (
            attn.head_dim % (32 * self._hadamard_interleave) == 0
        )  # no transform reaches into the next head
        self._params = AttnParams(
            cos=rotate.cos.data_ptr(),
            sin=rotate.sin.data_ptr(),
            heads=attn.heads,
            kv_heads=attn.kv_heads,
            head_dim=attn.head_dim,
            turned=rotate.dim,
            pairs=int(rotate.interleaved),
            window=attn.window or 0,
            scale=attn.scale,
        )
        self._address = ctypes.addressof(self._params)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKVCache, metadata: AttnMetadata) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        rows, tokens = q.shape[:2]
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty(rows, tokens, self._width)
        heads = q.data_ptr(), k.data_ptr(), v.data_ptr()
        pages, places = kv.paged, self.batch_pointers.of(metadata)
        call = None
        if pages is not None and places is not None:
            call = self.call(heads, out.data_ptr(), rows, tokens, pages, places)
        if call is None:
            return self._other(q, k, v, kv, metadata)
        attend = self._attention if len(call) == _CALL.size else self._attention_q
        check(attend(call, metadata.max_kv_len, torch.get_num_threads()))
        return out

    def call(
        self, heads: tuple[int, int, int], out: int, rows: int, tokens: int, pages: KVPages, places: Pointers
    ) -> bytes | None:
        """What C is told, given the places of q, k, v and of the answer; None if it cannot do this."""
        table, past, positions, stride = places
        rest = table, past, positions, out, 0, 0, rows, tokens, pages.page_size, stride
        keys, values = pages.keys, pages.values
        coding, other = pages.dtypes
        if coding == "float":
            if other != "float" or keys[0].dtype not in _NARROW:
                return None
            own = keys[0].data_ptr(), values[0].data_ptr()
            return _CALL.pack(self._address, *heads, *own, *rest, _NARROW[keys[0].dtype])
        if coding not in _BITS or other not in _BITS:
            return None
        if tokens <= _MAX_DECODE_TOKENS and "fp8_e5m2" in pages.dtypes:
            return None
        if not self._quantizable and pages.dtypes != ("fp8_e5m2", "fp8_e5m2"):
            return None
        return _CALL.pack(self._address, *heads, 0, 0, *rest, 0) + _CODES.pack(
            *(keys[0].data_ptr(), keys[-1].data_ptr(), _BITS[coding]),
            *(values[0].data_ptr(), values[-1].data_ptr(), _BITS[other], self._hadamard_interleave),
        )
