"""What the bricks of a matrix have in common, and what a share of them is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...formats.packed import Segment
from .lanes import TILE_K

LARGEST = 65504.0
"""The largest scale that float16 can say."""

Zeros = Literal["half", "none", "table"]
"""Zero points: half the range of the codes, zero, or one for each group and output."""


@dataclass(frozen=True)
class TileLayout:
    """What the bricks of a matrix have in common."""

    bits: int
    steps: int  # sixteens of inputs with one scale: 1, 2, 4 or 8
    fine: int  # the same in the bricks of codes that had another width
    zeros: Zeros
    minima: bool

    @property
    def tables(self) -> int:
        """Numbers for each group and output."""
        return 1 + (self.zeros == "table") + self.minima

    def groups(self, fine: bool) -> int:
        """Groups of inputs in a brick."""
        return 8 // (self.fine if fine else self.steps)

    def brick(self, fine: bool) -> int:
        """Bytes of a brick."""
        return 256 * self.bits + 32 * self.tables * self.groups(fine)

    @property
    def largest(self) -> int:
        """Bytes of the largest brick."""
        return max(self.brick(False), self.brick(True))


@dataclass(frozen=True, eq=False)
class RepackJob:
    """What bricks are made of whose codes all have as many digits: segments, one behind the other."""

    segments: tuple[Segment, ...]
    digits: int
    layout: TileLayout
    fine: bool
    factor: float  # of scales and minimums
    outputs: int

    @property
    def rows(self) -> int:
        """Inputs, without padding."""
        return sum(segment.in_features for segment in self.segments)

    @property
    def blocks(self) -> int:
        """Blocks of inputs."""
        return -(-self.rows // TILE_K)

    @property
    def groups(self) -> int:
        """Groups of inputs in a brick."""
        return self.layout.groups(self.fine)


RepackFn = Callable[[Sequence[tuple[Tensor, RepackJob]]], None]
"""Makes bricks, (tiles, blocks, digits, bytes) uint8, of pieces; `Unsupported` for scales above LARGEST."""


def digits(bits: int, width: int, signed: bool) -> int:
    """Into how many digits of a width codes of so many bits are cut."""
    if not signed:
        return -(-bits // width)
    half, low, high, count = 1 << (width - 1), -(1 << (bits - 1)), (1 << (bits - 1)) - 1, 1
    while low < -half or high >= half:
        low, high, count = (low + half) >> width, (high + half) >> width, count + 1
    return count
