"""Paged attention: choose the kernel and its block sizes for each call, and launch it.

One new token a row with one query for each kv head (MHA) runs `decode_simt`; up to MAX_NEW_TOKENS new tokens
run `decode`; more run `prefill`. A quantised cache whose Hadamard transforms reach over several heads is
left to the reference. Block sizes are those that `benchmarks.attention` measured as fastest on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ... import spec
from .. import interface
from ..reference import ReferenceAttention
from . import decode, decode_simt, kv_quant, prefill
from .decode import KVSplit
from .kv_quant import KVLayout
from .norm_rope_act import RopeLayout, RopeTables, contiguous_heads, position_strides
from .online_softmax import ScoreLayout, score_scales


class DeviceLimits(NamedTuple):
    """What grids and block sizes depend on."""

    num_sms: int
    shared_memory: int  # bytes that a program may have

    @classmethod
    def of(cls, device: torch.device) -> DeviceLimits:
        """A GPU's own; small ones for a CPU, which only interprets kernels."""
        if device.type != "cuda":
            return cls(2, 1 << 16)
        found = torch.cuda.get_device_properties(device)
        return cls(found.multi_processor_count, found.shared_memory_per_block_optin)  # type: ignore[attr-defined]


# A program of `decode_simt` is one warp, of `decode` four, so its chunks are half as long.
SIMT_SPLIT, MMA_SPLIT = KVSplit(MAX_CHUNKS=64, CHUNK_ALIGN=32), KVSplit(MAX_CHUNKS=32, CHUNK_ALIGN=64)


class BlockConfig(NamedTuple):
    """Block sizes and launch options of a tensor-core kernel."""

    BLOCK_M: int  # queries
    BLOCK_N: int  # keys of a tile
    num_warps: int
    num_stages: int


def decode_blocks(queries: int, block_d: int, itemsize: int, quantized: bool, deep_pipeline: bool) -> BlockConfig:
    """For `queries` (tokens x queries per kv head) of a row, of `block_d` numbers of `itemsize` bytes.

    `deep_pipeline` prefetches more tiles, for which fewer programs fit on an SM. It changes no bit of the
    output.
    """
    block_m = min(32 if quantized else 64, max(16, triton.next_power_of_2(queries)))
    return BlockConfig(block_m, 64 if block_d * itemsize <= 256 else 32, 4, 5 if deep_pipeline else 2)


def prefill_blocks(block_d: int, itemsize: int, shared_memory: int) -> BlockConfig:
    """For heads of `block_d` numbers of `itemsize` bytes."""
    if itemsize == 4:
        return BlockConfig(32, 32 if block_d <= 128 else 16, 4, 1)
    if block_d > 128:
        if shared_memory > 200_000:
            return BlockConfig(128, 64, 8, 2)
        return BlockConfig(64, 32, 4, 1 if shared_memory < 110_000 else 2)
    return BlockConfig(64, 64, 4, 3 if shared_memory > 140_000 or block_d <= 64 else 2)


@dataclass(frozen=True, eq=False)
class PagedAttention:
    """RoPE, append to the KV cache, attend."""

    attn: spec.Attention
    rope: interface.RopeFn
    limits: DeviceLimits

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: interface.LayerKVCache, metadata: interface.AttnMetadata
    ) -> Tensor:
        """(rows, tokens, heads, head_dim) q, k, v → (rows, tokens, heads · head_dim)."""
        with torch.cuda.device_of(q):
            return self._attend(q, k, v, kv, metadata)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: interface.LayerKVCache, metadata: interface.AttnMetadata
    ) -> Tensor:
        a, pages = self.attn, kv.kv_pages
        if pages is not None and not self._supports(pages):
            return ReferenceAttention(self.rope, a.scale, a.window, a.softcap)(q, k, v, kv, metadata)
        tables = self.rope if isinstance(self.rope, RopeTables) else None
        if pages is None or tables is None:
            q, k = self.rope(q, k, metadata.positions)
            tables = None
        q, k, v = contiguous_heads(q), contiguous_heads(k), contiguous_heads(v)
        launch = AttentionLaunch(self, q, k, v, metadata, tables)
        if pages is None:
            return launch.flash_attn(q, k, v, None, 0)
        if q.shape[1] > decode.MAX_NEW_TOKENS.value:
            return launch.prefill(pages)
        if pages.dtypes[0] != "float":
            appended = launch.rope_append_kv(pages, cache_space=True)
            launch = AttentionLaunch(self, *appended, metadata, None, out_dtype=q.dtype)
        return launch.decode(pages)

    def _supports(self, pages: interface.KVPages) -> bool:
        """Whether each head holds whole runs of interleaved transforms, as the kernels need it."""
        run = 32 * num_interleaved(self.attn)
        return not pages.dtypes[0].startswith("hadamard") or self.attn.head_dim % run == 0


def num_interleaved(attn: spec.Attention) -> int:
    """Hadamard transforms interleaved in a token's codes, for which all its heads are one vector."""
    return 2 if attn.kv_heads * attn.head_dim % 64 == 0 else 1


