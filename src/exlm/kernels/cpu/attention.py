"""Paged attention and RoPE as C calls: rotate, store the new keys and values, attend.

The reference computes the calls that C cannot: attention masks, decode over fp8 pages (C has prefill for
those), keys and values of different kinds otherwise, and heads that a Hadamard transform would reach across.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import spec
from ..interface import AttentionFn, AttnMetadata, KVCacheDtype, KVPages, LayerKVCache
from ..reference import RotaryEmbedding
from .bindings import AttnArgs, AttnParams, BatchArgs, Library, QuantKV

_QUANT_BITS: dict[KVCacheDtype, int] = {"hadamard8": 8, "hadamard4": 4, "fp8_e5m2": 1}
"""The values of QuantKV.bits (csrc/attn_common.h); 1 stands for FP8."""

_MAX_DECODE_TOKENS = 8
"""With more new tokens for each row C uses its prefill kernel (csrc/attn_common.h)."""


class CpuRotaryEmbedding(RotaryEmbedding):
    """RoPE with the reference's tables of sines and cosines, applied by C to contiguous float32."""

    def __init__(self, rope: spec.Rope, length: int, device: torch.device, library: Library) -> None:
        super().__init__(rope, length, device)
        self.interleaved = rope.style != "neox"
        self._rope = library.rope
        self._params: dict[int, AttnParams] = {}  # by head_dim

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, tokens, heads, head_dim) twice → the same, the first `dim` numbers of each head rotated."""
        has_c_dtypes = q.dtype is k.dtype is torch.float32 and positions.dtype is torch.int64
        if not has_c_dtypes or not positions.shape == q.shape[:2] == k.shape[:2] or not positions.numel():
            return super().__call__(q, k, positions)
        low, high = positions.aminmax()
        if low < 0 or high >= len(self.cos):
            raise IndexError(f"positions {low} to {high} are not all in 0 to {len(self.cos) - 1}")
        positions = positions.contiguous()
        return self._rotate(q.contiguous(), positions), self._rotate(k.contiguous(), positions)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        heads, head_dim = x.shape[2:]
        if head_dim not in self._params:
            tables = {"cos": self.cos.data_ptr(), "sin": self.sin.data_ptr()}
            self._params[head_dim] = AttnParams(
                **tables, head_dim=head_dim, rope_dim=self.dim, interleaved=int(self.interleaved)
            )
        out = torch.empty_like(x)
        inputs = ctypes.addressof(self._params[head_dim]), x.data_ptr(), positions.data_ptr()
        self._rope(*inputs, positions.numel(), heads, out.data_ptr(), torch.get_num_threads())
        return out


@dataclass(frozen=True, eq=False)
class NoRotation:
    """The tables of attention without positions (NoPE): no dimension is rotated."""

    cos: Tensor = field(default_factory=lambda: torch.ones(1))
    sin: Tensor = field(default_factory=lambda: torch.zeros(1))
    dim: int = 0
    interleaved: bool = False


class BatchArgsCache:
    """Keeps a step's BatchArgs, so that they are made once for all layers."""

    def __init__(self) -> None:
        self._last: tuple[AttnMetadata, BatchArgs | None] | None = None

    def get(self, metadata: AttnMetadata) -> BatchArgs | None:
        """Pages, past lengths and positions as C takes them; None if it cannot take them."""
        last = self._last
        if last is None or last[0] is not metadata:
            self._last = last = metadata, _batch_args(metadata)
        return last[1]


def _batch_args(metadata: AttnMetadata) -> BatchArgs | None:
    pages, past, positions = metadata.page_table, metadata.past_lens, metadata.positions
    if metadata.mask is not None or positions.dim() != 2 or pages.stride(1) != 1:
        return None
    if not (pages.dtype is past.dtype is positions.dtype is torch.int64):
        return None
    if not (past.is_contiguous() and positions.is_contiguous()):
        return None
    return BatchArgs(pages.data_ptr(), past.data_ptr(), positions.data_ptr(), *positions.shape, pages.stride(0))


class PagedAttention:
    """Causal softmax attention over the pages of a KV cache."""

    def __init__(
        self,
        library: Library,
        attn: spec.Attention,
        rope: CpuRotaryEmbedding | NoRotation,
        batch_args: BatchArgsCache,
        fallback: AttentionFn,
    ) -> None:
        self._attention = library.attention
        self.batch_args = batch_args
        self._fallback = fallback
        self._rope = rope  # holds the memory of its tables
        self._width = attn.heads * attn.head_dim
        self._hadamard_interleave = 2 if attn.kv_heads * attn.head_dim % 64 == 0 else 1
        self._hadamard_fits_head = attn.head_dim % (32 * self._hadamard_interleave) == 0
        self._params = AttnParams(
            cos=rope.cos.data_ptr(),
            sin=rope.sin.data_ptr(),
            heads=attn.heads,
            kv_heads=attn.kv_heads,
            head_dim=attn.head_dim,
            rope_dim=rope.dim,
            interleaved=int(rope.interleaved),
            window=attn.window or 0,
            scale=attn.scale,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKVCache, metadata: AttnMetadata) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        pages, batch = kv.kv_pages, self.batch_args.get(metadata)
        args = None if pages is None or batch is None else self.layer_args(pages, q.shape[1])
        if args is None or batch is None:
            return self._fallback(q, k, v, kv, metadata)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty(*q.shape[:2], self._width)
        args.q, args.k, args.v, args.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        args.pages, args.past_lens, args.positions = batch.pages, batch.past_lens, batch.positions
        args.rows, args.tokens, args.page_stride = batch.rows, batch.tokens, batch.page_stride
        self._attention(ctypes.byref(args), metadata.max_kv_len, torch.get_num_threads())
        return out

    def layer_args(self, pages: KVPages, tokens: int) -> AttnArgs | None:
        """The arguments of a call without q, k, v and the batch; None if C cannot do it."""
        args = AttnArgs(
            params=ctypes.addressof(self._params),
            page_size=pages.page_size,
            hadamard_interleave=self._hadamard_interleave,
        )
        key_dtype, value_dtype = pages.dtypes
        keys, values = pages.keys, pages.values
        if key_dtype == value_dtype == "float":
            if keys[0].dtype not in (torch.float32, torch.float16):
                return None
            args.keys, args.values = keys[0].data_ptr(), values[0].data_ptr()
            args.kv_f16 = keys[0].dtype is torch.float16
            return args
        if key_dtype not in _QUANT_BITS or value_dtype not in _QUANT_BITS:
            return None
        if tokens <= _MAX_DECODE_TOKENS and "fp8_e5m2" in pages.dtypes:
            return None
        if not self._hadamard_fits_head and pages.dtypes != ("fp8_e5m2", "fp8_e5m2"):
            return None
        args.quant_keys = QuantKV(keys[0].data_ptr(), keys[-1].data_ptr(), _QUANT_BITS[key_dtype])
        args.quant_values = QuantKV(values[0].data_ptr(), values[-1].data_ptr(), _QUANT_BITS[value_dtype])
        return args
