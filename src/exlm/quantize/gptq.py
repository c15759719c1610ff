"""GPTQ for one matrix: rows are rounded one after the other, each error fed back to the rows still to come.

W is (inputs, columns), x W the product. With the Hessian H = mean of x xᵀ of the inputs, the loss of rounded
weights Ŵ is tr((Ŵ - W)ᵀ H (Ŵ - W)); all columns share H. A row i that was rounded leaves the error
e = (w_i - ŵ_i) / U_ii, with U the upper Cholesky factor of the damped H⁻¹ (Uᵀ U = H⁻¹); the loss grows by e²,
and subtracting U_ij e from every later row j is the best answer to it. (LDLQ of QuIP# is the same feedback,
written with the LDL decomposition of H.)

This is the algorithm, for any format: a `GroupStep` says how the grid of a group of rows is chosen. The
formats EXL2 and GPTQ are in `matrix_solver`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .cuda_graphs import GRAPHS

DAMPING_ATTEMPTS = 12


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


# -- the algorithm ---------------------------------------------------------------------------------


ChooseGrid = Callable[..., Grid]
"""(rows so far, importance of each row, *outputs) → their grid; writes its parameters to the outputs.

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