class AttentionLaunch:
    """One call: its tensors, and the arguments that its kernels share."""

    def __init__(
        self,
        attention: PagedAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: interface.AttnMetadata,
        rope: RopeTables | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.attn, self.limits = attention.attn, attention.limits
        self.out_dtype = out_dtype or q.dtype
        self.q, self.k, self.v, self.metadata = q, k, v, metadata
        self.rows, self.tokens = q.shape[:2]
        self.block_d = max(32, triton.next_power_of_2(self.attn.head_dim))
        self.q_per_kv = self.attn.heads // self.attn.kv_heads
        self.window = self.attn.window or 0
        self.score_scale, self.cap_scale = score_scales(self.attn.scale, self.attn.softcap)
        self.mask = q if metadata.mask is None else metadata.mask.view(torch.uint8)
        self.mask_stride = 0 if metadata.mask is None else metadata.mask.stride(0)
        positions = metadata.positions
        self.rope_tables = (q, q, q, positions) if rope is None else (rope.cos, rope.sin, rope.mrope_axis, positions)
        self.strides = tuple(x.stride(i) for x in (q, k, v) for i in (0, 1))
        self.rope_layout = RopeLayout() if rope is None else rope.layout(positions)
        self.score_layout = ScoreLayout(
            self.attn.window is not None, self.attn.softcap is not None, metadata.mask is not None
        )

    def decode(self, pages: interface.KVPages) -> Tensor:
        """A few new tokens: partials of all chunks, then their combination."""
        a, rows, tokens = self.attn, self.rows, self.tokens
        simt = tokens == 1 and self.q_per_kv == 1
        split = SIMT_SPLIT if simt else MMA_SPLIT
        count = rows * tokens * a.heads * split.MAX_CHUNKS
        buffer = torch.empty(count * (a.head_dim + 2), dtype=torch.float32, device=self.q.device)
        partials = buffer[:count], buffer[count : 2 * count], buffer[2 * count :]  # max, sum, accumulator
        if simt:
            self._decode_simt(pages, partials)
        else:
            self._split_kv(pages, partials)
        out = torch.empty(rows, tokens, a.heads * a.head_dim, dtype=self.out_dtype, device=self.q.device)
        decode.combine_kernel[(rows * tokens * a.heads,)](
            *partials, self.metadata.past_lens, out, tokens, self.window,
            Q_HEADS=a.heads, HEAD_DIM=a.head_dim, BLOCK_D=self.block_d,
            UNDO_HADAMARD=pages.dtypes[0].startswith("hadamard"), NUM_HADAMARD=num_interleaved(a),
            HAS_WINDOW=self.score_layout.HAS_WINDOW, SPLIT=split,
        )  # fmt: skip
        return out

    def _decode_simt(self, pages: interface.KVPages, partials: tuple[Tensor, Tensor, Tensor]) -> None:
        programs, page_table = self.rows * self.attn.kv_heads, self.metadata.page_table
        programs_per_head = self._programs_per_head(programs, pages, SIMT_SPLIT)
        pos_row_stride, _, pos_axis_stride = position_strides(self.metadata.positions)
        decode_simt.decode_simt_kernel[(programs, programs_per_head)](
            self.q, self.k, self.v, *cache_tensors(pages), page_table, self.metadata.past_lens, self.mask,
            *self.rope_tables, *partials, programs_per_head, page_table.stride(0), self.mask_stride,
            *self.strides[::2], pos_row_stride, pos_axis_stride, self.score_scale, self.cap_scale,
            self.window,
            KV=self._kv_layout(pages), ROPE=self.rope_layout, SCORE=self.score_layout, SPLIT=SIMT_SPLIT,
            BLOCK_N=1024 // self.block_d, num_warps=1, num_stages=1,
        )  # fmt: skip

    def _split_kv(self, pages: interface.KVPages, partials: tuple[Tensor, Tensor, Tensor]) -> None:
        a, page_table, limits = self.attn, self.metadata.page_table, self.limits
        queries, quantized = self.q_per_kv * self.tokens, pages.dtypes[0] != "float"
        few_programs = self.rows * a.kv_heads < limits.num_sms
        deep_pipeline = not quantized and few_programs and limits.shared_memory > 140_000
        blocks = decode_blocks(queries, self.block_d, self.q.dtype.itemsize, quantized, deep_pipeline)
        programs = self.rows * a.kv_heads * -(-queries // blocks.BLOCK_M)
        programs_per_head = self._programs_per_head(programs, pages, MMA_SPLIT)
        decode.split_kv_kernel[(programs, programs_per_head)](
            self.q, self.k, self.v, *cache_tensors(pages), page_table, self.metadata.past_lens, self.mask,
            *self.rope_tables, *partials, self.tokens, programs_per_head, page_table.stride(0), self.mask_stride,
            *self.strides, *position_strides(self.metadata.positions), self.score_scale,
            self.cap_scale, self.window,
            Q_PER_KV=self.q_per_kv, KV=self._kv_layout(pages), ROPE=self.rope_layout, SCORE=self.score_layout,
            SPLIT=MMA_SPLIT, **blocks._asdict(),
        )  # fmt: skip

    def _kv_layout(self, pages: interface.KVPages) -> KVLayout:
        a = self.attn
        return KVLayout(
            a.kv_heads, a.head_dim, self.block_d, pages.page_size, *pages.dtypes, NUM_HADAMARD=num_interleaved(a)
        )

    def _programs_per_head(self, programs: int, pages: interface.KVPages, split: KVSplit) -> int:
        """Programs that share a row's chunks: enough to fill the GPU, if rows are as long as they can be."""
        max_tokens = self.metadata.page_table.shape[1] * pages.page_size
        most = min(split.MAX_CHUNKS, max_tokens // split.CHUNK_ALIGN + 1)
        return max(1, min(most, self.limits.num_sms * 32 // programs))

    def rope_append_kv(self, pages: interface.KVPages, cache_space: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Apply RoPE, write k and v to the cache; return q, k, v.

        With `cache_space` these are Hadamard-transformed where the cache's codes are.
        """
        a, rows, tokens = self.attn, self.rows, self.tokens
        dtype = torch.float16 if cache_space and self.q.dtype != torch.float32 else self.q.dtype
        inputs = (self.q, self.k, self.v) if cache_space else (self.q, self.k)
        q, k, *v = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in inputs)
        block_t = min(16, triton.next_power_of_2(tokens))
        kv_quant.rope_append_kv_kernel[(-(-tokens // block_t), a.heads + 2 * a.kv_heads, rows)](
            self.q, self.k, self.v, q, k, v[0] if v else q, *cache_tensors(pages), self.metadata.page_table,
            self.metadata.past_lens, *self.rope_tables, tokens, self.metadata.page_table.stride(0), *self.strides,
            *position_strides(self.metadata.positions),
            Q_HEADS=a.heads, KV=self._kv_layout(pages), ROPE=self.rope_layout, BLOCK_T=block_t,
            CACHE_SPACE=cache_space, num_warps=1 if block_t == 1 else 4,
        )  # fmt: skip
        return q, k, v[0] if v else self.v

    def prefill(self, pages: interface.KVPages) -> Tensor:
        """Many new tokens: RoPE and append, dequantise the past of a quantised cache, attend."""
        a, rows, tokens, length = self.attn, self.rows, self.tokens, self.metadata.max_kv_len
        q, k, _ = self.rope_append_kv(pages, cache_space=False)
        quantized, no_past = pages.dtypes[0] != "float", self.metadata.uniform and length == tokens
        if no_past and (quantized or pages.keys[0].dtype == k.dtype):
            return self.flash_attn(q, k, self.v, None, 0)
        if not quantized:
            keys, values = pages.keys[0].flatten(0, 1), pages.values[0].flatten(0, 1)
            return self.flash_attn(q, keys, values, self.metadata.page_table, pages.page_size)
        keys, values = (k.new_empty(rows, length, a.kv_heads, a.head_dim) for _ in "kv")
        kv_quant.dequantize_kv_kernel[(-(-length // 64), 2 * a.kv_heads, rows)](
            *cache_tensors(pages), self.metadata.page_table, keys, values, self.metadata.page_table.stride(0), length,
            KV=self._kv_layout(pages), BLOCK_N=64,
        )  # fmt: skip
        new_columns = self.metadata.past_lens[:, None] + torch.arange(tokens, device=k.device)
        row = torch.arange(rows, device=k.device)[:, None]
        keys[row, new_columns], values[row, new_columns] = k, self.v
        return self.flash_attn(q, keys, values, None, 0)

    def flash_attn(self, q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, page_size: int) -> Tensor:
        """All queries over keys in pages, (slots, kv_heads, head_dim), or in contiguous rows."""
        a = self.attn
        out = torch.empty(self.rows, self.tokens, a.heads * a.head_dim, dtype=q.dtype, device=q.device)
        blocks = prefill_blocks(self.block_d, q.dtype.itemsize, self.limits.shared_memory)
        kv_strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        if page_size:
            kv_strides = (0, k.stride(0), 0, v.stride(0))
        prefill.flash_attn_kernel[(-(-self.tokens // blocks.BLOCK_M), a.heads, self.rows)](
            q, k, v, q if page_table is None else page_table, self.metadata.past_lens, self.mask, out,
            self.tokens, 0 if page_table is None else page_table.stride(0), self.mask_stride, q.stride(0),
            q.stride(1), *kv_strides, self.score_scale, self.cap_scale, self.window,
            Q_PER_KV=self.q_per_kv, KV=KVLayout(a.kv_heads, a.head_dim, self.block_d, page_size),
            SCORE=self.score_layout, **blocks._asdict(),
        )  # fmt: skip
        return out


def cache_tensors(pages: interface.KVPages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, their scales, values, their scales; a cache without scales passes the stored numbers twice."""
    return pages.keys[0], pages.keys[-1], pages.values[0], pages.values[-1]
