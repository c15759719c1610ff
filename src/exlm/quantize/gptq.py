"""Rounding a matrix row after row onto grids it is told, each error made good by the rows still to come.

This is GPTQ for any format: a grid says which whole numbers a group may hold and what each column multiplies
them with. Choosing grids is the format's business.
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
    """What the numbers of one group may be: whole numbers from low to high, times the column's scale."""

    scale: Tensor  # (columns,) float32, as a reader decodes it
    low: Tensor  # (columns,) or ()
    high: Tensor

    def inverse(self) -> Tensor:
        """What numbers are multiplied with to be rounded; 0 where there is no scale."""
        return torch.where(self.scale > 0, 1 / self.scale, torch.zeros_like(self.scale))

    def nearest(self, w: Tensor) -> Tensor:
        """The whole numbers that come closest to `w`; 0 where there is no scale."""
        return (w * self.inverse()).round_().clamp_(self.low, self.high)

    def value(self, codes: Tensor) -> Tensor:
        """What a reader makes of them: products rounded to float16."""
        return (codes * self.scale).half().float()


ChooseGrid = Callable[..., Grid]
"""(rows as they are now, how much each matters, *kept) → their grid; fills what is to be kept of it.

It is recorded, as a part of a `tape.Work`: equal ones do the same, and none waits for the device.
"""


class GroupStep(NamedTuple):
    """One group to be rounded."""

    rows: int
    choose: ChooseGrid
    outputs: tuple[Tensor, ...] = ()


class HessianFactors(NamedTuple):
    """The input side of one matrix: the order its rows are stored in, and the covariance of its inputs."""

    perm: Tensor  # (inputs,) stored row → input
    hessian: Tensor  # mean of x xᵀ, damped, in stored order
    inv_chol: Tensor  # U with Uᵀ U = H⁻¹


class GptqResult(NamedTuple):
    """Rows in stored order on their grids."""

    codes: Tensor  # (inputs, columns) float32, whole numbers
    losses: Tensor  # (inputs, columns) what each number adds to the loss


def factorize(w: Tensor, hessian: Tensor, damping: float, where: str = "") -> HessianFactors:
    """Order the rows of `w` (inputs, columns) by how much they move the answer, and take H apart.

    `InputError` if H holds NaN or infinity; where it is not positive definite it is damped more.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise InputError(
            f"{where}: its inputs overflow on the calibration text. Leave out the text that makes the model "
            "diverge, or check the source model: its own answers would not be numbers either."
        )
    if not bool(torch.isfinite(w).all()):
        raise InputError(f"{where}: the source matrix holds NaN or infinity. Download the model again.")
    order = (hessian.diagonal() * w.square().mean(1)).argsort(descending=True, stable=True)
    h, step = hessian[order][:, order], max(damping * float(hessian.diagonal().mean()), 1e-8)
    for _ in range(DAMPING_ATTEMPTS):
        h = h + step * torch.eye(len(h), device=h.device, dtype=h.dtype)
        upper = inverse_cholesky(h)
        if upper is not None:
            return HessianFactors(order, h, upper)
        step *= 2
    raise InputError(f"{where}: its inputs have no usable covariance. Calibrate with more or other text.")


def add_damping(hessian: Tensor, damping: float) -> Tensor:
    """With a share of its diagonal's mean added to that."""
    step = max(damping * float(hessian.diagonal().mean()), 1e-8)
    return hessian + step * torch.eye(len(hessian), device=hessian.device, dtype=hessian.dtype)


def inverse_cholesky(h: Tensor) -> Tensor | None:
    """U with Uᵀ U = H⁻¹, or None if H is not safely positive definite."""
    lower, failed = torch.linalg.cholesky_ex(h)
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return upper if not int(failed) and bool(torch.isfinite(upper).all()) else None


def gptq(w: Tensor, f: HessianFactors, steps: Sequence[GroupStep]) -> GptqResult:
    """Round `w` (inputs, columns, in the order of the inputs) group by group."""
    w = w[f.perm]
    codes, errors = torch.empty_like(w), torch.empty_like(w)
    steep = f.inv_chol.diagonal().reciprocal()
    a = 0
    for rows, choose, kept in steps:
        b = a + rows
        block = (w[a:b], f.inv_chol[a:b, a:b], steep[a:b])
        GRAPHS.run(_GptqGroup(choose), block, (codes[a:b], errors[a:b], *kept))
        w[b:].addmm_(f.inv_chol[a:b, b:].T, errors[a:b], alpha=-1)
        a = b
    return GptqResult(codes, errors.square_())


@dataclass(frozen=True)
class _GptqGroup:
    """The rows of one group; few calls, because each costs more than its work."""

    choose: ChooseGrid

    def __call__(
        self, w: Tensor, upper: Tensor, steep: Tensor, codes: Tensor, errors: Tensor, *kept: Tensor
    ) -> None:
        importance = steep.square()
        grid = self.choose(w, importance / importance.mean(), *kept)
        scale, inverse = grid.scale, grid.inverse()
        value = torch.empty_like(w[0], dtype=torch.float16)
        rows = zip(w, codes, errors, steep, upper, strict=True)
        for i, (now, code, error, slope, behind) in enumerate(rows, 1):
            torch.mul(now, inverse, out=code).round_().clamp_(grid.low, grid.high)
            torch.mul(code, scale, out=value)
            torch.sub(now, value, out=error).mul_(slope)
            w[i:].addr_(behind[i:], error, alpha=-1)


def descend_one_sided(
    codes: Tensor, gradient: Tensor, h: Tensor, sizes: Sequence[int], grids: Sequence[Grid]
) -> None:
    """Give each code in turn the value that is best for all others as they are; changes both tensors.

    `gradient` is H times what the rounding leaves of the target, and is kept so.
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
    old: Tensor,
    gradient: Tensor,
    h: Tensor,
    scale: Tensor,
    low: Tensor,
    high: Tensor,
    codes: Tensor,
    change: Tensor,
) -> None:
    """The rows of one group, and by how much their values change; new codes may take the place of `old`."""
    grid, gradient = Grid(scale, low, high), gradient.clone()
    values, inverse = grid.value(old), grid.inverse()
    value = torch.empty_like(scale, dtype=torch.float16)
    rows = zip(codes, values, gradient, change, h.diagonal().reciprocal(), h, strict=True)
    for i, (code, before, slope, moved, flat, beside) in enumerate(rows, 1):
        torch.addcmul(before, slope, flat, out=code).mul_(inverse).round_().clamp_(low, high)
        torch.mul(code, scale, out=value)
        torch.sub(value, before, out=moved)
        gradient[i:].addr_(beside[i:], moved, alpha=-1)
