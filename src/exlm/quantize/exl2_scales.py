"""EXL2's scales of one group of rows: a 4-bit code per column and one float16 maximum per group.

A column's scale is maximum · ((code + 1) / 16)². Everything here computes with the scales as a reader decodes
them, roundings included. `search_scales` finds scales for weights, `refit_scales` for codes that are fixed;
both are exhaustive over small sets of candidates, and never wait for the device (`cuda_graphs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.packed import Exl2Scales
from .gptq import Grid

SQRT_STEPS = 16  # values of (code + 1), which is squared
FP16_MAX = 65504.0
TINY = 1e-30
MIN_SCALE_RATIO = {2: 0.35, 3: 0.45, 4: 0.6}
"""Smallest scale tried, by width, relative to the one that covers the largest weight; else 0.75."""

GPU_CHUNK, CPU_CHUNK = 2**25, 2**18
"""Numbers rounded at once while scales are tried: what fills a GPU, and what fits a CPU's cache."""

MAXIMUM_RATIOS = (1.0, 0.94, 0.97, 0.985, 0.995, 1.005, 1.015, 1.03, 1.06)
"""Maxima that a refit tries, relative to the present one."""


class GroupScale(NamedTuple):
    """The scales of one group."""

    codes: Tensor  # (columns,) uint8, 0 to 15
    maximum: Tensor  # () float16

    def decode(self) -> Tensor:
        """(columns,) float32: the scales that a reader gets."""
        return Exl2Scales(self.codes[None], self.maximum[None]).expand()[0].float()

    def value(self, codes: Tensor) -> Tensor:
        """What a reader decodes from weight codes (rows, columns)."""
        return (codes * self.decode()).half().float()

    def zeroed_unless(self, valid: Tensor) -> GroupScale:
        """The same if `valid`, else the scale of a group of zeros."""
        return GroupScale(self.codes * valid, self.maximum * valid)

    def grid(self, bits: int) -> Grid:
        """The values that weights of this width may have."""
        half = torch.full((), float(1 << (bits - 1)), device=self.codes.device)
        return Grid(self.decode(), -half, half - 1)


@dataclass(frozen=True)
class ScaleSearch:
    """`gptq.ChooseGrid` for one width: searches a group's scales, and writes them to its outputs."""

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
    """`gptq.ChooseGrid` for several widths at once, each for an equal share of the columns."""

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
    """The scales with the least rounding error of `w` (rows, columns), rows weighted by `importance`.

    The best unconstrained scale of each column is searched in `steps` values first, then the maximum whose
    grid of scales comes closest to all of them.
    """
    base = w.abs().amax(0) / ((2**bits - 1) / 2)
    tried = base * _linspace(1.1, MIN_SCALE_RATIO.get(bits, 0.75), steps, w)
    best = tried.gather(0, _rounding_errors(w, tried, bits, importance).argmin(0, keepdim=True))[0]
    maxima = (best.max() * _linspace(1.08, 0.7, max(4, steps // 2), w)[:, 0]).clamp(max=FP16_MAX).half()
    low, high = _bracket(best, maxima)
    below, above = (
        _rounding_errors(w, Exl2Scales(x, maxima).expand().float(), bits, importance) for x in (low, high)
    )
    total = torch.minimum(below, above).sum(1).masked_fill(_underflows(maxima), torch.inf)
    at = total.argmin().view(1)
    found = GroupScale(_select(torch.where(above < below, high, low), at), _select(maxima, at))
    return found.zeroed_unless(torch.isfinite(_select(total, at)))


def refit_scales(now: GroupScale, target: Tensor, curvature: Tensor) -> GroupScale:
    """The scales with the least Σ curvature · (scale - target)² over columns; `now` if none is better."""

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
    """Made once per device: the copy waits for the device."""
    return torch.tensor(MAXIMUM_RATIOS, device=device)


def _rounding_errors(w: Tensor, scales: Tensor, bits: int, importance: Tensor) -> Tensor:
    """(scales, columns) the weighted squared errors of `w`, rounded with `scales` (scales, columns)."""
    half = 1 << (bits - 1)
    errors = torch.empty_like(scales)
    step = max(1, (GPU_CHUNK if w.is_cuda else CPU_CHUNK) // w.numel())
    for a in range(0, len(scales), step):
        scale = scales[a : a + step, None]
        inverse = scale.clamp(min=TINY).reciprocal_()  # where the scale is 0, every code decodes to 0
        error = (w * inverse).round_().clamp_(-half, half - 1).mul_(scale).sub_(w)
        torch.matmul(importance, error.square_(), out=errors[a : a + step])
    return errors


def _linspace(first: float, last: float, count: int, like: Tensor) -> Tensor:
    return torch.linspace(first, last, count, device=like.device)[:, None]


def _bracket(scale: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """(maxima, columns) codes of the two representable scales around each column's."""
    lower = ((scale / maxima.float()[:, None]).sqrt() * SQRT_STEPS).floor().clamp(1, SQRT_STEPS)
    upper = (lower + 1).clamp(max=SQRT_STEPS)
    return (lower - 1).to(torch.uint8), (upper - 1).to(torch.uint8)


def _underflows(maxima: Tensor) -> Tensor:
    """Whether a maximum's smallest scale is 0 in float16."""
    return (maxima.float() / 256).half() == 0


def _select(x: Tensor, at: Tensor) -> Tensor:
    """x[at], without a copy of the index to the host."""
    return x.index_select(0, at)[0]
