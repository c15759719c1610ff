"""Fused: a batch picked by two kernels on a GPU. How they are launched, and the memory they work in.

`pipeline.py` says what is right and takes the rows that have no lane here, and all rows where Triton is
missing. What is launched for which rows, and with which words, is decided in `desk.py` and `party.py`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from .lanes import RUN, TILES, Lane
from .launch import Grid, Kernel
from .pick import Picked, best

PROGRAMS = 256  # that edit at a time, about: two for each multiprocessor of a large GPU
EDITED = 4096  # columns that one of them loads at a time
TILE = 16384  # columns loaded by a program that picks: what it takes to keep a multiprocessor's memory busy
PART = 4096  # candidates looked at a time
WARPS = 16
FEWER = 8  # for rows with top-k: what they sort is little, and warps wait for each other
KEPT = 16  # layouts, and shapes of answers
SHEETS = 32  # answers for which memory is allocated at a time
ALIGNED = 16  # numbers after which an address is a multiple of 16 bytes


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def serves(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return device.type == "cuda" and _has_triton()


class Work(NamedTuple):
    """What is to be done: for how many rows, their lane and top tokens; whether logits or targets change, and
    whether texts are searched."""

    rows: int
    lane: Lane
    wanted: int
    edited: bool
    moves: bool
    searches: bool


class Layout(NamedTuple):
    """How work is cut up: programs that edit, what those of a row share, what kernels are compiled for."""

    grid: Grid
    held: int
    span: int
    room: int
    edits: tuple[int, ...]
    picks: tuple[int, ...]


class Sheets:
    """Tensors (count,) to answer on: a new one each time, many of them cut from one allocation."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._count, self._dtype, self._device = count, dtype, device
        self._left: list[Tensor] = []

    def next(self) -> Tensor:
        """One that nobody else has."""
        if not self._left:
            padded = -(-self._count // ALIGNED) * ALIGNED
            with torch.inference_mode(False):  # they outlive the call that they are made in
                block = torch.empty(SHEETS, padded, dtype=self._dtype, device=self._device)
                self._left.extend(block[:, : self._count].unbind())
        return self._left.pop()


class Press:
    """The kernels on one device and the memory they need, which is kept. For one stream."""

    def __init__(self, width: int, device: torch.device) -> None:
        """For logits of this many columns."""
        from .triton.edit import edit_kernel
        from .triton.pick import largest_kernel, pick_kernel

        self.width, self.device = width, device
        exact = {"enable_fp_fusion": False}  # sums as the host rounds them
        self._edit = Kernel(edit_kernel, num_warps=WARPS, **exact)
        self._wide = Kernel(pick_kernel, num_warps=WARPS, **exact)
        self._narrow = Kernel(pick_kernel, num_warps=FEWER, **exact)
        self._largest = Kernel(largest_kernel, num_warps=WARPS)
        self._rooms: dict[str, tuple[int, Tensor]] = {}
        self._layouts: dict[Work, Layout] = {}
        self._sheets: dict[tuple[int, torch.dtype], Sheets] = {}

    def largest(self, x: Tensor) -> Picked:
        """The largest logit of every row (rows, width)."""
        count = x.shape[0]
        tokens, shares = self._sheet(count, torch.int64), self._sheet(count, torch.float32)
        self._largest.launch((count, 1, 1), x, x.stride(0), (tokens, shares), (self.width, TILE))
        return Picked(tokens, shares)

    def pick(self, x: Tensor, table: Tensor, words: Tensor, work: Work) -> tuple[Picked, Tensor]:
        """A token for each row of a table, and mirostat's targets, for some rows of logits (rows, width).

        The logits are not changed.
        """
        count, lane, wanted, edited, moves, searches = work
        grid, held, span, room, edits, picks = self._layout(work)
        tokens, shares = self._sheet(count, torch.int64), self._sheet(count, torch.float32)
        targets = self._sheet(count, torch.float64) if moves else table
        all_p, all_ids = self._all(count, lane.sort) if wanted else (table, words)
        maxima, stride = self._room("maxima", torch.int32, count * held), x.stride(0)
        copy = self._room("copy", torch.float32, count * self.width) if edited else table
        counts = self._room("counts", torch.int32, count * self.width) if searches else maxima
        self._edit.launch(grid, x, stride, (copy, maxima, counts, table, words, held, span), edits)
        if edited:
            x, stride = copy, self.width
        scratch = self._room("scratch", torch.int64, count * room)
        pick = self._wide if lane.wide else self._narrow
        pick.launch(
            (count, 1, 1), x, stride,
            (maxima, table, words, scratch, tokens, shares, targets, all_p, all_ids, held, room, int(edited),
             wanted),
            picks,
        )  # fmt: skip
        picked = Picked(tokens, shares)
        if wanted:
            picked.top_tokens, picked.top_p = best(all_p, all_ids, wanted)
        return picked, targets

    def _layout(self, work: Work) -> Layout:
        known = self._layouts.get(work)
        if known is None:
            if len(self._layouts) >= KEPT:
                self._layouts.clear()
            known = self._layouts[work] = self._lay_out(work)
        return known

    def _lay_out(self, work: Work) -> Layout:
        count, lane, wanted, edited, _, searches = work
        width, sort = self.width, lane.sort
        tiles = -(-width // EDITED)
        span = -(-tiles // max(1, PROGRAMS // count))
        runs = max(RUN, 1 << (-(-width // RUN) - 1).bit_length())
        tile = TILE // 2 if lane.wide else TILE  # those passes need more registers
        return Layout(
            grid=(count, -(-tiles // span), 1),
            held=tiles * EDITED // RUN,
            span=span,
            room=sort + TILES + (sort + TILES + width * lane.wide + 1) // 2,
            edits=(width, EDITED, int(edited), int(searches)),
            picks=(width, runs, sort, tile, PART, int(lane.wide), int(lane.shaped), int(wanted > 0)),
        )

    def _sheet(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory for an answer."""
        sheets = self._sheets.get((count, dtype))
        if sheets is None:
            if len(self._sheets) >= KEPT:
                self._sheets.clear()
            sheets = self._sheets[count, dtype] = Sheets(count, dtype, self.device)
        return sheets.next()

    def _all(self, count: int, sort: int) -> tuple[Tensor, Tensor]:
        """Memory for candidates and their probabilities."""
        p = torch.zeros(count, sort, dtype=torch.float64, device=self.device)
        return p, torch.zeros(count, sort, dtype=torch.int64, device=self.device)

    def _room(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        """Memory for this many numbers, or more; all 0 at first."""
        known = self._rooms.get(name)
        if known is None or known[0] < size:
            self._rooms.pop(name, None)
            known = self._rooms[name] = (size, torch.zeros(size, dtype=dtype, device=self.device))
        return known[1]
