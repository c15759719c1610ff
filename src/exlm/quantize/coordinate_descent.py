"""Coordinate descent on codes after GPTQ: single codes move while that lowers the loss; scales stay.

`descend_one_sided` lowers tr(Eᵀ H E), E = W - Ŵ, with the input Hessian H: row after row, every code gets the
value that is best for all other codes as they are. `descend_two_sided` lowers tr(G Eᵀ H E), with the output
Hessian G as well: codes move by ±1, and in every run of columns only the one move per row that gains most is
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda_graphs import GRAPHS
from .gptq import Grid

COLUMNS_PER_MOVE = 64
"""Columns of which at most one moves at a time, at first: more of them would correct the same error twice."""

BLOCK_ROWS = 32
"""Rows whose moves update the gradient of all other rows together."""

MAX_SWEEPS = 8
"""Later sweeps gain less and less, and each takes a second for a large matrix."""

MIN_GAIN = 5e-4
"""A sweep that lowers the loss by less than this share is the last."""


def descend_one_sided(codes: Tensor, gradient: Tensor, h: Tensor, sizes: Sequence[int], grids: Sequence[Grid]) -> None:
    """One sweep over all rows, in place.

    `gradient` (inputs, columns) is H (W - Ŵ), and is kept up to date; `sizes` and `grids` are the groups'.
    """
    a = 0
    for size, grid in zip(sizes, grids, strict=True):
        b = a + size
        change = torch.empty_like(codes[a:b])
        block = (codes[a:b], gradient[a:b], h[a:b, a:b], *grid)
        GRAPHS.run(_descend_group, block, (codes[a:b], change))
        gradient.addmm_(h[:, a:b], change, alpha=-1)
        a = b


def _descend_group(
    old: Tensor, gradient: Tensor, h: Tensor, scale: Tensor, low: Tensor, high: Tensor, codes: Tensor, change: Tensor
) -> None:
    """The rows of one group; writes the new codes (may be `old` itself) and the change of their values."""
    grid, gradient = Grid(scale, low, high), gradient.clone()
    values, inverse = grid.value(old), grid.inverse()
    value = torch.empty_like(scale, dtype=torch.float16)
    rows = zip(codes, values, gradient, change, h.diagonal().reciprocal(), h, strict=True)
    for i, (code, before, grad, delta, inv_h, h_row) in enumerate(rows, 1):
        torch.addcmul(before, grad, inv_h, out=code).mul_(inverse).round_().clamp_(low, high)
        torch.mul(code, scale, out=value)
        torch.sub(value, before, out=delta)
        gradient[i:].addr_(h_row[i:], delta, alpha=-1)


def descend_two_sided(
    codes: Tensor, w: Tensor, scale: Tensor, half_range: Tensor, hessian: Tensor, output_hessian: Tensor
) -> Tensor:
    """Codes (inputs, columns) for `w` with a lower tr(G Eᵀ H E), or the same codes.

    `scale` (inputs, columns) is every weight's scale; row i's codes lie in [-half_range_i, half_range_i - 1];
    inputs are a multiple of BLOCK_ROWS. Moves made at the same time may raise the loss together: such a sweep is
    undone, and from then on half as many codes move at a time.
    """
    best, run = codes, COLUMNS_PER_MOVE
    gradient = _gradient(codes, w, scale, hessian, output_hessian)
    least = _loss(codes, w, scale, gradient)
    for _ in range(MAX_SWEEPS):
        tried = _sweep(best, gradient, scale, half_range, hessian, output_hessian, run)
        tried_gradient = _gradient(tried, w, scale, hessian, output_hessian)
        loss = _loss(tried, w, scale, tried_gradient)
        if bool(loss < least):
            gained, best, gradient, least = least - loss, tried, tried_gradient, loss
            if bool(gained < MIN_GAIN * loss):
                break
        elif run >= w.shape[1]:
            break
        else:
            run *= 2
    return best


def _sweep(
    codes: Tensor, gradient: Tensor, scale: Tensor, half_range: Tensor, hessian: Tensor, g: Tensor, run: int
) -> Tensor:
    """New codes after every row was looked at once."""
    columns, padding = codes.shape[1], -codes.shape[1] % run
    g = F.pad(g, (0, padding, 0, padding))
    now, gradient, scale = (F.pad(x, (0, padding)) if padding else x.clone() for x in (codes, gradient, scale))
    for a in range(0, len(now), BLOCK_ROWS):
        rows = slice(a, a + BLOCK_ROWS)
        block = (gradient[rows], hessian[rows, rows], g, scale[rows], half_range[rows], now[rows].clone())
        change = torch.empty_like(now[rows])
        GRAPHS.run(_DescendBlock(run), block, (now[rows], change))
        gradient.addmm_(hessian[:, rows], change, alpha=-1)
    return now[:, :columns].contiguous()


def _gradient(codes: Tensor, w: Tensor, scale: Tensor, hessian: Tensor, g: Tensor) -> Tensor:
    """H E G, which is minus half the loss's gradient at Ŵ."""
    return hessian @ (w - (codes * scale).half().float()) @ g


def _loss(codes: Tensor, w: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    """tr(G Eᵀ H E) = Σ E · (H E G)."""
    return ((w - (codes * scale).half().float()) * gradient).sum()


@dataclass(frozen=True)
class _DescendBlock:
    """The rows of one block, each cut into runs of `run` columns.

    A step s (±1) of code (i, n) lowers the loss by 2 (s · scale · (H E G)_in - scale² · H_ii · G_nn / 2):
    `cost` is the second term. Writes the codes, and the change of their values times G.
    """

    run: int

    def __call__(
        self,
        gradient: Tensor,
        h: Tensor,
        g: Tensor,
        scale: Tensor,
        half_range: Tensor,
        before: Tensor,
        codes: Tensor,
        change: Tensor,
    ) -> None:
        shape, runs = (len(h), -1, self.run), torch.arange(len(g) // self.run, device=g.device)
        gradient, g_runs = gradient.clone(), g.view(-1, self.run, len(g))
        cost = h.diagonal()[:, None] * g.diagonal() * scale * scale / 2
        codes.copy_(before)
        down, up = (-half_range)[:, None] - codes, (half_range - 1)[:, None] - codes  # steps that stay in range
        rows = zip(*(x.view(shape) for x in (gradient, codes, scale, cost, down, up)), h, change, strict=True)
        for i, (grad, code, size, price, low, high, h_row, delta) in enumerate(rows, 1):
            step = grad.sign().clamp_(low, high)
            gain, at = (grad * step).mul_(size).sub_(price).max(1, keepdim=True)
            made = step.gather(1, at) * (gain > 0)
            code.scatter_add_(1, at, made)
            torch.mv(g_runs[runs, at[:, 0]].T, (made * size.gather(1, at))[:, 0], out=delta)
            gradient[i:].addr_(h_row[i:], delta, alpha=-1)
