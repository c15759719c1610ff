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
from .pick import Picked, best

PROGRAMS = 256  # that edit at a time, about: two for each multiprocessor of a large GPU
EDITED = 4096  # columns that one of them loads at a time
TILE = 16384  # columns loaded by a program that picks: what it takes to keep a multiprocessor's memory busy
PART = 4096  # candidates looked at a time
WARPS = 16
COMPILED = 64  # kernels that are kept ready


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def serves(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return device.type == "cuda" and _has_triton()


class Kernel:
    """A Triton kernel (logits, their stride, arguments, constants) that is launched again and again.

    What it was compiled to is kept: Triton would look at every argument to find it.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[tuple[object, ...], Any] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        x: Tensor,
        stride: int,
        args: tuple[Tensor | int, ...],
        constants: tuple[int, ...],
    ) -> None:
        """Launch it. Tensors among the arguments are aligned; it is not compiled for the numbers there."""
        key = (stride, x.data_ptr() % 16 == 0, *constants)
        ready = self._compiled.get(key)
        if ready is not None:
            ready[grid](x, stride, *args, *constants)
            return
        ready = self._kernel[grid](x, stride, *args, *constants, **self._options)
        if ready is None:
            return  # it was interpreted
        if len(self._compiled) >= COMPILED:
            self._compiled.clear()
        self._compiled[key] = ready


class Work(NamedTuple):
    """What is to be done: for how many rows, their lane and top tokens, whether logits or targets change."""

    rows: int
    lane: Lane
    wanted: int
    edited: bool
    moves: bool


class Press:
    """The kernels on one device and the memory they need, which is kept. For one stream."""

    def __init__(self, width: int, device: torch.device) -> None:
        """For logits of this many columns."""
        from .triton.edit import edit_kernel
        from .triton.pick import largest_kernel, pick_kernel

        self.width, self.device = width, device
        exact = {"enable_fp_fusion": False}  # sums as the host rounds them
        self._edit = Kernel(edit_kernel, num_warps=WARPS, **exact)
        self._pick = Kernel(pick_kernel, num_warps=WARPS, **exact)
        self._largest = Kernel(largest_kernel, num_warps=WARPS)
        self._rooms: dict[torch.dtype, tuple[int, Tensor]] = {}

    def largest(self, x: Tensor) -> Picked:
        """The largest logit of every row (rows, width)."""
        tokens = torch.empty(len(x), dtype=torch.int64, device=self.device)
        shares = torch.empty(len(x), device=self.device)
        self._largest.launch((len(x), 1, 1), x, x.stride(0), (tokens, shares), (self.width, TILE))
        return Picked(tokens, shares)

    def pick(self, x: Tensor, table: Tensor, words: Tensor, work: Work) -> tuple[Picked, Tensor]:
        """A token for each row of a table, and mirostat's targets, for some rows of logits (rows, width).

        The logits are not changed.
        """
        lane, wanted, edited = work.lane, work.wanted, int(work.edited)
        count, width, device = work.rows, self.width, self.device
        tokens = torch.empty(count, dtype=torch.int64, device=device)
        shares = torch.empty(count, device=device)
        targets = torch.empty(count, dtype=torch.float64, device=device) if work.moves else table
        all_p = torch.zeros(count, lane.sort, dtype=torch.float64, device=device) if wanted else table
        all_ids = torch.zeros(count, lane.sort, dtype=torch.int64, device=device) if wanted else words
        tiles = -(-width // EDITED)
        span = -(-tiles // max(1, PROGRAMS // count))
        held = tiles * EDITED // RUN
        maxima = self._room(torch.int32, count * held)
        copy = self._room(torch.float32, count * width) if edited else table
        stride = x.stride(0)
        self._edit.launch(
            (count, -(-tiles // span), 1),
            x,
            stride,
            (copy, maxima, table, words, held, span),
            (width, EDITED, edited),
        )
        if edited:
            x, stride = copy, width
        sort, runs = lane.sort, max(RUN, 1 << (-(-width // RUN) - 1).bit_length())
        room = sort + TILES + (sort + TILES + width * lane.wide + 1) // 2
        scratch = self._room(torch.int64, count * room)
        tile = TILE // 2 if lane.wide else TILE  # those passes need more registers
        self._pick.launch(
            (count, 1, 1), x, stride,
            (maxima, table, words, scratch, tokens, shares, targets, all_p, all_ids, held, room, edited,
             wanted),
            (width, runs, sort, tile, PART, int(lane.wide), int(lane.shaped), int(wanted > 0)),
        )  # fmt: skip
        picked = Picked(tokens, shares)
        if wanted:
            picked.top_tokens, picked.top_p = best(all_p, all_ids, wanted)
        return picked, targets

    def _room(self, dtype: torch.dtype, size: int) -> Tensor:
        """Memory for this many numbers, or more."""
        known = self._rooms.get(dtype)
        if known is None or known[0] < size:
            self._rooms.pop(dtype, None)
            known = self._rooms[dtype] = (size, torch.empty(size, dtype=dtype, device=self.device))
        return known[1]
