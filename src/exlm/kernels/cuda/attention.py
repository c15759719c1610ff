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
from .handing import Handed, Heir

SOURCE = Path(__file__).with_name("attention.cu")
LONE = Path(__file__).with_name("lone.cu")
"""Where each kv head has one query."""

NEW = 16
"""The most new tokens of a row."""

HEADS = (64, 128)
"""Widths of heads that the lanes of a warp can share."""

_COUNTS = 1 << 16
_NEARBY = 24 << 10  # bytes of shared memory for chunks that nobody else will ask for
_CODINGS: dict[b.KVCacheDtype, int] = {"float": 0, "hadamard8": 1, "hadamard4": 2, "fp8_e5m2": 3}


class _Job(ctypes.Structure):
    _fields_ = tuple(
        (name, kind)
        for kind, names in (
            (
                ctypes.c_void_p,
                "q k v key value key_scale value_scale table past positions cos sin planes mask",
            ),
            (ctypes.c_void_p, "left counts out"),
            (ctypes.c_longlong, "table_step mask_step q_row q_token k_row k_token v_row v_token"),
            (ctypes.c_longlong, "place_row place_token place_plane"),
            (ctypes.c_int, "tokens parts slots dim pairs window inside rooms"),
            (ctypes.c_float, "factor cap"),
            (Heir, "heir"),
        )
        for name in names.split()
    )


@runtime_checkable
class Tables(Protocol):
    """A rotation whose tables are at hand."""

    cos: Tensor
    sin: Tensor
    planes: Tensor
    dim: int
    pairs: bool


class Made(Protocol):
    """A compiled program."""

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: Any
    ) -> None:
        """Start a kernel."""
        ...


class Maker(Protocol):
    """Who compiles: a `Workshop`."""

    device: torch.device

    def program(self, source: Path, **defines: int) -> Made:
        """A source with its choices made."""
        ...


@dataclass(frozen=True)
class Plan:
    """How attention is dealt out; but for residents and waves, all of it decides roundings."""

    warps: int = 4  # of a thread block
    steps: int = 1  # sixteens of tokens that a warp has on their way at once
    resident: int = 3  # thread blocks for which a multiprocessor must have registers
    unit: int = 64  # tokens of the smallest chunk, a multiple of 64
    slots: int = 32  # chunks up to which a past is cut into smallest ones
    waves: int = 64  # thread blocks for each that fits, before one takes several chunks


PLANS: dict[b.KVCacheDtype, Plan] = {
    "float": Plan(8, resident=1, unit=128, slots=16, waves=1),
    "hadamard8": Plan(8, resident=1, unit=128, slots=16, waves=1),
    "hadamard4": Plan(8, 2, resident=1, unit=128, slots=16, waves=1),
    "fp8_e5m2": Plan(steps=2, waves=1),
}
"""By the coding of the keys, what was quickest on an H200 (`benchmarks.attention`): a thread block for each
multiprocessor where there are eight kv heads, and few chunks to add up."""

SINGLE = Plan(waves=2)
"""The same, for one query of a kv head and floats: many heads, so smaller thread blocks."""

LONE_PLANS: dict[b.KVCacheDtype, Plan] = {
    "hadamard8": Plan(resident=2, waves=1),
    "hadamard4": Plan(resident=4, waves=1),
}
"""The same, for one query of a kv head; those of other codings are few among many."""


def plan_for(pages: b.KVPages, queries: int) -> Plan:
    """The plan for so many queries of each kv head."""
    coding = pages.dtypes[0]
    if lone(pages, queries):
        return LONE_PLANS[coding]
    return SINGLE if queries == 1 and coding == "float" else PLANS[coding]


def lone(pages: b.KVPages, queries: int) -> bool:
    """Whether so many queries of each kv head go the way of whole numbers."""
    return queries == 1 and all(coding in LONE_PLANS for coding in pages.dtypes)


class Desk:
    """What all layers of a device share: the compiler, and counters that are zero between launches.

    Launches of two streams at a time would mix the counters up: each stream needs a desk of its own.
    """

    def __init__(self, workshop: Maker, processors: int) -> None:
        self.workshop = workshop
        self.processors = processors
        self.counts = torch.zeros(_COUNTS, dtype=torch.int32, device=workshop.device)
        """One for each row, kv head and block of queries."""


