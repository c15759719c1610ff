"""Fused: a batch picked by two kernels on a GPU. How they are launched, and the memory they work in.

`pipeline.py` says what is right and takes the rows that have no lane here, and all rows where Triton is
missing. What is launched for which rows, and with which words, is decided in `desk.py` and `party.py`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .lanes import RUN, TILES, Lane
from .launch import Kernel, Launch
from .pick import best
from .sheets import Sheet, Sheets, Targets

PROGRAMS = 256  # that edit at a time, about: two for each multiprocessor of a large GPU
EDITED = 4096  # columns that one of them loads at a time
TILE = 16384  # columns loaded by a program that picks: what it takes to keep a multiprocessor's memory busy
PART = 4096  # candidates looked at a time
WARPS = 16
FEWER = 8  # for rows with top-k: what they sort is little, and warps wait for each other
KEPT = 32  # kinds of work that are kept ready, and sizes of answers


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


class Order(NamedTuple):
    """One kind of work made ready: its launches, and the copy of the logits that the first one makes."""

    edit: Launch
    pick: Launch
    copy: Tensor | None
    targets: Targets


class Answer(NamedTuple):
    """What is known of some rows besides their tokens: mirostat's targets, top tokens, and those' p."""

    targets: Tensor
    top_tokens: Tensor | None = None
    top_p: Tensor | None = None


class Press:
    """The kernels on one device and the memory they need, which is kept. For one stream."""

    def __init__(self, width: int, device: torch.device, stream: int = 0) -> None:
        """For logits of this many columns, on the current stream, whose handle is given."""
        from .triton.edit import edit_kernel
        from .triton.pick import largest_kernel, pick_kernel

        self.width, self.device, self._stream = width, device, stream
        exact = {"enable_fp_fusion": False}  # sums as the host rounds them
        self._edit = Kernel(edit_kernel, 3, num_warps=WARPS, **exact)
        self._wide = Kernel(pick_kernel, 9, num_warps=WARPS, **exact)
        self._narrow = Kernel(pick_kernel, 9, num_warps=FEWER, **exact)
        self._largest = Kernel(largest_kernel, 4, num_warps=WARPS)
        self._rooms: dict[str, tuple[int, Tensor]] = {}
        self._orders: dict[Work, Order] = {}
        self._greedy: dict[int, Launch] = {}
        self._sheets: dict[int, Sheets] = {}
        cuda: Any = torch.cuda  # its events have no types
        self._done: Any = cuda.Event() if device.type == "cuda" else None
        self._queue: Any = cuda.current_stream(device) if device.type == "cuda" else None

    def sheet(self, count: int) -> Sheet:
        """Memory for the tokens of a batch of this many rows."""
        sheets = self._sheets.get(count)
        if sheets is None:
            if len(self._sheets) >= KEPT:
                self._sheets.clear()
            sheets = self._sheets[count] = Sheets(count, self.device, self._done)
        self._last = sheets
        return sheets.next()

    def done(self) -> None:
        """All that a batch needs is launched: after that its sheet can be read."""
        if self._done is not None:
            self._done.record(self._queue)
        self._last.restock()

    def largest(self, x: Tensor, sheet: Sheet) -> None:
        """Write down the largest logit of every row (rows, width)."""
        count = x.shape[0]
        launch = self._greedy.get(count)
        if launch is None:
            constants = (self.width, TILE)
            launch = self._greedy[count] = Launch(self._largest, (count, 1, 1), (), constants, self._stream)
        launch(x, x.stride(0), sheet[:3], sheet.addresses)

    def pick(self, x: Tensor, table: Tensor, words: Tensor, work: Work, sheet: Sheet) -> Answer:
        """Write down a token for each row of a table, in its place in the batch, from logits (rows, width).

        Those are not changed.
        """
        order = self._orders.get(work) or self._ready(work)
        stride, given = x.stride(0), (table.data_ptr(), words.data_ptr())
        order.edit(x, stride, (table, words), given)
        if order.copy is not None:
            x, stride = order.copy, self.width
        targets = order.targets.next() if work.moves else table
        all_p, all_ids = self._all(work.rows, work.lane.sort) if work.wanted else (table, words)
        moves = (*sheet[:3], targets, all_p, all_ids, table, words)
        addresses = (targets.data_ptr(), all_p.data_ptr(), all_ids.data_ptr(), *given)
        order.pick(x, stride, moves, sheet.addresses + addresses)
        return Answer(targets, *(best(all_p, all_ids, work.wanted) if work.wanted else ()))

    def _ready(self, work: Work) -> Order:
        """How work is cut up, and the memory that its programs share."""
        count, lane, wanted, edited, _, searches = work
        width, sort = self.width, lane.sort
        tiles = -(-width // EDITED)
        span = -(-tiles // max(1, PROGRAMS // count))
        held = tiles * EDITED // RUN
        room = sort + TILES + (sort + TILES + width * lane.wide + 1) // 2
        runs = max(RUN, 1 << (-(-width // RUN) - 1).bit_length())
        tile = TILE // 2 if lane.wide else TILE  # those passes need more registers
        maxima = self._room("maxima", torch.int32, count * held)
        copy = self._room("copy", torch.float32, count * width) if edited else None
        counts = self._room("counts", torch.int32, count * width) if searches else maxima
        scratch = self._room("scratch", torch.int64, count * room)
        edit = Launch(
            self._edit, (count, -(-tiles // span), 1),
            (maxima if copy is None else copy, maxima, counts, held, span),
            (width, EDITED, int(edited), int(searches)), self._stream,
        )  # fmt: skip
        pick = Launch(
            self._wide if lane.wide else self._narrow, (count, 1, 1),
            (maxima, scratch, held, room, int(edited), wanted),
            (width, runs, sort, tile, PART, int(lane.wide), int(lane.shaped), int(wanted > 0)), self._stream,
        )  # fmt: skip
        if len(self._orders) >= KEPT:
            self._orders.clear()
        order = self._orders[work] = Order(edit, pick, copy, Targets(count, self.device))
        return order

    def _all(self, count: int, sort: int) -> tuple[Tensor, Tensor]:
        """Memory for candidates and their probabilities."""
        p = torch.zeros(count, sort, dtype=torch.float64, device=self.device)
        return p, torch.zeros(count, sort, dtype=torch.int64, device=self.device)

    def _room(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        """Memory for this many numbers, or more; all 0 at first."""
        known = self._rooms.get(name)
        if known is None or known[0] < size:
            self._orders.clear()  # they hold what is too small
            self._rooms.pop(name, None)
            known = self._rooms[name] = (size, torch.zeros(size, dtype=dtype, device=self.device))
        return known[1]
