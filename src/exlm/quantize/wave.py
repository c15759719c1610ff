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

TILE = 32


class Outputs(NamedTuple):
    """The output side of one matrix: the order its columns are rounded in, and how they matter together."""

    order: Tensor  # (columns,)
    upper: Tensor  # V with Vᵀ V = G⁻¹, in that order


def round_both(w: Tensor, scale: Tensor, half: Tensor, upper: Tensor, outputs: Outputs) -> Tensor:
    """Whole numbers (inputs, columns) for `w`, whose errors are fed back on both sides.

    `scale` has the factor of every number, `half` the half range of every row; `upper` is U with Uᵀ U = H⁻¹.
    The inputs must be a multiple of TILE.
    """
    w, scale, across = w[:, outputs.order], scale[:, outputs.order], outputs.upper
    columns = w.shape[1]
    if padding := -columns % TILE:
        w, scale = F.pad(w, (0, padding)), F.pad(scale, (0, padding), value=1.0)
        across = F.pad(across, (0, padding, 0, padding))
        across.diagonal()[columns:] = 1
    down, right = w.shape[0] // TILE, w.shape[1] // TILE
    wave = _Wave(w, scale, half, upper, across)
    for step in range(down + right - 1):
        rows = range(max(0, step - right + 1), min(down - 1, step) + 1)
        wave.round([(row, step - row) for row in rows])
    return wave.codes[:, outputs.order.argsort()]


class _Wave:
    """What has been rounded so far, and the errors that were made."""

    def __init__(self, w: Tensor, scale: Tensor, half: Tensor, upper: Tensor, across: Tensor) -> None:
        self.w, self.half, self.upper, self.across = w, half, upper, across
        self.scale = scale
        self.inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
        self.codes = torch.zeros_like(w)
        self.errors = torch.zeros_like(w)  # divided by both pivots
        self.carried = torch.zeros_like(w)  # Uᵀ errors, for the tiles that are done

    def round(self, tiles: list[tuple[int, int]]) -> None:
        """Tiles of one diagonal, side by side: none depends on another.

        They are turned left to right, so that the numbers that are rounded together lie on a true diagonal
        and are seen without being copied.
        """
        spans = [(slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE)) for i, j in tiles]
        now = torch.stack([self._arrived(rows, columns) for rows, columns in spans]).flip(2)
        scale, inverse = (torch.stack([x[at] for at in spans]).flip(2) for x in (self.scale, self.inverse))
        u = torch.stack([self.upper[rows, rows] for rows, _ in spans])
        v = torch.stack([self.across[columns, columns] for _, columns in spans]).flip(1, 2)
        steep = 1 / (u.diagonal(dim1=1, dim2=2)[:, :, None] * v.diagonal(dim1=1, dim2=2)[:, None, :])
        high = torch.stack([self.half[rows] for rows, _ in spans])
        low, high = -high, high - 1
        codes, errors = torch.empty_like(now), torch.empty_like(now)
        for step in range(2 * TILE - 1):
            shift = TILE - 1 - step
            x, q, e, s, r, p = (_diagonal(t, shift) for t in (now, codes, errors, scale, inverse, steep))
            i = slice(max(0, -shift), TILE - max(0, shift))
            n = slice(max(0, shift), TILE - max(0, -shift))
            q.copy_((x * r).round_().clamp_(low[:, i], high[:, i]))
            e.copy_((x - (q * s).half()).mul_(p))
            now.baddbmm_(u[:, i].transpose(1, 2) * e[:, None], v[:, n], alpha=-1)
        for at, tile, error in zip(spans, codes.flip(2), errors.flip(2), strict=True):
            self.codes[at], self.errors[at] = tile, error
            self.carried[at] += self.upper[at[0], at[0]].T @ error

    def _arrived(self, rows: slice, columns: slice) -> Tensor:
        """A tile with all errors above and to the left of it fed back."""
        above = self.upper[: rows.start, rows].T @ self.errors[: rows.start, columns]
        self.carried[rows, columns] = above
        left = self.carried[rows, : columns.start] @ self.across[: columns.start, columns]
        return self.w[rows, columns] - above @ self.across[columns, columns] - left


def _diagonal(tiles: Tensor, shift: int) -> Tensor:
    return tiles.diagonal(shift, 1, 2)
