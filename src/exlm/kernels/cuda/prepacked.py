"""Rows left by one kernel as the next product takes them, so that nobody need prepare them for it.

A root mean square before the product is divided by only in the end: whoever leaves the rows multiplies them
by the norm's weights and says how large their squares are. The weights are brought to one at most, so that
no number becomes too large for float16 on the way.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import Unsupported
from .lanes import MAX_M16, TILE_K
from .repack import MmaWeight, tile_perm

NO_SLOT = 65535
COPIES = 8
"""Stored inputs that one input may be: its codes have digits, and matrices orders of their own."""


class EpilogueTarget(ctypes.Structure):
    """The kernels' `Heir`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("places", "gaps", "norm", "words", "squares")),
        *((name, ctypes.c_int) for name in ("empty", "room", "shares", "few")),
    )


class ChainArgs(ctypes.Structure):
    """The kernels' `Link`."""

    _fields_ = (
        ("heir", EpilogueTarget),
        ("squares", ctypes.c_void_p),
        ("shares", ctypes.c_int),
        ("lift", ctypes.c_float),
    )


class InputLayout:
    """Where a product takes its inputs: what those must know who leave rows for it."""

    def __init__(self, matrices: Sequence[MmaWeight], entrances: Sequence[int], norm: Tensor | None) -> None:
        """`entrances` says for each matrix which one has the same order."""
        firsts = list(dict.fromkeys(entrances))
        orders = [fragment_order(tile_perm(matrices[first])) for first in firsts]
        starts = dict(zip(firsts, accumulate(map(len, orders[:-1]), initial=0), strict=True))
        self.starts = [starts[entrance] for entrance in entrances]
        """Of each matrix, among all stored inputs."""
        device, lanes = matrices[0].main.bricks.device, torch.cat(orders).numpy()
        self.stored = len(lanes)
        gaps = torch.from_numpy(np.flatnonzero(lanes < 0))
        self.empty = len(gaps)
        self.gaps = as_uint16(gaps).to(device, non_blocking=True)
        self.places = as_uint16(_places(lanes, matrices[0].in_features)).to(device, non_blocking=True)
        self._norm = norm

    @cached_property
    def lift(self) -> float:
        """What the norm's weights are divided by. Not asked before all are there: it waits for the device."""
        return 1.0 if self._norm is None else 2.0 ** math.frexp(float(self._norm.abs().max()))[1]

    @cached_property
    def norm(self) -> Tensor | None:
        """What rows are multiplied by, one at most."""
        return None if self._norm is None else self._norm.float().contiguous() / self.lift

    def open(self, rows: int, shares: int) -> PackedActs:
        """Room for rows that are still to come, from so many thread blocks for each of them."""
        room = rows if rows <= MAX_M16 else -(-rows // 16) * 16
        device = self.places.device
        words = torch.empty(self.stored * room, dtype=torch.float16, device=device)
        squares = None
        if self.norm is not None:
            squares = torch.empty(rows * shares, dtype=torch.float32, device=device)
        return PackedActs(self, rows, room, words, squares, shares)

    def heir(self, handed: PackedActs) -> EpilogueTarget:
        """What a kernel is told that leaves rows there."""
        return EpilogueTarget(
            places=self.places.data_ptr(),
            gaps=self.gaps.data_ptr(),
            norm=None if self.norm is None else self.norm.data_ptr(),
            words=handed.words.data_ptr(),
            squares=None if handed.squares is None else handed.squares.data_ptr(),
            empty=self.empty,
            room=handed.room,
            shares=handed.shares,
            few=handed.rows <= MAX_M16,
        )


@dataclass(frozen=True, eq=False)
class PackedActs:
    """Rows as a product takes them."""

    input_layout: InputLayout
    rows: int
    room: int
    words: Tensor
    squares: Tensor | None
    shares: int

    def __len__(self) -> int:
        return self.rows

    @property
    def starts(self) -> list[int]:
        """The address of what each matrix takes."""
        return [self.words.data_ptr() + start * self.room * 2 for start in self.input_layout.starts]


def chain_args(handed: PackedActs | None, heir: PackedActs | None) -> ChainArgs:
    """What a product is told of rows that were left for it, and of those it leaves."""
    made = ChainArgs()
    if handed is not None:
        made.lift = handed.input_layout.lift
        if handed.squares is not None:
            made.squares, made.shares = handed.squares.data_ptr(), handed.shares
    if heir is not None:
        if handed is None:
            raise Unsupported("rows that were not handed over, to be handed on")
        made.heir = heir.input_layout.heir(heir)
    return made


def chain_defines(handed: bool, heir: bool) -> dict[str, int]:
    """What the kernels' source is told of that; nothing if there is nothing to tell."""
    return {"IN_PREPACKED": int(handed), "OUT_PREPACKED": int(heir)} if handed or heir else {}


def epilogue_smem_bytes(outputs: int, room: int) -> int:
    """Bytes of shared memory that a thread block keeps for its answers."""
    return outputs * (2 * COPIES + 4) + room * 4


def fragment_order(source: Tensor) -> Tensor:
    """Stored inputs in the order of the lanes: brick, pair of steps, quarter, step, input."""
    return source.view(-1, TILE_K // 32, 2, 4, 4).transpose(2, 3).flatten()


def as_uint16(places: Tensor) -> Tensor:
    """The lowest 16 bits of places, which torch knows with a sign only; -1 is NOWHERE."""
    return places.to(torch.int16)


def _places(lanes: npt.NDArray[np.int32], inputs: int) -> Tensor:
    """(inputs, COPIES) which stored inputs each is, -1 for none.

    In numpy: torch would wake all its threads for so little, once for each matrix that is loaded.
    """
    if len(lanes) >= NO_SLOT:
        raise Unsupported(f"{len(lanes)} stored inputs, which must be below {NO_SLOT}")
    there = np.flatnonzero(lanes >= 0)
    whose = lanes[there]
    order = np.argsort(whose, kind="stable")
    counts = np.bincount(whose, minlength=inputs)
    if int(counts.max()) > COPIES:
        raise Unsupported(f"an input that is stored {int(counts.max())} times, more than {COPIES}")
    whose, before = whose[order], counts.cumsum() - counts
    places = np.full((inputs, COPIES), -1, dtype=np.int32)
    places[whose, np.arange(len(whose)) - before[whose]] = there[order]
    return torch.from_numpy(places)
