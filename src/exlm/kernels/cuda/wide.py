"""Packed matrices times 17 to 64 rows, straight from their codes: one launch for all that share an input.

The work of all thread blocks is one line of units, cut into equal stretches whatever the rows, so that a
row's answer is the same bits in any company of this size. Fewer rows are `linear`'s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...errors import Unsupported
from . import linear
from .lanes import BLOCK, TILE
from .linear import Product

SOURCE = Path(__file__).with_name("wide.cu")
MOST = 64
"""Rows."""


class _Line(ctypes.Structure):
    _fields_ = (("left", ctypes.c_void_p), ("counts", ctypes.c_void_p), ("units", ctypes.c_int))


@dataclass(frozen=True)
class Plan(linear.Plan):
    """How a product is dealt out; here each warp of a thread block has tiles of its own."""

    stages: int = 4  # units on their way or being worked on
    resident: int = 1  # thread blocks of a multiprocessor


def wide_plan(product: Product) -> Plan:
    """What was quickest for matrices of this shape on an H200 (`benchmarks.matrices`)."""
    few = sum(one.tiles for one in product.matrices) <= 512
    return Plan(1, 8, 4) if few and not product.form.act else Plan(2, 8, 3)


class WideProduct:
    """The same as a product, for more rows."""

    def __init__(self, product: Product, plan: Plan | None = None) -> None:
        self.product, self.workshop = product, product.workshop
        self.widths = product.widths
        if product.form.apart:
            raise Unsupported("two matrices under one nonlinearity whose inputs are ordered differently")
        self.plan = self._fitted(plan or Plan())
        group = self.plan.tiles * self.plan.warps // (2 if product.form.act else 1)
        self._units = [-(-one.tiles // group) * one.stored for one in product.matrices]
        every = self._units[0] if product.form.act else sum(self._units)
        self.counts = torch.zeros(every, dtype=torch.int32, device=product.device)
        """Thread blocks that have left a group's sums, at its first unit; all zero between launches."""

    def __call__(self, x: Tensor, out: Sequence[Tensor], residual: Tensor | None = None) -> None:
        """Fill out[i] (rows, outputs) with x (rows, inputs) @ matrix i + residual; all contiguous float16."""
        rows, plan = len(x), self.plan
        if not 1 <= rows <= MOST:
            raise Unsupported(f"{rows} rows are not multiplied straight from codes, only 1 to {MOST}")
        room = self._room(rows)
        job, units = self.product.job(x, out, residual, self._units)
        workers = min(units, self.workshop.processors * plan.resident)
        sums = 2 * workers * plan.warps * plan.tiles * TILE * room
        left = torch.empty(sums, dtype=torch.float32, device=x.device)
        made = self.workshop.program(SOURCE, **self.choices(rows))
        kept = self.product.prepare(made, job, rows, room)
        line = _Line(left.data_ptr(), self.counts.data_ptr(), units)
        shared = self._memory(room, plan)
        made.launch("multiply_wide", (workers, 1, 1), plan.warps * 32, shared, (job, line))
        del kept, left  # not before the launch

    def choices(self, rows: int) -> dict[str, int]:
        """What the kernels' source is told for so many rows."""
        told = linear.dealt(self.product.form, self._room(rows) // 8, self.plan)
        return {**told, "RESIDENT": self.plan.resident}

    def _room(self, rows: int) -> int:
        """Rows that are computed: few programs serve all numbers of them."""
        return -(-rows // 16) * 16

    def _memory(self, room: int, plan: Plan) -> int:
        """Bytes of shared memory: bricks and rows of each unit, and a number."""
        bricks = plan.tiles * plan.warps * linear.slot(self.product.form)
        return plan.stages * (bricks + room * BLOCK * 2) + 16

    def _fitted(self, plan: Plan) -> Plan:
        """A plan that fits for any number of rows: where sums are cut depends on it, so all have the same."""
        if self.product.form.act:
            plan = replace(plan, tiles=max(2, plan.tiles // 2 * 2))
        while self._memory(MOST, plan) * plan.resident > self.workshop.memory:
            if plan.resident > 1:
                plan = replace(plan, resident=plan.resident - 1)
            elif plan.stages > 2:
                plan = replace(plan, stages=plan.stages - 1)
            elif plan.warps > 1:
                plan = replace(plan, warps=plan.warps // 2)
            else:
                raise Unsupported(f"{self.workshop.memory} bytes of shared memory are too few")
        return plan
