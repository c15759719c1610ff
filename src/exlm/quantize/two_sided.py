"""Rounding that knows both sides of a matrix: how its inputs vary, and how much its outputs matter together.

With the covariance H of the inputs and G of the loss's gradient at the outputs, the harm of an error E is
tr(G Eᵀ H E). Feeding errors back along rows and columns alike is GPTQ for the Kronecker product of the two. A
number depends only on those above and to the left of it, so whole diagonals of tiles, and within them
diagonals of numbers, are rounded at once. Scales are given and stay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda_graphs import GRAPHS

TILE = 32


class OutputFactors(NamedTuple):
    """The output side of one matrix: the order its columns are rounded in, and how they matter together."""

    perm: Tensor  # (columns,)
    inv_chol: Tensor  # V with Vᵀ V = G⁻¹, in that order
    hessian: Tensor  # G, in the order of the columns


def gptq_two_sided(w: Tensor, scale: Tensor, half: Tensor, upper: Tensor, outputs: OutputFactors) -> Tensor:
    """Whole numbers (inputs, columns) for `w`, whose errors are fed back on both sides.

    `scale` has the factor of every number, `half` the half range of every row; `upper` is U with Uᵀ U = H⁻¹.
    The inputs must be a multiple of TILE.
    """
    w, scale, across = w[:, outputs.perm], scale[:, outputs.perm], outputs.inv_chol
    columns = w.shape[1]
    if padding := -columns % TILE:
        w, scale = F.pad(w, (0, padding)), F.pad(scale, (0, padding), value=1.0)
        across = F.pad(across, (0, padding, 0, padding))
        across.diagonal()[columns:] = 1
    down, right = w.shape[0] // TILE, w.shape[1] // TILE
    wave = _Wavefront(w, scale, half, upper, across)
    for step in range(down + right - 1):
        wave.round_diagonal(step, max(0, step - right + 1), min(down, step + 1))
    return wave.codes.transpose(1, 2).reshape(w.shape)[:, outputs.perm.argsort()]


class _Wavefront:
    """What has been rounded so far, and the errors that were made, cut so that tiles can be picked.

    What is not done yet has errors of zero: sums over everything are sums over what is done.
    """

    def __init__(self, w: Tensor, scale: Tensor, half: Tensor, upper: Tensor, across: Tensor) -> None:
        down, right = w.shape[0] // TILE, w.shape[1] // TILE
        self.w, self.scale = (x.view(down, TILE, right, TILE).transpose(1, 2) for x in (w, scale))
        self.half = half.view(down, TILE)
        self.upper = upper.T.contiguous().view(down, TILE, -1)
        self.across = across.view(-1, right, TILE).transpose(0, 1).contiguous()
        self.u, self.v = _diagonal_tiles(upper), _diagonal_tiles(across)
        self.codes = torch.empty_like(self.w, memory_format=torch.contiguous_format)
        self.errors = w.new_zeros(right, len(w), TILE)  # divided by both pivots
        self.carried = w.new_zeros(down, TILE, w.shape[1])  # Uᵀ errors

    def round_diagonal(self, step: int, first: int, end: int) -> None:
        """The tiles of one diagonal, in the rows `first` to `end`: none depends on another."""
        i = torch.arange(first, end, device=self.w.device)
        j = step - i
        rows, columns = end * TILE, (step - first + 1) * TILE  # what lies behind is not done
        u, v = self.u[i], self.v[j]
        above = torch.bmm(self.upper[first:end, :, :rows], self.errors[j, :rows])
        left = torch.bmm(self.carried[first:end, :, :columns], self.across[j, :columns])
        now = self.w[i, j] - torch.bmm(above, v) - left
        codes, errors = torch.empty_like(now), torch.empty_like(now)
        GRAPHS.run(_round_tiles, (now, self.scale[i, j], self.half[i], u, v), (codes, errors))
        self.codes[i, j] = codes
        self.errors.view(len(self.v), -1, TILE, TILE)[j, i] = errors
        self.carried.view(len(self.u), TILE, -1, TILE)[i, :, j] = above.baddbmm_(u.transpose(1, 2), errors)


def _diagonal_tiles(square: Tensor) -> Tensor:
    """(tiles, TILE, TILE) those on the diagonal."""
    count = len(square) // TILE
    return square.view(count, TILE, count, TILE).diagonal(0, 0, 2).permute(2, 0, 1).contiguous()


def _round_tiles(
    now: Tensor, scale: Tensor, half: Tensor, u: Tensor, v: Tensor, codes: Tensor, errors: Tensor
) -> None:
    """Tiles side by side, given all errors above and to the left of them.

    They are turned left to right, so that the numbers that are rounded together lie on a true diagonal and
    are seen without being copied.
    """
    now, scale, v = now.flip(2), scale.flip(2), v.flip(1, 2)
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    steep = 1 / (u.diagonal(dim1=1, dim2=2)[:, :, None] * v.diagonal(dim1=1, dim2=2)[:, None, :])
    low, high = -half, half - 1
    turned, made = torch.empty_like(codes), torch.empty_like(errors)
    values = torch.empty_like(codes[:, 0], dtype=torch.float16)
    for step in range(2 * TILE - 1):
        shift = TILE - 1 - step
        x, q, e, s, r, p = (t.diagonal(shift, 1, 2) for t in (now, turned, made, scale, inverse, steep))
        i = slice(max(0, -shift), TILE - max(0, shift))
        n = slice(max(0, shift), TILE - max(0, -shift))
        value = values[:, : x.shape[1]]
        torch.mul(x, r, out=q).round_().clamp_(low[:, i], high[:, i])
        torch.mul(q, s, out=value)
        torch.sub(x, value, out=e).mul_(p)
        now.baddbmm_(u[:, i].transpose(1, 2) * e[:, None], v[:, n], alpha=-1)
    codes.copy_(turned.flip(2))
    errors.copy_(made.flip(2))
