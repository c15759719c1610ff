"""Two-sided GPTQ: errors are fed back along the inputs and along the outputs of a matrix.

With the Hessian H of the inputs and the Hessian G of the loss at the outputs (mean of g gᵀ, g its gradient
there), rounding errors E = W - Ŵ cost tr(G Eᵀ H E): the Hessian of the weights is the Kronecker product H ⊗
G. GPTQ for it needs only the two Cholesky factors Uᵀ U = H⁻¹ and Vᵀ V = G⁻¹: weight (i, n) leaves the error e
= (w_in - ŵ_in) / (U_ii V_nn), and U_ij V_nm e is subtracted from every weight (j, m) below and to the right.

A weight depends on those above and to the left of it alone, so this runs as a wavefront: the tiles of one
anti-diagonal side by side, and inside them the weights of one anti-diagonal. Scales are given and stay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda_graphs import GRAPHS

TILE = 32


class OutputFactors(NamedTuple):
    """The output side of one matrix."""

    perm: Tensor  # (columns,) the order in which columns are rounded
    inv_chol: Tensor  # V, upper, with Vᵀ V = G⁻¹, in that order
    hessian: Tensor  # (columns, columns) G, in the order of the columns


def gptq_two_sided(w: Tensor, scale: Tensor, half: Tensor, in_chol: Tensor, outputs: OutputFactors) -> Tensor:
    """Codes (inputs, columns) of `w`, its errors fed back on both sides.

    `scale` (inputs, columns) is every weight's scale; row i's codes lie in [-half_i, half_i - 1]; `in_chol`
    is U with Uᵀ U = H⁻¹. The inputs must be a multiple of TILE.
    """
    w, scale, out_chol = w[:, outputs.perm], scale[:, outputs.perm], outputs.inv_chol
    columns = w.shape[1]
    if padding := -columns % TILE:
        w, scale = F.pad(w, (0, padding)), F.pad(scale, (0, padding), value=1.0)
        out_chol = F.pad(out_chol, (0, padding, 0, padding))
        out_chol.diagonal()[columns:] = 1
    down, right = w.shape[0] // TILE, w.shape[1] // TILE
    wavefront = _Wavefront(w, scale, half, in_chol, out_chol)
    for step in range(down + right - 1):
        wavefront.round_diagonal(step, max(0, step - right + 1), min(down, step + 1))
    return wavefront.codes.transpose(1, 2).reshape(w.shape)[:, outputs.perm.argsort()]


class _Wavefront:
    """The codes and errors so far, in tiles (down, right, TILE, TILE).

    Errors of weights that are not rounded yet are zero: sums over all weights are sums over rounded ones.
    """

    def __init__(self, w: Tensor, scale: Tensor, half: Tensor, in_chol: Tensor, out_chol: Tensor) -> None:
        down, right = w.shape[0] // TILE, w.shape[1] // TILE
        self.w, self.scale = (x.view(down, TILE, right, TILE).transpose(1, 2) for x in (w, scale))
        self.half = half.view(down, TILE)
        self.in_chol = in_chol.T.contiguous().view(down, TILE, -1)  # rows of Uᵀ, by tile
        self.out_chol = out_chol.view(-1, right, TILE).transpose(0, 1).contiguous()  # columns of V, by tile
        self.u, self.v = _diagonal_tiles(in_chol), _diagonal_tiles(out_chol)
        self.codes = torch.empty_like(self.w, memory_format=torch.contiguous_format)
        self.errors = w.new_zeros(right, len(w), TILE)  # e, divided by both diagonals
        self.in_feedback = w.new_zeros(down, TILE, w.shape[1])  # Uᵀ e

    def round_diagonal(self, step: int, first: int, end: int) -> None:
        """The tiles (i, step - i), i from `first` to `end`: none depends on another."""
        i = torch.arange(first, end, device=self.w.device)
        j = step - i
        rows, columns = end * TILE, (step - first + 1) * TILE  # beyond these nothing is rounded yet
        u, v = self.u[i], self.v[j]
        above = torch.bmm(self.in_chol[first:end, :, :rows], self.errors[j, :rows])
        left = torch.bmm(self.in_feedback[first:end, :, :columns], self.out_chol[j, :columns])
        now = self.w[i, j] - torch.bmm(above, v) - left
        codes, errors = torch.empty_like(now), torch.empty_like(now)
        GRAPHS.run(_round_tiles, (now, self.scale[i, j], self.half[i], u, v), (codes, errors))
        self.codes[i, j] = codes
        self.errors.view(len(self.v), -1, TILE, TILE)[j, i] = errors
        self.in_feedback.view(len(self.u), TILE, -1, TILE)[i, :, j] = above.baddbmm_(
            u.transpose(1, 2), errors
        )


def _diagonal_tiles(square: Tensor) -> Tensor:
    """(tiles, TILE, TILE) the tiles on the diagonal."""
    count = len(square) // TILE
    return square.view(count, TILE, count, TILE).diagonal(0, 0, 2).permute(2, 0, 1).contiguous()


def _round_tiles(
    now: Tensor, scale: Tensor, half: Tensor, u: Tensor, v: Tensor, codes: Tensor, errors: Tensor
) -> None:
    """Round tiles side by side; the feedback of all earlier tiles is in `now` already.

    Flipped left to right, the anti-diagonals of a tile are its diagonals, which torch can view without a
    copy.
    """
    now, scale, v = now.flip(2), scale.flip(2), v.flip(1, 2)
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    inv_diag = 1 / (u.diagonal(dim1=1, dim2=2)[:, :, None] * v.diagonal(dim1=1, dim2=2)[:, None, :])
    low, high = -half, half - 1
    flipped_codes, flipped_errors = torch.empty_like(codes), torch.empty_like(errors)
    values = torch.empty_like(codes[:, 0], dtype=torch.float16)
    for step in range(2 * TILE - 1):
        shift = TILE - 1 - step
        x, q, e, s, r, p = (
            t.diagonal(shift, 1, 2) for t in (now, flipped_codes, flipped_errors, scale, inverse, inv_diag)
        )
        i = slice(max(0, -shift), TILE - max(0, shift))
        n = slice(max(0, shift), TILE - max(0, -shift))
        value = values[:, : x.shape[1]]
        torch.mul(x, r, out=q).round_().clamp_(low[:, i], high[:, i])
        torch.mul(q, s, out=value)
        torch.sub(x, value, out=e).mul_(p)
        now.baddbmm_(u[:, i].transpose(1, 2) * e[:, None], v[:, n], alpha=-1)
    codes.copy_(flipped_codes.flip(2))
    errors.copy_(flipped_errors.flip(2))
