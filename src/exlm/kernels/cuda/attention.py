"""Paged decode attention of up to 16 new tokens a row: RoPE, the append to the KV cache and attention in one launch.

attn_decode.cu serves grouped-query heads, attn_decode_mha.cu one query head for each kv head over Hadamard codes. Of
a launch only the grid depends on the rows' lengths, and that on `max_kv_len` alone: a CUDA graph captured with the
longest that rows will ever be stays right while they grow.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ... import spec
from .. import interface as b
from .module_cache import ModuleSource, sizeof_defines
from .prepacked_acts import EpilogueTarget, PackedActs

SOURCE = Path(__file__).with_name("csrc") / "attn_decode.cu"
MHA_SOURCE = Path(__file__).with_name("csrc") / "attn_decode_mha.cu"

MAX_NEW_TOKENS = 16
"""Of a row."""

HEAD_DIMS = (64, 128, 256)

MAX_NARROW_HEAD_DIM = 128
"""Numbers of a head up to which registers hold two n8 tiles of queries, or two blocks of 16 tokens. Of wider heads a
thread block takes eight queries, and others read keys and values again, from L2, for the next eight: 255 registers on
sm_90a, and 15 more that are spilled for float16 pages, 4 for Q8 and none for Q4."""

_MAX_ARRIVALS = 1 << 16
_MAX_PARTIALS_IN_SMEM = 24 << 10  # bytes, for partial results that a thread block combines by itself
_KV_DTYPES: dict[b.KVCacheDtype, int] = {"float": 0, "hadamard8": 1, "hadamard4": 2, "fp8_e5m2": 3}
_LOG2E = 1.4426950408889634


class _AttnParams(ctypes.Structure):
    _fields_ = tuple(
        (name, kind)
        for kind, names in (
            (ctypes.c_void_p, "q k v key value key_scale value_scale page_table past_lens positions"),
            (ctypes.c_void_p, "cos sin mrope_axis mask partials arrivals out"),
            (ctypes.c_longlong, "page_table_stride mask_stride"),
            (ctypes.c_longlong, "q_row_stride q_token_stride k_row_stride k_token_stride v_row_stride v_token_stride"),
            (ctypes.c_longlong, "position_row_stride position_token_stride position_axis_stride"),
            (ctypes.c_int, "tokens blocks_per_row max_splits rope_dim interleaved window"),
            (ctypes.c_int, "partials_in_smem warp_floats"),
            (ctypes.c_float, "score_scale cap"),
            (EpilogueTarget, "target"),
        )
        for name in names.split()
    )


@runtime_checkable
class RopeTables(Protocol):
    """A RoPE function that has its tables, as `triton.norm_rope_act.RopeTables`: the kernel applies RoPE itself."""

    cos: Tensor
    sin: Tensor
    mrope_axis: Tensor
    dim: int
    interleaved: bool


@dataclass(frozen=True)
class SplitConfig:
    """How attention is divided; all but `min_blocks` and `max_waves` decides the order of summation."""

    warps: int = 4  # of a thread block
    kv_m16: int = 1  # blocks of 16 tokens that a warp loads at once
    min_blocks: int = 3  # resident thread blocks of an SM
    min_split: int = 64  # tokens of the smallest split, a multiple of 64
    max_splits: int = 32  # splits of a past; longer pasts have larger ones
    max_waves: int = 64  # waves of thread blocks; with more splits, a thread block takes several


SPLIT_CONFIGS: dict[b.KVCacheDtype, SplitConfig] = {
    "float": SplitConfig(8, min_blocks=1, min_split=128, max_splits=16, max_waves=1),
    "hadamard8": SplitConfig(8, min_blocks=1, min_split=128, max_splits=16, max_waves=1),
    "hadamard4": SplitConfig(8, 2, min_blocks=1, min_split=128, max_splits=16, max_waves=1),
    "fp8_e5m2": SplitConfig(kv_m16=2, max_waves=1),
}
"""The fastest on an H200 (`benchmarks.attention`) by the dtype of keys: one thread block for each SM with eight kv
heads, and few splits to combine."""

SINGLE_QUERY_FLOAT_CONFIG = SplitConfig(max_waves=2)
"""The same for one query of each kv head over floats: there are many heads, so thread blocks are smaller."""

WIDE_SPLIT_CONFIG = SplitConfig(8, min_blocks=1, min_split=128, max_splits=32, max_waves=2)
"""The same for heads of 256 numbers, of which models have few: more splits keep all SMs busy."""

MHA_SPLIT_CONFIGS: dict[b.KVCacheDtype, SplitConfig] = {
    "hadamard8": SplitConfig(min_blocks=2, max_waves=1),
    "hadamard4": SplitConfig(min_blocks=4, max_waves=1),
}
"""The same for attn_decode_mha.cu."""


def default_split_config(pages: b.KVPages, queries: int, head_dim: int) -> SplitConfig:
    """The configuration for so many queries of each kv head."""
    dtype = pages.dtypes[0]
    if head_dim > MAX_NARROW_HEAD_DIM:
        return WIDE_SPLIT_CONFIG
    if uses_mha_kernel(pages, queries, head_dim):
        return MHA_SPLIT_CONFIGS[dtype]
    return SINGLE_QUERY_FLOAT_CONFIG if queries == 1 and dtype == "float" else SPLIT_CONFIGS[dtype]


def uses_mha_kernel(pages: b.KVPages, queries: int, head_dim: int) -> bool:
    """Whether attn_decode_mha.cu serves so many queries of each kv head."""
    return (
        queries == 1 and head_dim <= MAX_NARROW_HEAD_DIM and all(dtype in MHA_SPLIT_CONFIGS for dtype in pages.dtypes)
    )


class SplitCounters:
    """What all layers of a device share: the compiler, and counters that are zero between launches.

    Launches of two streams at a time would mix the counters up: each stream needs its own.
    """

    def __init__(self, modules: ModuleSource, num_sms: int) -> None:
        self.modules = modules
        self.num_sms = num_sms
        self.arrivals = torch.zeros(_MAX_ARRIVALS, dtype=torch.int32, device=modules.device)
        """One for each row, kv head and block of queries."""


@dataclass(frozen=True, eq=False)
class PagedDecodeAttention:
    """One layer's attention; `fallback` takes what the kernels do not support."""

    counters: SplitCounters
    attn: spec.Attention
    rope: b.RopeFn
    fallback: b.AttentionFn
    config: SplitConfig | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        pages = kv.kv_pages
        if pages is None or q.dtype is not torch.float16 or not self.supports(q.shape[0], q.shape[1], kv, metadata):
            return self.fallback(q, k, v, kv, metadata)
        out = torch.empty(*q.shape[:2], q.shape[2] * q.shape[3], dtype=q.dtype, device=q.device)
        self.launch(q, k, v, pages, metadata, out)
        return out

    def supports(self, rows: int, tokens: int, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> bool:
        """Whether the kernels can serve so many new tokens of each row."""
        attn, pages, indices = self.attn, kv.kv_pages, (metadata.past_lens, metadata.page_table, metadata.positions)
        return (
            pages is not None
            and tokens <= MAX_NEW_TOKENS
            and attn.head_dim in HEAD_DIMS
            and (pages.dtypes[0] != "float" or pages.keys[0].dtype is torch.float16)
            and pages.page_size % 64 == 0
            and all(x.dtype is torch.int64 for x in indices)
            and metadata.page_table.stride(1) == 1
            and rows * attn.kv_heads * MAX_NEW_TOKENS * (attn.heads // attn.kv_heads) <= 8 * _MAX_ARRIVALS
        )

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pages: b.KVPages,
        metadata: b.AttnMetadata,
        out: Tensor | None = None,
        packed_out: PackedActs | None = None,
    ) -> None:
        """Attend; the output goes to `out`, or to `packed_out` as the next GEMM's packed activations, or to both."""
        attn, rows, tokens = self.attn, *q.shape[:2]
        tables = self.rope if isinstance(self.rope, RopeTables) else None
        if tables is None:
            q, k = self.rope(q, k, metadata.positions)
        q, k, v = contiguous_heads(q), contiguous_heads(k), contiguous_heads(v)
        head_queries = tokens * (attn.heads // attn.kv_heads)
        config = self.config or default_split_config(pages, head_queries, attn.head_dim)
        mha = uses_mha_kernel(pages, head_queries, attn.head_dim)
        if mha:
            config = replace(config, warps=math.gcd(config.warps, attn.kv_heads))
        n8_tiles = 1 if head_queries <= 8 or attn.head_dim > MAX_NARROW_HEAD_DIM else 2
        queries = min(8 * n8_tiles, head_queries)
        heads = rows * attn.kv_heads * -(-head_queries // (8 * n8_tiles))  # (row, block of queries, kv head)
        max_splits = num_splits(metadata.max_kv_len - tokens, config)
        partial_floats = max_splits * queries * (attn.head_dim + 4)
        partials = q.new_empty(heads * partial_floats, dtype=torch.float32)
        score_scale, cap = score_factors(attn.scale, attn.softcap)
        params = _AttnParams(
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(),
            key=pages.keys[0].data_ptr(), key_scale=pages.keys[-1].data_ptr(),
            value=pages.values[0].data_ptr(), value_scale=pages.values[-1].data_ptr(),
            page_table=metadata.page_table.data_ptr(), past_lens=metadata.past_lens.data_ptr(),
            partials=partials.data_ptr(), arrivals=self.counters.arrivals.data_ptr(),
            page_table_stride=metadata.page_table.stride(0), q_row_stride=q.stride(0), q_token_stride=q.stride(1),
            k_row_stride=k.stride(0), k_token_stride=k.stride(1), v_row_stride=v.stride(0), v_token_stride=v.stride(1),
            tokens=tokens, max_splits=max_splits, window=attn.window or 0, score_scale=score_scale, cap=cap,
        )  # fmt: skip
        if out is not None:
            params.out = out.data_ptr()
        if packed_out is not None:
            params.target = packed_out.target()
        if metadata.mask is not None:
            params.mask, params.mask_stride = metadata.mask.data_ptr(), metadata.mask.stride(0)
        if tables is not None:
            positions = metadata.positions
            params.cos, params.sin = tables.cos.data_ptr(), tables.sin.data_ptr()
            params.rope_dim, params.interleaved = tables.dim, tables.interleaved
            params.positions = positions.data_ptr()
            params.position_row_stride, params.position_token_stride = positions.stride()[-2:]
            if positions.dim() == 3:
                params.mrope_axis, params.position_axis_stride = tables.mrope_axis.data_ptr(), positions.stride(0)
        # Thread blocks, or warps, that share the splits of a head: as many as keep the device busy.
        room = self.counters.num_sms * config.min_blocks * (config.warps if mha else 1)
        params.blocks_per_row = max(1, min(max_splits, room * config.max_waves // heads))
        defines = attn_defines(attn, pages, config, n8_tiles, metadata.mask is not None)
        if mha:
            module, name = self.counters.modules.module(MHA_SOURCE, **defines), "paged_attn_decode_mha"
            smem, grid = mha_smem_bytes(attn.head_dim, pages, config), heads // config.warps
        else:
            module, name = self.counters.modules.module(SOURCE, **defines), "paged_attn_decode"
            params.warp_floats = queries * max(config.warps * attn.head_dim, 2 * max_splits)
            smem, grid = smem_bytes(attn.head_dim, n8_tiles, params.warp_floats, config), heads
            if params.blocks_per_row == 1 and partial_floats * 4 <= _MAX_PARTIALS_IN_SMEM:
                params.partials_in_smem, smem = 1, smem + partial_floats * 4
        module.launch(name, (grid, params.blocks_per_row, 1), config.warps * 32, smem, (params,))


def num_splits(past: int, config: SplitConfig) -> int:
    """Splits of a row, the new tokens included, at most, with a past up to this."""
    return min(-(-past // config.min_split), config.max_splits) + 1


def smem_bytes(head_dim: int, n8_tiles: int, warp_floats: int, config: SplitConfig) -> int:
    """Bytes of attn_decode.cu's `AttnSmem`."""
    return 64 * config.warps * n8_tiles + n8_tiles * 16 * head_dim + warp_floats * 4


def mha_smem_bytes(head_dim: int, pages: b.KVPages, config: SplitConfig) -> int:
    """Bytes of attn_decode_mha.cu's `KvStage`, and of a `WarpSmem` for each warp."""
    bits = sum(4 if dtype == "hadamard4" else 8 for dtype in pages.dtypes)
    stage = 64 * (config.warps * (head_dim * bits // 8 + head_dim // 8) + 64)
    warp_words = 3 * head_dim + head_dim // 2 + head_dim // 16 + config.max_splits + 1
    return stage + config.warps * -(-warp_words // 4) * 16


def attn_defines(
    attn: spec.Attention, pages: b.KVPages, config: SplitConfig, n8_tiles: int, masked: bool
) -> dict[str, int]:
    """The -D constants of both sources."""
    return {
        "HEAD_DIM": attn.head_dim,
        "KV_HEADS": attn.kv_heads,
        "GQA_GROUP": attn.heads // attn.kv_heads,
        "PAGE_SIZE": pages.page_size,
        "K_DTYPE": _KV_DTYPES[pages.dtypes[0]],
        "V_DTYPE": _KV_DTYPES[pages.dtypes[1]],
        "N8_TILES": n8_tiles,
        "WARPS": config.warps,
        "KV_M16": config.kv_m16,
        "MIN_BLOCKS": config.min_blocks if n8_tiles == 1 else 1,  # two tiles of accumulators need all registers
        "MIN_SPLIT": config.min_split,
        "MAX_SPLITS": config.max_splits,
        "SOFTCAP": int(attn.softcap is not None),
        "HAS_MASK": int(masked),
        **sizeof_defines(AttnParams=_AttnParams),
    }


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`score_scale` and `cap`: scores are exponents of 2."""
    return (scale * _LOG2E, 1.0) if softcap is None else (scale / softcap, softcap * _LOG2E)


def contiguous_heads(x: Tensor) -> Tensor:
    """The heads of a token contiguous, and 16 bytes aligned, as the kernels read them; tokens may be apart."""
    aligned = x.data_ptr() % 16 == x.stride(0) % 8 == x.stride(1) % 8 == 0
    fits = aligned and x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if fits else x.clone(memory_format=torch.contiguous_format)
