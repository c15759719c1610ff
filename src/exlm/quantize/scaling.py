"""The scales of one group of rows on EXL2's own grid: squared 4-bit codes under one float16 maximum.

Every number here is what a reader will decode, roundings included; how the rows are then rounded is the
business of `rounding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.scales import Exl2Scales
from .rounding import Grid

WIDEST = 16  # the largest factor of the grid, before it is squared
LARGEST = 65504.0
TINY = 1e-30
LOWEST = {2: 0.35, 3: 0.45, 4: 0.6}
"""How far below the largest number a scale is looked for, by width; 0.75 for the others."""

AT_ONCE, IN_CACHE = 2**25, 2**18
"""Numbers that are tried together on a GPU, and on a processor."""

NEAR = (1.0, 0.94, 0.97, 0.985, 0.995, 1.005, 1.015, 1.03, 1.06)
"""Maxima that are tried around the present one."""


class GroupScale(NamedTuple):
    """Codes of each column (0 to 15) and the group's maximum."""

    codes: Tensor  # (columns,) uint8
    maximum: Tensor  # () float16

    def decoded(self) -> Tensor:
        """(columns,) float32: the factors a reader gets."""
        return Exl2Scales(self.codes[None], self.maximum[None]).expand()[0].float()

    def value(self, codes: Tensor) -> Tensor:
        """What a reader makes of whole numbers (rows, columns)."""
        return (codes * self.decoded()).half().float()

    def masked(self, real: Tensor) -> GroupScale:
        """The same if `real`, else the scale of a group of zeros."""
        return GroupScale(self.codes * real, self.maximum * real)

    def grid(self, bits: int) -> Grid:
        """The numbers that rows of this width may be."""
        half = torch.full((), float(1 << (bits - 1)), device=self.codes.device)
        return Grid(self.decoded(), -half, half - 1)


@dataclass(frozen=True)
class Search:
    """Looks for the scales of a group, and keeps them; `fine` as in `choose`."""

    bits: int
    fine: int

    def __call__(self, w: Tensor, importance: Tensor, codes: Tensor, maximum: Tensor) -> Grid:
        """The grid of these rows."""
        found = choose(w, self.bits, importance, self.fine)
        codes.copy_(found.codes)
        maximum.copy_(found.maximum)
        return found.grid(self.bits)


@dataclass(frozen=True)
class SideBySide:
    """Looks for the scales of several widths, each for its share of the columns; keeps nothing."""

    widths: tuple[int, ...]
    fine: int

    def __call__(self, w: Tensor, importance: Tensor) -> Grid:
        """The grid of these rows."""
        parts = w.chunk(len(self.widths), 1)
        pairs = zip(parts, self.widths, strict=True)
        grids = [choose(part, bits, importance, self.fine).grid(bits) for part, bits in pairs]
        columns = parts[0].shape[1]
        return Grid(*(torch.cat([x.expand(columns) for x in each]) for each in zip(*grids, strict=True)))


def choose(w: Tensor, bits: int, importance: Tensor, fine: int) -> GroupScale:
    """The scales that round `w` (rows, columns) best, each row's squared error weighted by its importance.

    Each column's best factor is searched first in `fine` steps, then the maximum under which the grid comes
    closest to all of them.
    """
    base = w.abs().amax(0) / ((2**bits - 1) / 2)
    tried = base * _steps(1.1, LOWEST.get(bits, 0.75), fine, w)
    wish = tried.gather(0, _errors(w, tried, bits, importance).argmin(0, keepdim=True))[0]
    maxima = (wish.max() * _steps(1.08, 0.7, max(4, fine // 2), w)[:, 0]).clamp(max=LARGEST).half()
    low, high = _around(wish, maxima)
    below, above = (_errors(w, Exl2Scales(x, maxima).expand().float(), bits, importance) for x in (low, high))
    total = torch.minimum(below, above).sum(1).masked_fill(_too_small(maxima), torch.inf)
    at = total.argmin().view(1)
    found = GroupScale(_one(torch.where(above < below, high, low), at), _one(maxima, at))
    return found.masked(torch.isfinite(_one(total, at)))


def move(now: GroupScale, wish: Tensor, care: Tensor) -> GroupScale:
    """The grid nearest to what each column wishes, squared and weighted by its care; or the same as now."""

    def cost(scale: Tensor) -> Tensor:
        return care * (scale - wish).square()

    least = cost(now.decoded()).sum() * (1 - 1e-6)
    maxima = (now.maximum.float() * _near(wish.device)).clamp(max=LARGEST).half()
    low, high = _around(wish.clamp(min=0), maxima)
    below, above = (cost(Exl2Scales(x, maxima).expand().float()) for x in (low, high))
    total = torch.minimum(below, above).sum(1).masked_fill(_too_small(maxima), torch.inf)
    at = total.argmin().view(1)
    better = _one(total, at) < least
    codes = _one(torch.where(above < below, high, low), at)
    return GroupScale(
        torch.where(better, codes, now.codes), torch.where(better, _one(maxima, at), now.maximum)
    )


@cache
def _near(device: torch.device) -> Tensor:
    """Made once: bringing it to a device waits for that."""
    return torch.tensor(NEAR, device=device)


def _errors(w: Tensor, scales: Tensor, bits: int, importance: Tensor) -> Tensor:
    """(scales, columns) the weighted squared error of rounding rows at each of these scales."""
    half = 1 << (bits - 1)
    found = torch.empty_like(scales)
    step = max(1, (AT_ONCE if w.is_cuda else IN_CACHE) // w.numel())
    for a in range(0, len(scales), step):
        scale = scales[a : a + step, None]
        inverse = scale.clamp(min=TINY).reciprocal_()  # where there is no scale, any code means 0
        error = (w * inverse).round_().clamp_(-half, half - 1).mul_(scale).sub_(w)
        torch.matmul(importance, error.square_(), out=found[a : a + step])
    return found


def _steps(first: float, last: float, count: int, like: Tensor) -> Tensor:
    return torch.linspace(first, last, count, device=like.device)[:, None]


def _around(wish: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """(maxima, columns) the codes of the two grid points around each column's wish."""
    lower = ((wish / maxima.float()[:, None]).sqrt() * WIDEST).floor().clamp(1, WIDEST)
    upper = (lower + 1).clamp(max=WIDEST)
    return (lower - 1).to(torch.uint8), (upper - 1).to(torch.uint8)


def _too_small(maxima: Tensor) -> Tensor:
    """Those whose grid float16 cannot hold."""
    return (maxima.float() / 256).half() == 0


def _one(of: Tensor, at: Tensor) -> Tensor:
    """An entry, without waiting for the device to say which."""
    return of.index_select(0, at)[0]
