"""Packed matrices times a few rows, straight from their codes: one launch for all that share an input.

Up to ALIKE rows are summed in one and the same way, so that a row's answer is the same bits whatever its
company. What is done with many rows is decided elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...errors import Unsupported
from .program import Program, Workshop
from .tiles import BLOCK, TILE, Layout, Tiles, Zeros

SOURCE = Path(__file__).with_name("packed.cu")
ALIKE = 16

Entry = Literal["plain", "norm", "gated"]
"""What happens to x on its way in: nothing, a root mean square norm, or silu of one half times the other."""

_ENTRIES: dict[Entry, int] = {"plain": 0, "norm": 1, "gated": 2}
_ZEROS: dict[Zeros, int] = {"half": 0, "none": 1, "table": 2}
_SEGMENTS = 6
_PREPARERS = 256


class _Segment(ctypes.Structure):
    _fields_ = (
        ("bricks", ctypes.c_void_p),
        ("first", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("bits", ctypes.c_int),
    )


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("segments", _Segment * _SEGMENTS),
        ("count", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("factor", ctypes.c_float),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        ("matrix", _Matrix),
        ("x", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("outputs", ctypes.c_int),
        ("stride", ctypes.c_int),
        ("first", ctypes.c_int),
    )


class _Entrance(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("rows", ctypes.c_int),
        ("width", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("blocks", ctypes.c_int),
    )


@dataclass(frozen=True)
class Plan:
    """How a product is dealt out."""

    tiles: int = 2  # of 16 outputs, that a warp works on
    warps: int = 8  # of a thread block, which share the inputs
    stages: int = 4  # bricks of each tile on their way to each warp


class Product:
    """Matrices of one layout that are multiplied by the same rows, in one launch."""

    def __init__(
        self,
        workshop: Workshop,
        matrices: Sequence[Tiles],
        entry: Entry = "plain",
        norm: Tensor | None = None,
        eps: float = 0.0,
        plan: Plan | None = None,
    ) -> None:
        self.workshop = workshop
        self.matrices = tuple(matrices)
        self.layout = self.matrices[0].layout
        self.entry = entry
        self._widths = sorted({bits for one in self.matrices for bits in one.widths})
        self.plan = fitting(plan or Plan(), self.layout.brick(self._widths[-1]), workshop.shared_memory)
        self.inputs = self.matrices[0].in_features
        self.device = self.matrices[0].runs[0].bricks.device
        self._norm = norm
        self._eps = eps
        self._entrances = _distinct([one.source for one in self.matrices])
        counts = [-(-one.tiles // self.plan.tiles) for one in self.matrices]
        self._grid = sum(counts)
        self._parts = (_Part * len(self.matrices))()
        for place, tiles in enumerate(self.matrices):
            self._parts[place] = _Part(
                matrix=matrix_of(tiles),
                bias=_address(tiles.bias),
                outputs=tiles.out_features,
                first=sum(counts[:place]),
            )
        self._job = _job_type(len(self.matrices))

    def __call__(self, x: Tensor, out: Sequence[Tensor], residual: Tensor | None = None) -> None:
        """Fill out[i] (rows, outputs) with x (rows, inputs) @ matrix i + residual; all contiguous float16."""
        rows = len(x)
        if not 1 <= rows <= ALIKE:
            raise Unsupported(f"{rows} rows are not multiplied straight from codes, only 1 to {ALIKE}")
        columns = 1 if rows <= 8 else 2
        made = self._program(columns)
        ready = {first: self._enter(made, x, columns, first) for first in dict.fromkeys(self._entrances)}
        job = self._job(parts=self._parts, residual=_address(residual), rows=rows)
        for part, target, entrance in zip(job.parts, out, self._entrances, strict=True):
            words, sums = ready[entrance]
            part.x, part.sums = words.data_ptr(), sums.data_ptr()
            part.y, part.stride = target.data_ptr(), target.shape[1]
        made.launch("multiply", (self._grid, 1, 1), self.plan.warps * 32, self._shared(columns), (job,))

    def _enter(self, made: Program, x: Tensor, columns: int, first: int) -> tuple[Tensor, Tensor]:
        """x as matrix number `first` wants it."""
        tiles, rows = self.matrices[first], len(x)
        words = torch.empty(tiles.blocks, columns * 8 * BLOCK, dtype=torch.float16, device=self.device)
        sums = torch.empty(tiles.blocks, self.layout.groups * columns * 8, device=self.device)
        entrance = _Entrance(
            x=x.data_ptr(),
            norm=_address(self._norm),
            source=_address(tiles.source),
            out=words.data_ptr(),
            sums=sums.data_ptr(),
            eps=self._eps,
            rows=rows,
            width=x.shape[1],
            inputs=self.inputs,
            blocks=tiles.blocks,
        )
        grid = (rows, -(-tiles.blocks * 16 // _PREPARERS), 1)
        made.launch("prepare", grid, _PREPARERS, 0, (entrance,))
        return words, sums

    def _shared(self, columns: int) -> int:
        plan = self.plan
        ring = plan.warps * plan.stages * plan.tiles * self.layout.brick(self._widths[-1])
        return max(ring, plan.warps * plan.tiles * columns * 512)

    def _program(self, columns: int) -> Program:
        return _program(
            self.workshop, self.layout, self._widths, columns, self.plan, len(self.matrices), self.entry
        )


def expanded(workshop: Workshop, tiles: Tiles) -> Tensor:
    """(16 tiles, 128 blocks) float16, a row for each output; the factor is not applied."""
    device = tiles.runs[0].bricks.device
    out = torch.empty(tiles.tiles * TILE, tiles.blocks * BLOCK, dtype=torch.float16, device=device)
    made = _program(workshop, tiles.layout, tiles.widths, 1, Plan(), 1, "plain")
    grid = (-(-tiles.tiles * tiles.blocks // 8), 1, 1)
    made.launch("expand", grid, 256, 0, (matrix_of(tiles), ctypes.c_void_p(out.data_ptr())), overlap=False)
    return out


def fitting(plan: Plan, brick: int, memory: int) -> Plan:
    """The plan with as many stages as fit the shared memory of a thread block, then as many tiles."""
    for tiles in range(plan.tiles, 0, -1):
        stages = min(plan.stages, memory // (plan.warps * tiles * brick))
        if stages >= 2:
            return replace(plan, tiles=tiles, stages=stages)
    raise Unsupported(f"{memory} bytes of shared memory are too few for codes this wide")


def matrix_of(tiles: Tiles) -> _Matrix:
    """The addresses of a matrix, as the kernels take them."""
    matrix = _Matrix(count=len(tiles.runs), blocks=tiles.blocks, tiles=tiles.tiles, factor=tiles.factor)
    first = 0
    for place, run in enumerate(tiles.runs):
        matrix.segments[place] = _Segment(run.bricks.data_ptr(), first, run.blocks, run.bits)
        first += run.blocks
    return matrix


def choices(
    layout: Layout, widths: Sequence[int], columns: int, plan: Plan, parts: int, entry: Entry
) -> dict[str, int]:
    """What the kernels' source is told."""
    return {
        "WIDTHS": sum(1 << bits for bits in widths),
        "ZEROS": _ZEROS[layout.zeros],
        "MINIMA": int(layout.minima),
        "STEPS": layout.steps,
        "COLUMNS": columns,
        "TILES": plan.tiles,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "PARTS": parts,
        "ENTRY": _ENTRIES[entry],
    }


def _program(
    workshop: Workshop,
    layout: Layout,
    widths: Sequence[int],
    columns: int,
    plan: Plan,
    parts: int,
    entry: Entry,
) -> Program:
    return workshop.program(SOURCE, **choices(layout, widths, columns, plan, parts, entry))


@cache
def _job_type(parts: int) -> type[ctypes.Structure]:
    fields = (("parts", _Part * parts), ("residual", ctypes.c_void_p), ("rows", ctypes.c_int))
    return type("_Job", (ctypes.Structure,), {"_fields_": fields})


def _distinct(sources: Sequence[Tensor | None]) -> list[int]:
    """For each order of inputs, the number of the first that is the same."""

    def same(one: Tensor | None, other: Tensor | None) -> bool:
        return (one is None and other is None) or (
            one is not None and other is not None and torch.equal(one, other)
        )

    return [next(i for i, first in enumerate(sources) if same(first, one)) for one in sources]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
