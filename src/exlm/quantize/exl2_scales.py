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
from .gptq import Grid

MAX_SCALE = 16  # the largest factor of the grid, before it is squared
FP16_MAX = 65504.0
TINY = 1e-30
MIN_SCALE_RATIO = {2: 0.35, 3: 0.45, 4: 0.6}
"""How far below the largest number a scale is looked for, by width; 0.75 for the others."""

GPU_CHUNK, CPU_CHUNK = 2**25, 2**18
"""Numbers that are tried together on a GPU, and on a processor."""

MAXIMUM_RATIOS = (1.0, 0.94, 0.97, 0.985, 0.995, 1.005, 1.015, 1.03, 1.06)
"""Maxima that are tried around the present one."""


class GroupScale(NamedTuple):
    """Codes of each column (0 to 15) and the group's maximum."""

    codes: Tensor  # (columns,) uint8
    maximum: Tensor  # () float16

    def decode(self) -> Tensor:
        """(columns,) float32: the factors a reader gets."""
        return Exl2Scales(self.codes[None], self.maximum[None]).expand()[0].float()

    def value(self, codes: Tensor) -> Tensor:
        """What a reader makes of whole numbers (rows, columns)."""
        return (codes * self.decode()).half().float()

    def zeroed_unless(self, real: Tensor) -> GroupScale:
        """The same if `real`, else the scale of a group of zeros."""
        return GroupScale(self.codes * real, self.maximum * real)

    def grid(self, bits: int) -> Grid:
        """The numbers that rows of this width may be."""
        half = torch.full((), float(1 << (bits - 1)), device=self.codes.device)
        return Grid(self.decode(), -half, half - 1)


@dataclass(frozen=True)
class ScaleSearch:
    """Looks for the scales of a group, and keeps them; `fine` as in `choose`."""

    bits: int
    steps: int

    def __call__(self, w: Tensor, importance: Tensor, codes: Tensor, maximum: Tensor) -> Grid:
        """The grid of these rows."""
        found = search_scales(w, self.bits, importance, self.steps)
        codes.copy_(found.codes)
        maximum.copy_(found.maximum)
        return found.grid(self.bits)


@dataclass(frozen=True)
class MultiWidthSearch:
    """Looks for the scales of several widths, each for its share of the columns; keeps nothing."""

    widths: tuple[int, ...]
    steps: int

    def __call__(self, w: Tensor, importance: Tensor) -> Grid:
        """The grid of these rows."""
        parts = w.chunk(len(self.widths), 1)
        pairs = zip(parts, self.widths, strict=True)
        grids = [search_scales(part, bits, importance, self.steps).grid(bits) for part, bits in pairs]
        columns = parts[0].shape[1]
        return Grid(*(torch.cat([x.expand(columns) for x in each]) for each in zip(*grids, strict=True)))


def search_scales(w: Tensor, bits: int, importance: Tensor, steps: int) -> GroupScale:
    """The scales that round `w` (rows, columns) best, each row's squared error weighted by its importance.

    Each column's best factor is searched first in `fine` steps, then the maximum under which the grid comes
    closest to all of them.
    """
    base = w.abs().amax(0) / ((2**bits - 1) / 2)
    tried = base * _linspace(1.1, MIN_SCALE_RATIO.get(bits, 0.75), steps, w)
    wish = tried.gather(0, _rounding_errors(w, tried, bits, importance).argmin(0, keepdim=True))[0]
    maxima = (wish.max() * _linspace(1.08, 0.7, max(4, steps // 2), w)[:, 0]).clamp(max=FP16_MAX).half()
    low, high = _bracket(wish, maxima)
    below, above = (
        _rounding_errors(w, Exl2Scales(x, maxima).expand().float(), bits, importance) for x in (low, high)
    )
    total = torch.minimum(below, above).sum(1).masked_fill(_underflows(maxima), torch.inf)
    at = total.argmin().view(1)
    found = GroupScale(_select(torch.where(above < below, high, low), at), _select(maxima, at))
    return found.zeroed_unless(torch.isfinite(_select(total, at)))


def refit_scales(now: GroupScale, target: Tensor, curvature: Tensor) -> GroupScale:
    """The grid nearest to what each column wishes, squared and weighted by its care; or the same as now."""

    def cost(scale: Tensor) -> Tensor:
        return curvature * (scale - target).square()

    least = cost(now.decode()).sum() * (1 - 1e-6)
    maxima = (now.maximum.float() * _maximum_ratios(target.device)).clamp(max=FP16_MAX).half()
    low, high = _bracket(target.clamp(min=0), maxima)
    below, above = (cost(Exl2Scales(x, maxima).expand().float()) for x in (low, high))
    total = torch.minimum(below, above).sum(1).masked_fill(_underflows(maxima), torch.inf)
    at = total.argmin().view(1)
    better = _select(total, at) < least
    codes = _select(torch.where(above < below, high, low), at)
    return GroupScale(
        torch.where(better, codes, now.codes), torch.where(better, _select(maxima, at), now.maximum)
    )


@cache
def _maximum_ratios(device: torch.device) -> Tensor:
    """Made once: bringing it to a device waits for that."""
    return torch.tensor(MAXIMUM_RATIOS, device=device)


def _rounding_errors(w: Tensor, scales: Tensor, bits: int, importance: Tensor) -> Tensor:
    """(scales, columns) the weighted squared error of rounding rows at each of these scales."""
    half = 1 << (bits - 1)
    found = torch.empty_like(scales)
    step = max(1, (GPU_CHUNK if w.is_cuda else CPU_CHUNK) // w.numel())
    for a in range(0, len(scales), step):
        scale = scales[a : a + step, None]
        inverse = scale.clamp(min=TINY).reciprocal_()  # where there is no scale, any code means 0
        error = (w * inverse).round_().clamp_(-half, half - 1).mul_(scale).sub_(w)
        torch.matmul(importance, error.square_(), out=found[a : a + step])
    return found


def _linspace(first: float, last: float, count: int, like: Tensor) -> Tensor:
    return torch.linspace(first, last, count, device=like.device)[:, None]


def _bracket(wish: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """(maxima, columns) the codes of the two grid points around each column's wish."""
    lower = ((wish / maxima.float()[:, None]).sqrt() * MAX_SCALE).floor().clamp(1, MAX_SCALE)
    upper = (lower + 1).clamp(max=MAX_SCALE)
    return (lower - 1).to(torch.uint8), (upper - 1).to(torch.uint8)


def _underflows(maxima: Tensor) -> Tensor:
    """Those whose grid float16 cannot hold."""
    return (maxima.float() / 256).half() == 0


def _select(of: Tensor, at: Tensor) -> Tensor:
    """An entry, without waiting for the device to say which."""
    return of.index_select(0, at)[0]
