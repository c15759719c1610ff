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
from .handing import NOWHERE, Handed, Inlet, in_lanes, ledger, link, told, unsigned
from .lanes import ALIKE, BLOCK, TILE
from .layout import Layout, Zeros
from .program import Program, Workshop
from .tiles import Tiles, stored_source

SOURCE = Path(__file__).with_name("packed.cu")
ACTS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}
_ZEROS: dict[Zeros, int] = {"half": 0, "none": 1, "table": 2}
KEPT = 1024
"""Bytes of shared memory that a device keeps for itself, for each thread block."""

_PREPARERS = 256
_CASES = (1, False), (ALIKE, False), (ALIKE, True)  # rows, and whether they were handed over


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
class Plan:
    """How a product is dealt out."""

    tiles: int = 2  # of 16 outputs, that a warp works on at a time
    warps: int = 8  # of a thread block, which share the inputs
    stages: int = 3  # bricks of each tile on their way to each warp


class Normal(NamedTuple):
    """A root mean square norm that x goes through first."""

    weight: Tensor  # (inputs) float32
    eps: float


@dataclass(frozen=True)
class Form:
    """What a program is compiled for, besides its plan."""

    layouts: tuple[Layout, ...]  # of each matrix; they differ in nothing but the bits
    norm: bool = False
    act: int = 0  # see ACTS; 0: none
    apart: bool = False  # under one act, two matrices whose inputs are ordered differently
    full: bool = False  # answers in float32


