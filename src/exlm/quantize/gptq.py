"""GPTQ for one matrix, with error feedback along its inputs, or along its inputs and its outputs.

One-sided: rows are rounded one after the other, each error fed back to the rows still to come.

W is (inputs, columns), x W the product. With the Hessian H = mean of x xᵀ of the inputs, the loss of rounded
weights Ŵ is tr((Ŵ - W)ᵀ H (Ŵ - W)); all columns share H. A row i that was rounded leaves the error
e = (w_i - ŵ_i) / U_ii, with U the upper Cholesky factor of the damped H⁻¹ (Uᵀ U = H⁻¹); the loss grows by e²,
and subtracting U_ij e from every later row j is the best answer to it. (LDLQ of QuIP# is the same feedback,
written with the LDL decomposition of H.)

Two-sided: with the Hessian H of the inputs and the Hessian G of the loss at the outputs (mean of g gᵀ, g its
gradient there), rounding errors E = W - Ŵ cost tr(G Eᵀ H E): the Hessian of the weights is the Kronecker
product H ⊗ G. GPTQ for it needs only the two Cholesky factors Uᵀ U = H⁻¹ and Vᵀ V = G⁻¹: weight (i, n) leaves
the error e = (w_in - ŵ_in) / (U_ii V_nn), and U_ij V_nm e is subtracted from every weight (j, m) below and to
the right. A weight depends on those above and to the left of it alone, so this runs as a wavefront: the tiles
of one anti-diagonal side by side, and inside them the weights of one anti-diagonal. Scales do not change.

These are the algorithms, for any format: a `GroupStep` says how the grid of a group of rows is chosen. The
formats EXL2 and GPTQ are in `matrix_solver`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from .cuda_graphs import GRAPHS

DAMPING_ATTEMPTS = 12
TILE = 32


class Grid(NamedTuple):
    """The values a group's weights may have: integers from low to high, times the column's scale."""

    scale: Tensor  # (columns,) float32, as a reader decodes it
    low: Tensor  # (columns,) or ()
    high: Tensor

    def inverse(self) -> Tensor:
        """1 / scale; 0 where the scale is 0."""
        return torch.where(self.scale > 0, 1 / self.scale, torch.zeros_like(self.scale))

    def nearest(self, w: Tensor) -> Tensor:
        """The codes nearest to `w`; 0 where the scale is 0."""
        return (w * self.inverse()).round_().clamp_(self.low, self.high)

    def value(self, codes: Tensor) -> Tensor:
        """What a reader decodes: the products rounded to float16."""
        return (codes * self.scale).half().float()


# -- factorising the Hessian -----------------------------------------------------------------------


class HessianFactors(NamedTuple):
    """The input side of one matrix."""

    perm: Tensor  # (inputs,) stored row → input: act-order
    hessian: Tensor  # (inputs, inputs) H, damped, rows and columns in stored order
    inv_chol: Tensor  # U, upper, with Uᵀ U = H⁻¹


def factorize(w: Tensor, hessian: Tensor, damping: float, where: str = "") -> HessianFactors:
    """Sort the rows of `w` (inputs, columns) by H_ii · mean(w_i²), damp H and factorise its inverse.

    `damping` times the mean of H's diagonal is added to the diagonal, more of it until H is positive
    definite. `InputError`, which names `where`, if H or `w` holds NaN or infinity.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise InputError(
            f"{where}: its inputs overflow on the calibration text. Leave out the text that makes the model "
            "diverge, or check the source model: its own outputs would not be numbers either."
        )
    if not bool(torch.isfinite(w).all()):
        raise InputError(f"{where}: the source matrix holds NaN or infinity. Download the model again.")
    perm = (hessian.diagonal() * w.square().mean(1)).argsort(descending=True, stable=True)
    h, step = hessian[perm][:, perm], max(damping * float(hessian.diagonal().mean()), 1e-8)
    for _ in range(DAMPING_ATTEMPTS):
        h = h + step * torch.eye(len(h), device=h.device, dtype=h.dtype)
        inv_chol = inverse_cholesky(h)
        if inv_chol is not None:
            return HessianFactors(perm, h, inv_chol)
        step *= 2
    raise InputError(f"{where}: the covariance of its inputs is singular. Calibrate with more or other text.")


def add_damping(hessian: Tensor, damping: float) -> Tensor:
    """H + damping · mean(diag H) · I."""
    step = max(damping * float(hessian.diagonal().mean()), 1e-8)
    return hessian + step * torch.eye(len(hessian), device=hessian.device, dtype=hessian.dtype)


def inverse_cholesky(h: Tensor) -> Tensor | None:
    """U, upper, with Uᵀ U = H⁻¹; None if H is not safely positive definite."""
    lower, failed = torch.linalg.cholesky_ex(h)
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return upper if not int(failed) and bool(torch.isfinite(upper).all()) else None


# -- one-sided -------------------------------------------------------------------------------------


ChooseGrid = Callable[..., Grid]
"""(rows with the errors fed back so far, their importance, *outputs) → their grid, whose parameters go to the outputs.

Runs inside a CUDA graph (`cuda_graphs.GraphFunction`): equal ones do the same, and none waits for the device.
"""


class GroupStep(NamedTuple):
    """One group of rows to round."""

    rows: int
    choose: ChooseGrid
    outputs: tuple[Tensor, ...] = ()  # where `choose` writes what is stored of the grid