@dataclass(frozen=True, eq=False)
class Attend:
    """One layer's attention; `other` takes what the kernel does not."""

    desk: Desk
    attn: spec.Attention
    rotate: b.RopeFn
    other: b.AttentionFn
    plan: Plan | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata
    ) -> Tensor:
        """Heads in, (rows, tokens, heads · head_dim) out."""
        pages = kv.paged
        if (
            pages is None
            or q.dtype is not torch.float16
            or not self.takes(q.shape[0], q.shape[1], kv, metadata)
        ):
            return self.other(q, k, v, kv, metadata)
        tables = self.rotate if isinstance(self.rotate, Tables) else None
        if tables is None:
            q, k = self.rotate(q, k, metadata.positions)
        out = torch.empty(*q.shape[:2], q.shape[2] * q.shape[3], dtype=q.dtype, device=q.device)
        self._launch(headwise(q), headwise(k), headwise(v), pages, metadata, tables, out)
        return out

    def leave(
        self, q: Tensor, k: Tensor, v: Tensor, pages: b.KVPages, metadata: b.AttnMetadata, heir: Handed
    ) -> None:
        """The same answers, of what it takes, to an heir alone."""
        tables = self.rotate if isinstance(self.rotate, Tables) else None
        if tables is None:
            q, k = self.rotate(q, k, metadata.positions)
        self._launch(headwise(q), headwise(k), headwise(v), pages, metadata, tables, None, heir)

    def takes(self, rows: int, tokens: int, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> bool:
        """Whether the kernel attends to so many new tokens of rows."""
        a, indices, pages = self.attn, (metadata.past_lens, metadata.pages, metadata.positions), kv.paged
        return (
            pages is not None
            and tokens <= NEW
            and a.head_dim in HEADS
            and (pages.dtypes[0] != "float" or pages.keys[0].dtype is torch.float16)
            and pages.page_size % 64 == 0
            and all(x.dtype is torch.int64 for x in indices)
            and metadata.pages.stride(1) == 1
            and rows * a.kv_heads * NEW * (a.heads // a.kv_heads) <= 8 * _COUNTS
        )

    def _launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pages: b.KVPages,
        metadata: b.AttnMetadata,
        tables: Tables | None,
        out: Tensor | None,
        heir: Handed | None = None,
    ) -> None:
        a, rows, tokens = self.attn, *q.shape[:2]
        asked = tokens * (a.heads // a.kv_heads)
        plan, alone = self.plan or plan_for(pages, asked), lone(pages, asked)
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
            table=metadata.pages.data_ptr(), past=metadata.past_lens.data_ptr(),
            counts=self.desk.counts.data_ptr(),
            table_step=metadata.pages.stride(0), q_row=q.stride(0), q_token=q.stride(1), k_row=k.stride(0),
            k_token=k.stride(1), v_row=v.stride(0), v_token=v.stride(1), tokens=tokens,
            parts=self._parts(programs, slots, plan, alone), slots=slots,
            window=a.window or 0, factor=factor, cap=cap,
        )  # fmt: skip
        if out is not None:
            job.out = out.data_ptr()
        if heir is not None:
            job.heir = heir.inlet.heir(heir)
        if metadata.mask is not None:
            job.mask, job.mask_step = metadata.mask.data_ptr(), metadata.mask.stride(0)
        if tables is not None:
            job.cos, job.sin, job.dim, job.pairs = (
                *addresses(tables.cos, tables.sin),
                tables.dim,
                tables.pairs,
            )
            job.positions, job.place_row, job.place_token = positions.data_ptr(), *positions.stride()[-2:]
            if positions.dim() == 3:
                job.planes, job.place_plane = tables.planes.data_ptr(), positions.stride(0)
        told = choices(a, pages, plan, columns, metadata.mask is not None)
        made = self.desk.workshop.program(LONE if alone else SOURCE, **told)
        job.rooms = queries * max(plan.warps * a.head_dim, 2 * slots)
        shared = memory(a.head_dim, columns, job.rooms, plan)
        if alone:
            shared = lone_memory(a.head_dim, pages, plan)
        nearby = slots * queries * (a.head_dim + 4) * 4
        if not alone and job.parts == 1 and nearby <= _NEARBY:
            job.inside, shared = 1, shared + nearby
        name, across = ("attend_alone", programs // plan.warps) if alone else ("attend", programs)
        made.launch(name, (across, job.parts, 1), plan.warps * 32, shared, (job,))

    def _parts(self, programs: int, most: int, plan: Plan, alone: bool) -> int:
        """Thread blocks, or warps, that share the chunks of a head: as many as keep the device busy."""
        room = self.desk.processors * plan.resident * (plan.warps if alone else 1)
        return max(1, min(most, room * plan.waves // programs))


def chunks(past: int, plan: Plan) -> int:
    """Into how many a past and the new tokens are cut, at most, if it is not longer than this."""
    return min(-(-past // plan.unit), plan.slots) + 1


def memory(head: int, columns: int, rooms: int, plan: Plan) -> int:
    """Bytes that a thread block shares, before those of its chunks."""
    return 64 * plan.warps * columns + columns * 16 * head + rooms * 4


def lone_memory(head: int, pages: b.KVPages, plan: Plan) -> int:
    """The same, where each kv head has one query."""
    bits = sum(4 if coding == "hadamard4" else 8 for coding in pages.dtypes)
    coming = 64 * (plan.warps * (head * bits // 8 + head // 8) + 64)
    words = 3 * head + head // 2 + head // 16 + plan.slots + 1
    return coming + plan.warps * -(-words // 4) * 16


def choices(attn: spec.Attention, pages: b.KVPages, plan: Plan, columns: int, masked: bool) -> dict[str, int]:
    """What the kernel's source is told."""
    return {
        "HEAD": attn.head_dim,
        "KV": attn.kv_heads,
        "SHARE": attn.heads // attn.kv_heads,
        "PAGE": pages.page_size,
        "KEYS": _CODINGS[pages.dtypes[0]],
        "VALUES": _CODINGS[pages.dtypes[1]],
        "COLUMNS": columns,
        "WARPS": plan.warps,
        "STEPS": plan.steps,
        "RESIDENT": plan.resident if columns == 1 else 1,  # twice as many sums need all registers
        "UNIT": plan.unit,
        "SLOTS": plan.slots,
        "CAPPED": int(attn.softcap is not None),
        "MASKED": int(masked),
    }


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """On q·k, and on the bent score, to make of them powers of two."""
    log2e = 1.4426950408889634
    return (scale * log2e, 1.0) if softcap is None else (scale / softcap, softcap * log2e)


def headwise(x: Tensor) -> Tensor:
    """Heads of a token side by side, as the kernel reads them, 16 bytes at a time; tokens may be apart."""
    even = x.data_ptr() % 16 == x.stride(0) % 8 == x.stride(1) % 8 == 0
    fits = even and x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def addresses(*tensors: Tensor) -> tuple[int, ...]:
    """Where they begin."""
    return tuple(tensor.data_ptr() for tensor in tensors)
