"""Attention of a few new tokens over pages, one launch for a layer: turn, store and attend.

Nothing in a launch depends on the rows' lengths but the grid, and that on `longest` alone: a graph may be
captured with the longest its rows will ever be, and replayed while they grow up to it. What the kernel does
not take (many tokens at once, odd heads, other caches) goes another way, given at the start.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ... import spec
from .. import interface as b
from .prepacked import EpilogueTarget, PackedActs

SOURCE = Path(__file__).with_name("csrc") / "attn_decode.cu"
MHA_SOURCE = Path(__file__).with_name("csrc") / "attn_decode_mha.cu"
"""Where each kv head has one query."""

NEW = 16
"""The most new tokens of a row."""

HEAD_DIMS = (64, 128)
"""Widths of heads that the lanes of a warp can share."""

_COUNTS = 1 << 16
_NEARBY = 24 << 10  # bytes of shared memory for chunks that nobody else will ask for
_CODINGS: dict[b.KVCacheDtype, int] = {"float": 0, "hadamard8": 1, "hadamard4": 2, "fp8_e5m2": 3}


class _Job(ctypes.Structure):
    _fields_ = tuple(
        (name, kind)
        for kind, names in (
            (ctypes.c_void_p, "q k v key value key_scale value_scale table past positions cos sin planes mask"),
            (ctypes.c_void_p, "left counts out"),
            (ctypes.c_longlong, "table_step mask_step q_row q_token k_row k_token v_row v_token"),
            (ctypes.c_longlong, "place_row place_token place_plane"),
            (ctypes.c_int, "tokens parts slots dim pairs window inside rooms"),
            (ctypes.c_float, "factor cap"),
            (EpilogueTarget, "heir"),
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


class CompiledModule(Protocol):
    """A compiled program."""

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: Any) -> None:
        """Start a kernel."""
        ...


class ModuleSource(Protocol):
    """Who compiles: a `ModuleCache`."""

    device: torch.device

    def module(self, source: Path, **defines: int) -> CompiledModule:
        """A source with its choices made."""
        ...


@dataclass(frozen=True)
class SplitConfig:
    """How attention is dealt out; but for residents and waves, all of it decides roundings."""

    warps: int = 4  # of a thread block
    steps: int = 1  # sixteens of tokens that a warp has on their way at once
    resident: int = 3  # thread blocks for which a multiprocessor must have registers
    unit: int = 64  # tokens of the smallest chunk, a multiple of 64
    slots: int = 32  # chunks up to which a past is cut into smallest ones
    waves: int = 64  # thread blocks for each that fits, before one takes several chunks


SPLIT_CONFIGS: dict[b.KVCacheDtype, SplitConfig] = {
    "float": SplitConfig(8, resident=1, unit=128, slots=16, waves=1),
    "hadamard8": SplitConfig(8, resident=1, unit=128, slots=16, waves=1),
    "hadamard4": SplitConfig(8, 2, resident=1, unit=128, slots=16, waves=1),
    "fp8_e5m2": SplitConfig(steps=2, waves=1),
}
"""By the coding of the keys, what was quickest on an H200 (`benchmarks.attention`): a thread block for each
multiprocessor where there are eight kv heads, and few chunks to add up."""

MHA_FLOAT_CONFIG = SplitConfig(waves=2)
"""The same, for one query of a kv head and floats: many heads, so smaller thread blocks."""

MHA_SPLIT_CONFIGS: dict[b.KVCacheDtype, SplitConfig] = {
    "hadamard8": SplitConfig(resident=2, waves=1),
    "hadamard4": SplitConfig(resident=4, waves=1),
}
"""The same, for one query of a kv head; those of other codings are few among many."""


def default_split_config(pages: b.KVPages, queries: int) -> SplitConfig:
    """The plan for so many queries of each kv head."""
    coding = pages.dtypes[0]
    if uses_mha_kernel(pages, queries):
        return MHA_SPLIT_CONFIGS[coding]
    return MHA_FLOAT_CONFIG if queries == 1 and coding == "float" else SPLIT_CONFIGS[coding]


def uses_mha_kernel(pages: b.KVPages, queries: int) -> bool:
    """Whether so many queries of each kv head go the way of whole numbers."""
    return queries == 1 and all(coding in MHA_SPLIT_CONFIGS for coding in pages.dtypes)


class SplitCounters:
    """What all layers of a device share: the compiler, and counters that are zero between launches.

    Launches of two streams at a time would mix the counters up: each stream needs a desk of its own.
    """

    def __init__(self, modules: ModuleSource, num_sms: int) -> None:
        self.modules = modules
        self.num_sms = num_sms
        self.counts = torch.zeros(_COUNTS, dtype=torch.int32, device=modules.device)
        """One for each row, kv head and block of queries."""


@dataclass(frozen=True, eq=False)
class PagedDecodeAttention:
    """One layer's attention; `other` takes what the kernel does not."""

    counters: SplitCounters
    attn: spec.Attention
    rotate: b.RopeFn
    other: b.AttentionFn
    plan: SplitConfig | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        pages = kv.kv_pages
        if pages is None or q.dtype is not torch.float16 or not self.takes(q.shape[0], q.shape[1], kv, metadata):
            return self.other(q, k, v, kv, metadata)
        tables = self.rotate if isinstance(self.rotate, RopeTables) else None
        if tables is None:
            q, k = self.rotate(q, k, metadata.positions)
        out = torch.empty(*q.shape[:2], q.shape[2] * q.shape[3], dtype=q.dtype, device=q.device)
        self._launch(contiguous_heads(q), contiguous_heads(k), contiguous_heads(v), pages, metadata, tables, out)
        return out

    def leave(
        self, q: Tensor, k: Tensor, v: Tensor, pages: b.KVPages, metadata: b.AttnMetadata, heir: PackedActs
    ) -> None:
        """The same answers, of what it takes, to an heir alone."""
        tables = self.rotate if isinstance(self.rotate, RopeTables) else None
        if tables is None:
            q, k = self.rotate(q, k, metadata.positions)
        self._launch(contiguous_heads(q), contiguous_heads(k), contiguous_heads(v), pages, metadata, tables, None, heir)

    def takes(self, rows: int, tokens: int, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> bool:
        """Whether the kernel attends to so many new tokens of rows."""
        a, indices, pages = self.attn, (metadata.past_lens, metadata.page_table, metadata.positions), kv.kv_pages
        return (
            pages is not None
            and tokens <= NEW
            and a.head_dim in HEAD_DIMS
            and (pages.dtypes[0] != "float" or pages.keys[0].dtype is torch.float16)
            and pages.page_size % 64 == 0
            and all(x.dtype is torch.int64 for x in indices)
            and metadata.page_table.stride(1) == 1
            and rows * a.kv_heads * NEW * (a.heads // a.kv_heads) <= 8 * _COUNTS
        )

    def _launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pages: b.KVPages,
        metadata: b.AttnMetadata,
        tables: RopeTables | None,
        out: Tensor | None,
        heir: PackedActs | None = None,
    ) -> None:
        a, rows, tokens = self.attn, *q.shape[:2]
        asked = tokens * (a.heads // a.kv_heads)
        plan, alone = self.plan or default_split_config(pages, asked), uses_mha_kernel(pages, asked)
        columns = 1 if asked <= 8 else 2
        programs = rows * a.kv_heads * -(-asked // (8 * columns))
        queries, slots = min(8 * columns, asked), chunks(metadata.max_kv_len - tokens, plan)
        if alone:
            plan = replace(plan, warps=math.gcd(plan.warps, a.kv_heads))
        left = q.new_empty(programs * slots * queries * (a.head_dim + 4), dtype=torch.float32)
        positions, factor, cap = metadata.positions, *factors(a.scale, a.softcap)
        job = _Job(
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), left=left.data_ptr(),
            key=pages.keys[0].data_ptr(), key_scale=pages.keys[-1].data_ptr(),
            value=pages.values[0].data_ptr(), value_scale=pages.values[-1].data_ptr(),
            table=metadata.page_table.data_ptr(), past=metadata.past_lens.data_ptr(),
            counts=self.counters.counts.data_ptr(),
            table_step=metadata.page_table.stride(0), q_row=q.stride(0), q_token=q.stride(1), k_row=k.stride(0),
            k_token=k.stride(1), v_row=v.stride(0), v_token=v.stride(1), tokens=tokens,
            parts=self._parts(programs, slots, plan, alone), slots=slots,
            window=a.window or 0, factor=factor, cap=cap,
        )  # fmt: skip
        if out is not None:
            job.out = out.data_ptr()
        if heir is not None:
            job.heir = heir.input_layout.heir(heir)
        if metadata.mask is not None:
            job.mask, job.mask_step = metadata.mask.data_ptr(), metadata.mask.stride(0)
        if tables is not None:
            job.cos, job.sin, job.dim, job.pairs = (*addresses(tables.cos, tables.sin), tables.dim, tables.interleaved)
            job.positions, job.place_row, job.place_token = positions.data_ptr(), *positions.stride()[-2:]
            if positions.dim() == 3:
                job.planes, job.place_plane = tables.mrope_axis.data_ptr(), positions.stride(0)
        chain_defines = choices(a, pages, plan, columns, metadata.mask is not None)
        made = self.counters.modules.module(MHA_SOURCE if alone else SOURCE, **chain_defines)
        job.rooms = queries * max(plan.warps * a.head_dim, 2 * slots)
        shared = memory(a.head_dim, columns, job.rooms, plan)
        if alone:
            shared = mha_shared_memory(a.head_dim, pages, plan)
        nearby = slots * queries * (a.head_dim + 4) * 4
        if not alone and job.parts == 1 and nearby <= _NEARBY:
            job.inside, shared = 1, shared + nearby
        name, across = ("paged_attn_decode_mha", programs // plan.warps) if alone else ("paged_attn_decode", programs)
        made.launch(name, (across, job.parts, 1), plan.warps * 32, shared, (job,))

    def _parts(self, programs: int, most: int, plan: SplitConfig, alone: bool) -> int:
        """Thread blocks, or warps, that share the chunks of a head: as many as keep the device busy."""
        room = self.counters.num_sms * plan.resident * (plan.warps if alone else 1)
        return max(1, min(most, room * plan.waves // programs))


def chunks(past: int, plan: SplitConfig) -> int:
    """Into how many a past and the new tokens are cut, at most, if it is not longer than this."""
    return min(-(-past // plan.unit), plan.slots) + 1


def memory(head: int, columns: int, rooms: int, plan: SplitConfig) -> int:
    """Bytes that a thread block shares, before those of its chunks."""
    return 64 * plan.warps * columns + columns * 16 * head + rooms * 4


def mha_shared_memory(head: int, pages: b.KVPages, plan: SplitConfig) -> int:
    """The same, where each kv head has one query."""
    bits = sum(4 if coding == "hadamard4" else 8 for coding in pages.dtypes)
    coming = 64 * (plan.warps * (head * bits // 8 + head // 8) + 64)
    words = 3 * head + head // 2 + head // 16 + plan.slots + 1
    return coming + plan.warps * -(-words // 4) * 16


def choices(attn: spec.Attention, pages: b.KVPages, plan: SplitConfig, columns: int, masked: bool) -> dict[str, int]:
    """What the kernel's source is told."""
    return {
        "HEAD_DIM": attn.head_dim,
        "KV_HEADS": attn.kv_heads,
        "GQA_GROUP": attn.heads // attn.kv_heads,
        "PAGE_SIZE": pages.page_size,
        "K_DTYPE": _CODINGS[pages.dtypes[0]],
        "V_DTYPE": _CODINGS[pages.dtypes[1]],
        "N8_TILES": columns,
        "WARPS": plan.warps,
        "KV_M16": plan.steps,
        "MIN_BLOCKS": plan.resident if columns == 1 else 1,  # twice as many sums need all registers
        "MIN_SPLIT": plan.unit,
        "MAX_SPLITS": plan.slots,
        "SOFTCAP": int(attn.softcap is not None),
        "HAS_MASK": int(masked),
    }


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """On q·k, and on the bent score, to make of them powers of two."""
    log2e = 1.4426950408889634
    return (scale * log2e, 1.0) if softcap is None else (scale / softcap, softcap * log2e)


def contiguous_heads(x: Tensor) -> Tensor:
    """Heads of a token side by side, as the kernel reads them, 16 bytes at a time; tokens may be apart."""
    even = x.data_ptr() % 16 == x.stride(0) % 8 == x.stride(1) % 8 == 0
    fits = even and x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def addresses(*tensors: Tensor) -> tuple[int, ...]:
    """Where they begin."""
    return tuple(tensor.data_ptr() for tensor in tensors)