class GptqResult(NamedTuple):
    """Rounded rows in stored order."""

    codes: Tensor  # (inputs, columns) float32, integers
    losses: Tensor  # (inputs, columns) what each weight's rounding adds to the loss


def gptq(w: Tensor, f: HessianFactors, steps: Sequence[GroupStep]) -> GptqResult:
    """Round `w` (inputs, columns, in the order of the inputs) group by group."""
    w = w[f.perm]
    codes, errors = torch.empty_like(w), torch.empty_like(w)
    inv_diag = f.inv_chol.diagonal().reciprocal()
    a = 0
    for rows, choose, outputs in steps:
        b = a + rows
        block = (w[a:b], f.inv_chol[a:b, a:b], inv_diag[a:b])
        GRAPHS.run(_GptqGroup(choose), block, (codes[a:b], errors[a:b], *outputs))
        w[b:].addmm_(f.inv_chol[a:b, b:].T, errors[a:b], alpha=-1)  # feedback to all later groups
        a = b
    return GptqResult(codes, errors.square_())


@dataclass(frozen=True)
class _GptqGroup:
    """The rows of one group, one after the other; few calls, because launches cost more than their work."""

    choose: ChooseGrid

    def __call__(
        self, w: Tensor, inv_chol: Tensor, inv_diag: Tensor, codes: Tensor, errors: Tensor, *outputs: Tensor
    ) -> None:
        importance = inv_diag.square()
        grid = self.choose(w, importance / importance.mean(), *outputs)
        scale, inverse = grid.scale, grid.inverse()
        value = torch.empty_like(w[0], dtype=torch.float16)
        rows = zip(w, codes, errors, inv_diag, inv_chol, strict=True)
        for i, (now, code, error, inv_u, u_row) in enumerate(rows, 1):
            torch.mul(now, inverse, out=code).round_().clamp_(grid.low, grid.high)
            torch.mul(code, scale, out=value)
            torch.sub(now, value, out=error).mul_(inv_u)
            w[i:].addr_(u_row[i:], error, alpha=-1)


# -- two-sided -------------------------------------------------------------------------------------


class OutputFactors(NamedTuple):
    """The output side of one matrix."""

    perm: Tensor  # (columns,) the order in which columns are rounded
    inv_chol: Tensor  # V, upper, with Vᵀ V = G⁻¹, in that order
    hessian: Tensor  # (columns, columns) G, in the order of the columns


def gptq_two_sided(w: Tensor, scale: Tensor, half_range: Tensor, in_chol: Tensor, outputs: OutputFactors) -> Tensor:
    """Codes (inputs, columns) of `w`, its errors fed back on both sides.

    `scale` (inputs, columns) is every weight's scale; row i's codes lie in [-half_range_i, half_range_i - 1]; `in_chol`
    is U with Uᵀ U = H⁻¹. The inputs must be a multiple of TILE.
    """
    w, scale, out_chol = w[:, outputs.perm], scale[:, outputs.perm], outputs.inv_chol
    columns = w.shape[1]
    if padding := -columns % TILE:
        w, scale = F.pad(w, (0, padding)), F.pad(scale, (0, padding), value=1.0)
        out_chol = F.pad(out_chol, (0, padding, 0, padding))
        out_chol.diagonal()[columns:] = 1
    down, right = w.shape[0] // TILE, w.shape[1] // TILE
    wavefront = _Wavefront(w, scale, half_range, in_chol, out_chol)
    for step in range(down + right - 1):
        wavefront.round_diagonal(step, max(0, step - right + 1), min(down, step + 1))
    return wavefront.codes.transpose(1, 2).reshape(w.shape)[:, outputs.perm.argsort()]


class _Wavefront:
    """The codes and errors so far, in tiles (down, right, TILE, TILE).

    Errors of weights that are not rounded yet are zero: sums over all weights are sums over rounded ones.
    """

    def __init__(self, w: Tensor, scale: Tensor, half_range: Tensor, in_chol: Tensor, out_chol: Tensor) -> None:
        down, right = w.shape[0] // TILE, w.shape[1] // TILE
        self.w, self.scale = (x.view(down, TILE, right, TILE).transpose(1, 2) for x in (w, scale))
        self.half_range = half_range.view(down, TILE)
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
        GRAPHS.run(_round_tiles, (now, self.scale[i, j], self.half_range[i], u, v), (codes, errors))
        self.codes[i, j] = codes
        self.errors.view(len(self.v), -1, TILE, TILE)[j, i] = errors
        self.in_feedback.view(len(self.u), TILE, -1, TILE)[i, :, j] = above.baddbmm_(u.transpose(1, 2), errors)


def _diagonal_tiles(square: Tensor) -> Tensor:
    """(tiles, TILE, TILE) the tiles on the diagonal."""
    count = len(square) // TILE
    return square.view(count, TILE, count, TILE).diagonal(0, 0, 2).permute(2, 0, 1).contiguous()


def _round_tiles(
    now: Tensor, scale: Tensor, half_range: Tensor, u: Tensor, v: Tensor, codes: Tensor, errors: Tensor
) -> None:
    """Round tiles side by side; the feedback of all earlier tiles is in `now` already.

    Flipped left to right, the anti-diagonals of a tile are its diagonals, which torch can view without a
    copy.
    """
    now, scale, v = now.flip(2), scale.flip(2), v.flip(1, 2)
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    inv_diag = 1 / (u.diagonal(dim1=1, dim2=2)[:, :, None] * v.diagonal(dim1=1, dim2=2)[:, None, :])
    low, high = -half_range, half_range - 1
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
