"""Codes one step up or down where that helps both sides of a matrix: what rounding in one go has left.

The harm of an error E is tr(G Eᵀ H E), as in `wave`. Row after row, in every run of columns the one code
moves that gains most; what it changes is at once seen by all others. Scales stay.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .tape import TAPE

RUN = 64
"""Columns of which at most one moves at a time: more, and they would make good for the same error twice."""

ROWS = 32
"""Rows whose moves are carried to the others together."""

SWEEPS = 2


def settle(
    codes: Tensor, w: Tensor, scale: Tensor, half: Tensor, hessian: Tensor, gradients: Tensor
) -> Tensor:
    """Better codes (inputs, columns) for `w`, or the same; inputs are a multiple of ROWS.

    `scale` has the factor of every number, `half` the half range of every row.
    """
    g, begun = gradients, codes
    if padding := -w.shape[1] % RUN:
        g = F.pad(gradients, (0, padding, 0, padding))
        begun, w, scale = (F.pad(x, (0, padding)) for x in (codes, w, scale))
    now, pull = begun.clone(), _pull(begun, w, scale, hessian, g)
    least = _harm(begun, w, scale, pull)
    for _ in range(SWEEPS):
        for a in range(0, len(w), ROWS):
            rows = slice(a, a + ROWS)
            block = (pull[rows], hessian[rows, rows], g, scale[rows], half[rows], now[rows].clone())
            moved = torch.empty_like(w[rows])
            TAPE.play(_settle_rows, block, (now[rows], moved))
            pull.addmm_(hessian[:, rows], moved, alpha=-1)
    found = _harm(now, w, scale, _pull(now, w, scale, hessian, g))
    return torch.where(found < least, now, begun)[:, : codes.shape[1]]


def _pull(codes: Tensor, w: Tensor, scale: Tensor, hessian: Tensor, g: Tensor) -> Tensor:
    """H E G: which way, and how much, each number would like to move."""
    return hessian @ (w - (codes * scale).half().float()) @ g


def _harm(codes: Tensor, w: Tensor, scale: Tensor, pull: Tensor) -> Tensor:
    return ((w - (codes * scale).half().float()) * pull).sum()


def _settle_rows(
    pull: Tensor,
    h: Tensor,
    g: Tensor,
    scale: Tensor,
    half: Tensor,
    before: Tensor,
    codes: Tensor,
    moved: Tensor,
) -> None:
    """The rows of one block, and by how much their values change, times G; a row is seen as its runs."""
    shape = (len(h), -1, RUN)
    pull, targets, runs = pull.clone(), g.view(-1, RUN, len(g)), torch.arange(len(g) // RUN, device=g.device)
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