class Product:
    """Matrices of one layout that are multiplied by the same rows, in one launch.

    With `act` there are two, and the answer is act(first) · second. With `full` it is in float32.
    """

    def __init__(
        self,
        workshop: Workshop,
        matrices: Sequence[Tiles],
        norm: Normal | None = None,
        act: str | None = None,
        plan: Plan | None = None,
        full: bool = False,
    ) -> None:
        self.workshop = workshop
        self.matrices = tuple(matrices)
        first = self.matrices[0]
        self.inputs, self.device = first.in_features, first.main.bricks.device
        if self.inputs % 8 or self.inputs >= NOWHERE:
            raise Unsupported(f"{self.inputs} inputs, which the kernels want in eights and below {NOWHERE}")
        sources = [stored_source(one) for one in self.matrices]
        self._entrances = _distinct(
            [(one.fine.stored, at) for one, at in zip(self.matrices, sources, strict=True)]
        )
        apart = act is not None and len(set(self._entrances)) > 1
        self.form = Form(
            tuple(one.layout for one in self.matrices), norm is not None, ACTS[act] if act else 0, apart, full
        )
        self._eps = 0.0 if norm is None else norm.eps
        self._norm = None if norm is None else norm.weight
        self.bricks = max(one.stored for one in self.matrices)
        orders = {i: _order(self.matrices[i], sources[i], norm) for i in set(self._entrances)}
        self._orders = [orders[i] for i in self._entrances]
        self._job = _job_type(len(self.matrices))
        self.plan = self.fitted(plan or Plan())
        self.launches = 0
        self.parts = (_Part * len(self.matrices))()
        """The matrices as kernels take them, but for where answers go."""
        for place, (tiles, (source, factors)) in enumerate(zip(self.matrices, self._orders, strict=True)):
            self.parts[place] = _Part(
                matrix=matrix_of(tiles),
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
    def inlet(self) -> Inlet:
        """Where rows may be left for it."""
        return Inlet(self.matrices, self._entrances, self._norm)

    @property
    def shares(self) -> int:
        """Thread blocks that answer for a row."""
        return sum(self._shares()[: len(self.widths)])

    def _shares(self) -> list[int]:
        each = self.plan.tiles // 2 if self.form.act else self.plan.tiles
        return [-(-one.tiles // each) for one in self.matrices]

    def __call__(
        self,
        x: Tensor | Handed,
        out: Sequence[Tensor],
        residual: Tensor | None = None,
        heir: Handed | None = None,
    ) -> None:
        """Fill `out`, `answers` of as many rows, with x (rows, inputs) @ each matrix + residual, like them.

        All are contiguous, and float16 but for full answers. An heir gets the answers as well; then `out` may
        be empty.
        """
        rows = len(x)
        self.launches += 1
        if not 1 <= rows <= ALIKE:
            raise Unsupported(f"{rows} rows are not multiplied straight from codes, only 1 to {ALIKE}")
        plan, handed = self.plan, x if isinstance(x, Handed) else None
        job, grid = self.job(x, out, residual, self._shares())
        made = self.workshop.program(SOURCE, **self.choices(rows, handed is not None, heir is not None))
        kept = () if rows == 1 or handed is not None else self.prepare(made, job, rows, rows)
        shared = self.memory(rows, plan, handed is not None)
        if handed is not None:
            shared = evenly(self.workshop, grid, shared)
        made.launch("multiply", (grid, 1, 1), plan.warps * 32, shared, (job, link(handed, heir)))
        del kept  # not before the launch: later work on the stream may use their memory, earlier work may not

    def job(
        self, x: Tensor | Handed, out: Sequence[Tensor], residual: Tensor | None, shares: Sequence[int]
    ) -> tuple[Any, int]:
        """All that the kernels are given, but x prepared; and the sum of the matrices' shares in the work."""
        job = self._job(parts=self.parts, residual=_address(residual))
        if isinstance(x, Handed):
            for part, start in zip(job.parts, x.starts, strict=True):
                part.words = start
        else:
            job.x = x.data_ptr()
        job.eps, job.rows, job.inputs = self._eps, len(x), self.inputs
        whole = 0
        for place, share in enumerate(shares):
            part = job.parts[place]
            part.stride, part.first = part.outputs, whole
            if out:
                target = out[0] if self.form.act else out[place]
                part.y, part.stride = target.data_ptr(), target.shape[1]
            whole += 0 if self.form.act and place else share
        return job, whole

    def choices(self, rows: int, handed: bool = False, heir: bool = False) -> dict[str, int]:
        """What the kernels' source is told for so many rows."""
        items = -(-self.bricks * 16 // (self.plan.warps * 32)) if rows == 1 and not handed else 0
        return {**choices(self.form, -(-rows // 8), self.plan, items), **told(handed, heir)}

    def memory(self, rows: int, plan: Plan, handed: bool = False) -> int:
        """Bytes of shared memory: bricks, and one row as it comes and as it enters; in the end the sums.

        With rows that were handed over, what is kept at hand for answers instead.
        """
        ring = plan.warps * plan.stages * plan.tiles * slot(self.form)
        raw = entering(self.inputs) + 15
        entered = (2 if self.form.apart else 1) * self.bricks * BLOCK * 2
        sums = plan.warps * plan.tiles * TILE * 4
        if handed:
            room, each = -(-rows // 8) * 8, plan.tiles // 2 if self.form.act else plan.tiles
            return max(ring, sums * room) + ledger(each * TILE, room)
        return max(ring + (raw + entered if rows == 1 else 0), sums * rows)

    def fitted(self, plan: Plan) -> Plan:
        """A plan that fits for any number of rows: sums depend on its warps, so all rows have as many."""
        if self.form.act:
            plan = replace(plan, tiles=max(2, plan.tiles // 2 * 2))
        while max(self.memory(r, plan, handed) for r, handed in _CASES) > self.workshop.memory:
            if plan.stages > 2:
                plan = replace(plan, stages=plan.stages - 1)
            elif plan.warps > 1:
                plan = replace(plan, warps=plan.warps // 2)
            else:
                raise Unsupported(
                    f"{self.workshop.memory} bytes of shared memory are too few for {self.inputs} inputs"
                )
        return plan

    def prepare(self, made: Program, job: Any, rows: int, room: int, overlap: bool = True) -> list[Tensor]:
        """x as the matrices want it, once for all thread blocks, with room for some more rows."""
        firsts = list(dict.fromkeys(self._entrances))
        entry = self._job.from_buffer_copy(job)
        kept: list[Tensor] = []
        for place, first in enumerate(firsts):
            bricks = self.matrices[first].stored
            words = torch.empty(bricks * BLOCK * room, dtype=torch.float16, device=self.device)
            kept.append(words)
            for part, owner in zip(job.parts, self._entrances, strict=True):
                if owner == first:
                    part.words = words.data_ptr()
            entry.parts[place] = job.parts[first]
        entry.rows = room
        most = max(self.matrices[first].stored for first in firsts)
        grid = (rows, -(-most * 16 // _PREPARERS), len(firsts))
        made.launch("prepare", grid, _PREPARERS, entering(self.inputs), (entry,), overlap)
        return kept


def evenly(workshop: Workshop, blocks: int, memory: int) -> int:
    """Shared memory of a thread block, `memory` or so much that no more of them fit than come out evenly.

    Those that start early are put where there is room, however many there are already.
    """
    each = -(-blocks // workshop.processors)
    return max(memory, (workshop.memory + KEPT) // (each + 1) - KEPT + 16)


def matrix_of(tiles: Tiles) -> _Matrix:
    """The addresses of a matrix, as the kernels take them."""
    return _Matrix(
        fine=tiles.fine.bricks.data_ptr(),
        main=tiles.main.bricks.data_ptr(),
        fines=tiles.fine.stored,
        bricks=tiles.stored,
        tiles=tiles.tiles,
        factor=tiles.factor,
    )


def entering(inputs: int) -> int:
    """Bytes of shared memory for a row as it comes, a zero behind it, and the sums of its squares."""
    return (inputs + 8) * 2 + -(-inputs // 256) * 4


def slot(form: Form) -> int:
    """Bytes of shared memory for a brick of any of the matrices."""
    return max(layout.largest for layout in form.layouts)


def choices(form: Form, columns: int, plan: Plan, items: int = 0) -> dict[str, int]:
    """What the kernels are told; a thread prepares `items` eights of a row, or `prepare` does it."""
    return {
        **dealt(form, columns, plan),
        "APART": int(form.apart),
        "INSIDE": int(items > 0),
        "ITEMS": max(1, items),
    }


def dealt(form: Form, columns: int, plan: Plan) -> dict[str, int]:
    """What every kernel that reads bricks is told."""
    first = form.layouts[0]
    return {
        "BITS": sum(layout.bits << 4 * place for place, layout in enumerate(form.layouts)),
        "STEPS": first.steps,
        "FINE": first.fine,
        "ZEROS": _ZEROS[first.zeros],
        "MINIMA": int(first.minima),
        "COLUMNS": columns,
        "TILES": plan.tiles,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "PARTS": len(form.layouts),
        "NORM": int(form.norm),
        "ACT": form.act,
        "FULL": int(form.full),
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


def _order(tiles: Tiles, source: Tensor, norm: Normal | None) -> tuple[Tensor | None, Tensor | None]:
    """Which input each prepared number is, as unsigned 16 bits, and what it is multiplied by."""
    if tiles.source is None and norm is None and tiles.stored == tiles.blocks:
        return None, None
    lanes = in_lanes(source)
    device = tiles.main.bricks.device
    places = torch.where(lanes < 0, tiles.in_features, lanes)  # padding: a zero lies behind the last
    words = unsigned(places).to(device, non_blocking=True)
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
