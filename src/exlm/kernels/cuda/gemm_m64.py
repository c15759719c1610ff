"""Packed matrices times 17 to 64 rows, straight from their codes: one launch for all that share an input.

How the outputs and inputs are dealt out to thread blocks does not depend on the rows, so that a row's answer
is the same bits in any company of this size. Fewer rows are `linear`'s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...errors import Unsupported
from . import gemm
from .gemm import GemmM16
from .lanes import TILE_K, TILE_N
from .prepacked import PackedActs, chain_args, chain_defines, epilogue_smem_bytes

SOURCE = Path(__file__).with_name("csrc") / "gemm_m64.cu"
MOST = 64
"""Rows."""

_PIECES = (1, 2, 3, 4, 6, 8)
_ADDING = 4.0  # what it costs to add up pieces, in bricks
_CROWDED = 0.75  # by how much a thread block is slower for each that shares its multiprocessor
_EARLY = 3  # thread blocks of a multiprocessor, at most


class _Shared(ctypes.Structure):
    _fields_ = (("left", ctypes.c_void_p), ("counts", ctypes.c_void_p))


@dataclass(frozen=True)
class TileConfigM64(gemm.TileConfig):
    """How a product is dealt out; here each warp of a thread block has tiles of its own.

    What is not said was quickest on an H200 (`benchmarks.matrices`).
    """

    tiles: int = 1
    stages: int = 3  # units on their way or being worked on
    resident: int = 2  # thread blocks of a multiprocessor
    pieces: int = 0  # into which a group's inputs are cut; zero: as many as keep the device busy


def default_config(product: GemmM16) -> TileConfigM64:
    """Small thread blocks for q, k and v, where every multiprocessor has one: they come out more evenly."""
    tiles, small = sum(one.tiles for one in product.matrices), TileConfigM64(1, 4, 3, 4)
    many = tiles >= small.warps * product.modules.num_sms and not product.form.act
    return small if many and len(product.matrices) > 1 else TileConfigM64()


class GemmM64:
    """The same as a product, for more rows."""

    def __init__(self, product: GemmM16, plan: TileConfigM64 | None = None) -> None:
        self.product, self.modules = product, product.modules
        self.widths = product.widths
        if product.form.apart:
            raise Unsupported("two matrices under one nonlinearity whose inputs are ordered differently")
        self.plan = self._fitted(plan or default_config(product))
        self._group = self.plan.tiles * self.plan.warps // (2 if product.form.act else 1)
        self._groups = [-(-one.tiles // self._group) for one in product.matrices]
        every = self._groups[0] if product.form.act else sum(self._groups)
        self.pieces = self.plan.pieces or self._cut(every)
        self.counts = torch.zeros(every, dtype=torch.int32, device=product.device)
        """Thread blocks that have left a group's sums, in rounds of as many as there are pieces."""

    def __call__(
        self,
        x: Tensor | PackedActs,
        out: Sequence[Tensor],
        residual: Tensor | None = None,
        heir: PackedActs | None = None,
    ) -> None:
        """Fill `out`, the product's `answers`, with x (rows, inputs) @ each matrix + residual.

        An heir gets the answers as well; then `out` may be empty.
        """
        rows, plan, handed = len(x), self.plan, x if isinstance(x, PackedActs) else None
        if not 1 <= rows <= MOST:
            raise Unsupported(f"{rows} rows are not multiplied straight from codes, only 1 to {MOST}")
        room = self._room(rows)
        job, groups = self.product.job(x, out, residual, self._groups)
        sums = groups * self.pieces * plan.warps * plan.tiles * TILE_N * room if self.pieces > 1 else 0
        left = torch.empty(sums, dtype=torch.float32, device=self.product.device)
        made = self.modules.module(SOURCE, **self.choices(rows, handed is not None, heir is not None))
        kept = () if handed is not None else self.product.prepare(made, job, rows, room)
        shared = _Shared(left.data_ptr(), self.counts.data_ptr())
        memory, early = self._spread(rows, groups * self.pieces)
        grid, threads = (groups * self.pieces, 1, 1), plan.warps * 32
        given = job, shared, chain_args(handed, heir)
        made.launch("gemm_m64", grid, threads, memory, given, early, self.pieces > 1)
        del kept, left  # not before the launch

    @property
    def shares(self) -> int:
        """Stretches of outputs, of 128 at most, whose squares are left one by one."""
        return sum(self._groups[: len(self.widths)]) * max(1, self._group * TILE_N // 128)

    def choices(self, rows: int, handed: bool = False, heir: bool = False) -> dict[str, int]:
        """What the kernels' source is told for so many rows."""
        dealt = gemm.dealt(self.product.form, self._room(rows) // 8, self.plan)
        return {**dealt, "MIN_BLOCKS": self.plan.resident, "SPLIT_K": self.pieces, **chain_defines(handed, heir)}

    def _cut(self, groups: int) -> int:
        """The pieces with which the busiest multiprocessor is done soonest; adding them up costs too."""
        bricks, num_sms = self.product.matrices[0].stored, self.modules.num_sms

        def cost(pieces: int) -> float:
            crowd = -(-groups * pieces // num_sms) - 1
            return -(-bricks // pieces) * (1 + _CROWDED * crowd) + (pieces > 1) * _ADDING

        room = num_sms * self.plan.resident  # pieces wait for each other, so all must run at once
        return min((n for n in _PIECES if n == 1 or (n <= bricks and groups * n <= room)), key=cost)

    def _room(self, rows: int) -> int:
        """Rows that are computed: few programs serve all numbers of them."""
        return -(-rows // 16) * 16

    def _memory(self, room: int, plan: TileConfigM64) -> int:
        """Bytes of shared memory: bricks and rows of each unit; in the end the sums."""
        tiles = plan.tiles * plan.warps
        ring = plan.stages * (tiles * gemm.slot(self.product.form) + room * TILE_K * 2)
        each = tiles // 2 if self.product.form.act else tiles
        return max(ring, room * (tiles * TILE_N + 8) * 4) + epilogue_smem_bytes(each * TILE_N, room)

    def _spread(self, rows: int, blocks: int) -> tuple[int, bool]:
        """Shared memory of a thread block, and whether they may start early: many are not quicker so."""
        room = self._room(rows)
        memory = self._memory(room, self.plan)
        if blocks > _EARLY * self.modules.num_sms:
            return memory, False
        return gemm.balance_occupancy(self.modules, blocks, memory), True

    def _fitted(self, plan: TileConfigM64) -> TileConfigM64:
        """A plan that fits for any number of rows: where sums are cut depends on it, so all have the same."""
        if self.product.form.act:
            plan = replace(plan, tiles=max(2, plan.tiles // 2 * 2))
        while (
            self._memory(MOST, plan) + gemm.RESERVED_SMEM
        ) * plan.resident > self.modules.memory + gemm.RESERVED_SMEM:
            if plan.resident > 1:
                plan = replace(plan, resident=plan.resident - 1)
            elif plan.stages > 2:
                plan = replace(plan, stages=plan.stages - 1)
            elif plan.warps > 1:
                plan = replace(plan, warps=plan.warps // 2)
            else:
                raise Unsupported(f"{self.modules.memory} bytes of shared memory are too few")
        return plan
