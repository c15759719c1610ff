"""Codes one step up or down where that helps both sides of a matrix: what rounding in one go has left.

The harm of an error E is tr(G Eᵀ H E), as in `wave`. Row after row, in every run of columns the one code
moves that gains most; what it changes is at once seen by all others. Scales stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda_graphs import GRAPHS

COLUMNS_PER_MOVE = 64
"""Columns of which at most one moves at a time, at first: more would make good for the same error twice."""

BLOCK_ROWS = 32
"""Rows whose moves are carried to the others together."""

MAX_SWEEPS = 8
"""At most: more gain less and less, and a large matrix takes a second for each."""

MIN_GAIN = 5e-4
"""A sweep that takes off less than this share of the harm is the last."""


def descend_two_sided(
    codes: Tensor, w: Tensor, scale: Tensor, half: Tensor, hessian: Tensor, gradients: Tensor
) -> Tensor:
    """Better codes (inputs, columns) for `w`, or the same; inputs are a multiple of ROWS.

    `scale` has the factor of every number, `half` the half range of every row. A sweep in which codes that
    moved together did harm is taken back, and half as many move from then on.
    """
    best, run, pull = codes, COLUMNS_PER_MOVE, _gradient(codes, w, scale, hessian, gradients)
    least = _loss(codes, w, scale, pull)
    for _ in range(MAX_SWEEPS):
        now = _sweep(best, pull, scale, half, hessian, gradients, run)
        after = _gradient(now, w, scale, hessian, gradients)
        found = _loss(now, w, scale, after)
        if bool(found < least):
            gained, best, pull, least = least - found, now, after, found
            if bool(gained < MIN_GAIN * found):
                break
        elif run >= w.shape[1]:
            break
        else:
            run *= 2
    return best


def _sweep(
    codes: Tensor, pull: Tensor, scale: Tensor, half: Tensor, hessian: Tensor, g: Tensor, run: int
) -> Tensor:
    """New codes, every row looked at once."""
    columns, padding = codes.shape[1], -codes.shape[1] % run
    g = F.pad(g, (0, padding, 0, padding))
    now, pull, scale = (F.pad(x, (0, padding)) if padding else x.clone() for x in (codes, pull, scale))
    for a in range(0, len(now), BLOCK_ROWS):
        rows = slice(a, a + BLOCK_ROWS)
        block = (pull[rows], hessian[rows, rows], g, scale[rows], half[rows], now[rows].clone())
        moved = torch.empty_like(now[rows])
        GRAPHS.run(_DescendBlock(run), block, (now[rows], moved))
        pull.addmm_(hessian[:, rows], moved, alpha=-1)
    return now[:, :columns].contiguous()


def _gradient(codes: Tensor, w: Tensor, scale: Tensor, hessian: Tensor, g: Tensor) -> Tensor:
    """H E G: which way, and how much, each number would like to move."""
    return hessian @ (w - (codes * scale).half().float()) @ g


def _loss(codes: Tensor, w: Tensor, scale: Tensor, pull: Tensor) -> Tensor:
    return ((w - (codes * scale).half().float()) * pull).sum()


@dataclass(frozen=True)
class _DescendBlock:
    """The rows of one block, and by how much their values change, times G; a row is seen as its runs."""

    run: int

    def __call__(
        self,
        pull: Tensor,
        h: Tensor,
        g: Tensor,
        scale: Tensor,
        half: Tensor,
        before: Tensor,
        codes: Tensor,
        moved: Tensor,
    ) -> None:
        shape, runs = (len(h), -1, self.run), torch.arange(len(g) // self.run, device=g.device)
        pull, targets = pull.clone(), g.view(-1, self.run, len(g))
        cost = h.diagonal()[:, None] * g.diagonal() * scale * scale / 2
        codes.copy_(before)
        down, up = (-half)[:, None] - codes, (half - 1)[:, None] - codes  # as far as each may go
        rows = zip(*(x.view(shape) for x in (pull, codes, scale, cost, down, up)), h, moved, strict=True)
        for i, (to, code, size, price, low, high, beside, change) in enumerate(rows, 1):
            step = to.sign().clamp_(low, high)
            best, at = (to * step).mul_(size).sub_(price).max(1, keepdim=True)
            made = step.gather(1, at) * (best > 0)
            code.scatter_add_(1, at, made)
            torch.mv(targets[runs, at[:, 0]].T, (made * size.gather(1, at))[:, 0], out=change)
            pull[i:].addr_(beside[i:], change, alpha=-1)
