"""The scales of one group of rows on EXL2's own grid: squared 4-bit codes under one float16 maximum.

Every number here is what a reader will decode, roundings included; how the rows are then rounded is the
business of `rounding`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.scales import Squared
from .rounding import Grid

WIDEST = 16  # the largest factor of the grid, before it is squared
LARGEST = 65504.0
TINY = 1e-30
LOWEST = {2: 0.35, 3: 0.45, 4: 0.6}
"""How far below the largest number a scale is looked for, by width; 0.75 for the others."""

NEAR = (1.0, 0.94, 0.97, 0.985, 0.995, 1.005, 1.015, 1.03, 1.06)
"""Maxima that are tried around the present one."""


class GroupScale(NamedTuple):
    """Codes of each column (0 to 15) and the group's maximum."""

    codes: Tensor  # (columns,) uint8
    maximum: Tensor  # () float16

    def decoded(self) -> Tensor:
        """(columns,) float32: the factors a reader gets."""
        return Squared(self.codes[None], self.maximum[None]).expand()[0].float()

    def grid(self, bits: int) -> Grid:
        """The numbers that rows of this width may be."""
        half = torch.tensor(float(1 << (bits - 1)), device=self.codes.device)
        return Grid(self.decoded(), -half, half - 1)


def choose(w: Tensor, bits: int, importance: Tensor, fine: int) -> GroupScale:
    """The scales that round `w` (rows, columns) best, each row's squared error weighted by its importance.

    Each column's best factor is searched first in `fine` steps, then the maximum under which the grid comes
    closest to all of them.
    """
    base = w.abs().amax(0) / ((2**bits - 1) / 2)
    best, wish = torch.full_like(base, torch.inf), base
    for p in torch.linspace(1.1, LOWEST.get(bits, 0.75), fine).tolist():
        error = _error(w, base * p, bits, importance)
        better = error < best
        best, wish = torch.where(better, error, best), torch.where(better, base * p, wish)
    found, least, top = _nothing(w), torch.inf, float(wish.max())
    for p in torch.linspace(1.08, 0.7, max(4, fine // 2)).tolist():
        maximum = torch.tensor(min(top * p, LARGEST), device=w.device).half()
        if not float(maximum) / 256:
            continue
        pair = _around(wish, maximum)
        errors = [_error(w, scale.decoded(), bits, importance) for scale in pair]
        scale, total = _better(pair, errors)
        if total < least:
            found, least = scale, total
    return found


def move(now: GroupScale, wish: Tensor, care: Tensor) -> GroupScale | None:
    """The grid nearest to what each column wishes, squared and weighted by its care; None to stay."""
    least = float((care * (now.decoded() - wish).square()).sum())
    found = None
    for p in NEAR:
        maximum = (now.maximum.float() * p).clamp(max=LARGEST).half()
        if not float(maximum) / 256:
            continue
        pair = _around(wish.clamp(min=0), maximum)
        scale, total = _better(pair, [care * (one.decoded() - wish).square() for one in pair])
        if total < least * (1 - 1e-6):
            found, least = scale, total
    return found


def _error(w: Tensor, scale: Tensor, bits: int, importance: Tensor) -> Tensor:
    """(columns,) the weighted squared error of rounding rows at this scale."""
    half = 1 << (bits - 1)
    inverse = scale.clamp(min=TINY).reciprocal_()  # where there is no scale, any code means 0
    error = (w * inverse).round_().clamp_(-half, half - 1).mul_(scale).sub_(w)
    return importance @ error.square_()


def _around(wish: Tensor, maximum: Tensor) -> tuple[GroupScale, GroupScale]:
    """The two grid points around each column's wish."""
    lower = ((wish / maximum.float()).sqrt() * WIDEST).floor().clamp(1, WIDEST)
    upper = (lower + 1).clamp(max=WIDEST)
    low, high = (GroupScale((point - 1).to(torch.uint8), maximum) for point in (lower, upper))
    return low, high


def _better(pair: tuple[GroupScale, GroupScale], errors: list[Tensor]) -> tuple[GroupScale, float]:
    """Column by column the better of two scales under one maximum, and the error of all."""
    up = errors[1] < errors[0]
    codes = torch.where(up, pair[1].codes, pair[0].codes)
    return GroupScale(codes, pair[0].maximum), float(torch.where(up, errors[1], errors[0]).sum())


def _nothing(w: Tensor) -> GroupScale:
    """The scale of a group of zeros."""
    codes = torch.zeros(w.shape[1], dtype=torch.uint8, device=w.device)
    return GroupScale(codes, torch.zeros((), dtype=torch.float16, device=w.device))
