"""Packed matrices times a few rows, straight from their codes: one launch for all that share an input.

Up to ALIKE rows are summed in one and the same way, so that a row's answer is the same bits whatever its
company. What is done with many rows is decided elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from .lanes import MAX_M16, TILE_K, TILE_N
from .layout import TileLayout, Zeros
from .module_cache import CudaModule, ModuleCache
from .prepacked import (
    NO_SLOT,
    InputLayout,
    PackedActs,
    as_uint16,
    chain_args,
    chain_defines,
    epilogue_smem_bytes,
    fragment_order,
)
from .repack import MmaWeight, tile_perm

SOURCE = Path(__file__).with_name("csrc") / "gemm_m16.cu"
ACTS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}
_ZEROS: dict[Zeros, int] = {"half": 0, "none": 1, "table": 2}
RESERVED_SMEM = 1024
"""Bytes of shared memory that a device keeps for itself, for each thread block."""

_PREPARERS = 256
_CASES = (1, False), (MAX_M16, False), (MAX_M16, True)  # rows, and whether they were handed over


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("fine", ctypes.c_void_p),
        ("main", ctypes.c_void_p),
        ("fines", ctypes.c_int),
        ("bricks", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("factor", ctypes.c_float),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        ("matrix", _Matrix),
        ("source", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("outputs", ctypes.c_int),
        ("stride", ctypes.c_int),
        ("first", ctypes.c_int),
    )


@dataclass(frozen=True)
class TileConfig:
    """How a product is dealt out."""

    tiles: int = 2  # of 16 outputs, that a warp works on at a time
    warps: int = 8  # of a thread block, which share the inputs
    stages: int = 3  # bricks of each tile on their way to each warp


class RmsNorm(NamedTuple):
    """A root mean square norm that x goes through first."""

    weight: Tensor  # (inputs) float32
    eps: float


@dataclass(frozen=True)
class KernelVariant:
    """What a program is compiled for, besides its plan."""

    layouts: tuple[TileLayout, ...]  # of each matrix; they differ in nothing but the bits
    norm: bool = False
    act: int = 0  # see ACTS; 0: none
    apart: bool = False  # under one act, two matrices whose inputs are ordered differently
    full: bool = False  # answers in float32


class GemmM16:
    """Matrices of one layout that are multiplied by the same rows, in one launch.

    With `act` there are two, and the answer is act(first) · second. With `full` it is in float32.
    """

    def __init__(
        self,
        modules: ModuleCache,
        matrices: Sequence[MmaWeight],
        norm: RmsNorm | None = None,
        act: str | None = None,
        plan: TileConfig | None = None,
        full: bool = False,
    ) -> None:
        self.modules = modules
        self.matrices = tuple(matrices)
        first = self.matrices[0]
        self.inputs, self.device = first.in_features, first.main.bricks.device
        if self.inputs % 8 or self.inputs >= NO_SLOT:
            raise Unsupported(f"{self.inputs} inputs, which the kernels want in eights and below {NO_SLOT}")
        sources = [tile_perm(one) for one in self.matrices]
        self._entrances = _distinct([(one.fine.stored, at) for one, at in zip(self.matrices, sources, strict=True)])
        apart = act is not None and len(set(self._entrances)) > 1
        self.form = KernelVariant(
            tuple(one.layout for one in self.matrices), norm is not None, ACTS[act] if act else 0, apart, full
        )
        self._eps = 0.0 if norm is None else norm.eps
        self._norm = None if norm is None else norm.weight
        self.bricks = max(one.stored for one in self.matrices)
        orders = {i: _order(self.matrices[i], sources[i], norm) for i in set(self._entrances)}
        self._orders = [orders[i] for i in self._entrances]
        self._job = _job_type(len(self.matrices))
        self.plan = self.fitted(plan or TileConfig())
        self.launches = 0
        self.parts = (_Part * len(self.matrices))()
        """The matrices as kernels take them, but for where answers go."""
        for place, (tiles, (source, factors)) in enumerate(zip(self.matrices, self._orders, strict=True)):
            self.parts[place] = _Part(
                matrix=weight_struct(tiles),
                source=_address(source),
                norm=_address(factors),
                bias=_address(tiles.bias),
                outputs=tiles.out_features,
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers in a row of each answer."""
        every = tuple(one.out_features for one in self.matrices)
        return every[:1] if self.form.act else every

    def answers(self, rows: int) -> list[Tensor]:
        """Room for the answers to so many rows."""
        dtype = torch.float32 if self.form.full else torch.float16
        return [torch.empty(rows, width, dtype=dtype, device=self.device) for width in self.widths]

    @cached_property
    def input_layout(self) -> InputLayout:
        """Where rows may be left for it."""
        return InputLayout(self.matrices, self._entrances, self._norm)

    @property
    def shares(self) -> int:
        """Thread blocks that answer for a row."""
        return sum(self._shares()[: len(self.widths)])

    def _shares(self) -> list[int]:
        each = self.plan.tiles // 2 if self.form.act else self.plan.tiles
        return [-(-one.tiles // each) for one in self.matrices]

    def __call__(
        self,
        x: Tensor | PackedActs,
        out: Sequence[Tensor],
        residual: Tensor | None = None,
        heir: PackedActs | None = None,
    ) -> None:
        """Fill `out`, `answers` of as many rows, with x (rows, inputs) @ each matrix + residual, like them.

        All are contiguous, and float16 but for full answers. An heir gets the answers as well; then `out` may
        be empty.
        """
        rows = len(x)
        self.launches += 1
        if not 1 <= rows <= MAX_M16:
            raise Unsupported(f"{rows} rows are not multiplied straight from codes, only 1 to {MAX_M16}")
        plan, handed = self.plan, x if isinstance(x, PackedActs) else None
        job, grid = self.job(x, out, residual, self._shares())
        made = self.modules.module(SOURCE, **self.choices(rows, handed is not None, heir is not None))
        kept = () if rows == 1 or handed is not None else self.prepare(made, job, rows, rows)
        shared = self.memory(rows, plan, handed is not None)
        if handed is not None:
            shared = balance_occupancy(self.modules, grid, shared)
        made.launch("gemm_m16", (grid, 1, 1), plan.warps * 32, shared, (job, chain_args(handed, heir)))
        del kept  # not before the launch: later work on the stream may use their memory, earlier work may not

    def job(
        self, x: Tensor | PackedActs, out: Sequence[Tensor], residual: Tensor | None, shares: Sequence[int]
    ) -> tuple[Any, int]:
        """All that the kernels are given, but x prepared; and the sum of the matrices' shares in the work."""
        job = self._job(parts=self.parts, residual=_address(residual))
        if isinstance(x, PackedActs):
            for part, start in zip(job.parts, x.starts, strict=True):
                part.words = start
        else:
            job.x = x.data_ptr()
        job.eps, job.rows, job.inputs = self._eps, len(x), self.inputs
        read_source = 0
        for place, share in enumerate(shares):
            part = job.parts[place]
            part.stride, part.first = part.outputs, read_source
            if out:
                target = out[0] if self.form.act else out[place]
                part.y, part.stride = target.data_ptr(), target.shape[1]
            read_source += 0 if self.form.act and place else share
        return job, read_source

    def choices(self, rows: int, handed: bool = False, heir: bool = False) -> dict[str, int]:
        """What the kernels' source is told for so many rows."""
        items = -(-self.bricks * 16 // (self.plan.warps * 32)) if rows == 1 and not handed else 0
        return {**choices(self.form, -(-rows // 8), self.plan, items), **chain_defines(handed, heir)}

    def memory(self, rows: int, plan: TileConfig, handed: bool = False) -> int:
        """Bytes of shared memory: bricks, and one row as it comes and as it enters; in the end the sums.

        With rows that were handed over, what is kept at hand for answers instead.
        """
        ring = plan.warps * plan.stages * plan.tiles * slot(self.form)
        raw = row_smem_bytes(self.inputs) + 15
        entered = (2 if self.form.apart else 1) * self.bricks * TILE_K * 2
        sums = plan.warps * plan.tiles * TILE_N * 4
        if handed:
            room, each = -(-rows // 8) * 8, plan.tiles // 2 if self.form.act else plan.tiles
            return max(ring, sums * room) + epilogue_smem_bytes(each * TILE_N, room)
        return max(ring + (raw + entered if rows == 1 else 0), sums * rows)

    def fitted(self, plan: TileConfig) -> TileConfig:
        """A plan that fits for any number of rows: sums depend on its warps, so all rows have as many."""
        if self.form.act:
            plan = replace(plan, tiles=max(2, plan.tiles // 2 * 2))
        while max(self.memory(r, plan, handed) for r, handed in _CASES) > self.modules.memory:
            if plan.stages > 2:
                plan = replace(plan, stages=plan.stages - 1)
            elif plan.warps > 1:
                plan = replace(plan, warps=plan.warps // 2)
            else:
                raise Unsupported(f"{self.modules.memory} bytes of shared memory are too few for {self.inputs} inputs")
        return plan

    def prepare(self, made: CudaModule, job: Any, rows: int, room: int, pdl: bool = True) -> list[Tensor]:
        """x as the matrices want it, once for all thread blocks, with room for some more rows."""
        firsts = list(dict.fromkeys(self._entrances))
        entry = self._job.from_buffer_copy(job)
        kept: list[Tensor] = []
        for place, first in enumerate(firsts):
            bricks = self.matrices[first].stored
            words = torch.empty(bricks * TILE_K * room, dtype=torch.float16, device=self.device)
            kept.append(words)
            for part, owner in zip(job.parts, self._entrances, strict=True):
                if owner == first:
                    part.words = words.data_ptr()
            entry.parts[place] = job.parts[first]
        entry.rows = room
        most = max(self.matrices[first].stored for first in firsts)
        grid = (rows, -(-most * 16 // _PREPARERS), len(firsts))
        made.launch("pack_activations", grid, _PREPARERS, row_smem_bytes(self.inputs), (entry,), pdl)
        return kept


def balance_occupancy(modules: ModuleCache, blocks: int, memory: int) -> int:
    """Shared memory of a thread block, `memory` or so much that no more of them fit than come out evenly.

    Those that start early are put where there is room, however many there are already.
    """
    each = -(-blocks // modules.num_sms)
    return max(memory, (modules.memory + RESERVED_SMEM) // (each + 1) - RESERVED_SMEM + 16)


def weight_struct(tiles: MmaWeight) -> _Matrix:
    """The addresses of a matrix, as the kernels take them."""
    return _Matrix(
        fine=tiles.fine.bricks.data_ptr(),
        main=tiles.main.bricks.data_ptr(),
        fines=tiles.fine.stored,
        bricks=tiles.stored,
        tiles=tiles.tiles,
        factor=tiles.factor,
    )


def row_smem_bytes(inputs: int) -> int:
    """Bytes of shared memory for a row as it comes, a zero behind it, and the sums of its squares."""
    return (inputs + 8) * 2 + -(-inputs // 256) * 4


def slot(form: KernelVariant) -> int:
    """Bytes of shared memory for a brick of any of the matrices."""
    return max(layout.largest for layout in form.layouts)


def choices(form: KernelVariant, columns: int, plan: TileConfig, items: int = 0) -> dict[str, int]:
    """What the kernels are told; a thread prepares `items` eights of a row, or `prepare` does it."""
    return {
        **dealt(form, columns, plan),
        "SEPARATE_PERM": int(form.apart),
        "FUSED_PACK": int(items > 0),
        "PACK_ITEMS": max(1, items),
    }


def dealt(form: KernelVariant, columns: int, plan: TileConfig) -> dict[str, int]:
    """What every kernel that reads bricks is told."""
    first = form.layouts[0]
    return {
        "BITS": sum(layout.bits << 4 * place for place, layout in enumerate(form.layouts)),
        "GROUP_KSTEPS": first.steps,
        "FINE_KSTEPS": first.fine,
        "ZERO_POINTS": _ZEROS[first.zeros],
        "HAS_MINS": int(first.minima),
        "N8_TILES": columns,
        "WARP_TILES": plan.tiles,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "NUM_WEIGHTS": len(form.layouts),
        "RMS_NORM": int(form.norm),
        "ACTIVATION": form.act,
        "FP32_OUT": int(form.full),
    }


@cache
def _job_type(parts: int) -> type[ctypes.Structure]:
    fields = (
        ("parts", _Part * parts),
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("rows", ctypes.c_int),
        ("inputs", ctypes.c_int),
    )
    return type("_Job", (ctypes.Structure,), {"_fields_": fields})


def _order(tiles: MmaWeight, source: Tensor, norm: RmsNorm | None) -> tuple[Tensor | None, Tensor | None]:
    """Which input each prepared number is, as unsigned 16 bits, and what it is multiplied by."""
    if tiles.source is None and norm is None and tiles.stored == tiles.blocks:
        return None, None
    lanes = fragment_order(source)
    device = tiles.main.bricks.device
    places = torch.where(lanes < 0, tiles.in_features, lanes)  # padding: a zero lies behind the last
    words = as_uint16(places).to(device, non_blocking=True)
    if norm is None:
        return words, None
    factors = F.pad(norm.weight.float(), (0, 1))
    return words, factors.index_select(0, places.to(device, non_blocking=True))


def _distinct(entrances: Sequence[tuple[int, Tensor]]) -> list[int]:
    """For each order of inputs, and number of fine bricks in it, the number of the first that is the same."""

    def same(one: tuple[int, Tensor], other: tuple[int, Tensor]) -> bool:
        return one[0] == other[0] and torch.equal(one[1], other[1])

    return [next(i for i, first in enumerate(entrances) if same(first, one)) for one in entrances]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
