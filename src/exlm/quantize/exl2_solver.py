"""One matrix onto EXL2's grid so that the model's answers change least.

GPTQ with searched scales comes first, then descent on scales and codes, then, where the gradients of the
outputs are known, a second rounding that heeds them. Which recipe is used is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..formats import Exl2Scales, PackedWeight, Segment
from ..formats.bits import pack
from .coordinate_descent import descend_two_sided
from .cuda_graphs import GRAPHS
from .exl2_scales import GroupScale, MultiWidthSearch, ScaleSearch, refit_scales
from .gptq import Grid, GroupStep, HessianFactors, descend_one_sided, gptq
from .recipe import Group
from .two_sided import OutputFactors, gptq_two_sided


@dataclass(frozen=True)
class SolverConfig:
    """How hard the solver tries."""

    damping: float = 0.01  # of the mean of H's diagonal, added to it
    output_damping: float = 0.05  # the same for the gradients of the outputs
    sweeps: int = 2  # of descent behind GPTQ; 0: GPTQ alone
    scale_steps: int = 24  # steps of the search for a column's scale


@dataclass
class Exl2Solution:
    """A matrix on the grid, rows in stored order."""

    groups: Sequence[Group]
    perm: Tensor
    codes: Tensor  # (inputs, columns) float32: whole numbers around zero
    scales: Exl2Scales  # of all groups

    @property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [group.rows for group in self.groups]

    @cached_property
    def half_ranges(self) -> Tensor:
        """(groups,) float32: half the range of each group's codes."""
        return torch.tensor([float(1 << (group.bits - 1)) for group in self.groups]).to(self.codes.device)

    @cached_property
    def group_of(self) -> Tensor:
        """(inputs,) the group of every row."""
        sizes = torch.tensor(self.sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.codes.device)

    def grids(self) -> list[Grid]:
        """What each group may hold."""
        return list(map(Grid, self.group_scales(), -self.half_ranges, self.half_ranges - 1))

    def group_scales(self) -> Tensor:
        """(groups, columns) float32: the scales as a reader decodes them."""
        return self.scales.expand().float()

    def element_scales(self) -> Tensor:
        """(inputs, columns) float32: the scale of every number."""
        return self.group_scales()[self.group_of]

    def values(self) -> Tensor:
        """(inputs, columns) float32 in stored order, with every rounding a reader makes."""
        return (self.codes * self.element_scales()).half().float()

    def dequantize(self) -> Tensor:
        """(inputs, columns) float32 in the order of the inputs."""
        out = torch.empty_like(self.codes)
        out[self.perm] = self.values()
        return out

    def pack(self, bias: Tensor | None = None) -> PackedWeight:
        """As files have it."""
        segments, row, first = [], 0, 0
        for bits in dict.fromkeys(group.bits for group in self.groups):
            sizes = tuple(group.rows for group in self.groups if group.bits == bits)
            codes = self.codes[row : row + sum(sizes)].to(torch.int16) + (1 << (bits - 1))
            end = first + len(sizes)
            table = Exl2Scales(self.scales.codes[first:end], self.scales.group_max[first:end])
            segments.append(Segment(bits, sizes, pack(codes, bits), table, 1 << (bits - 1)))
            row, first = row + sum(sizes), end
        inputs, columns = self.codes.shape
        order = self.perm.to(torch.int32)
        return PackedWeight("exl2", inputs, columns, tuple(segments), torch.float16, order, bias)


def gptq_only(w: Tensor, f: HessianFactors, groups: Sequence[Group], fine: int) -> Exl2Solution:
    """GPTQ alone."""
    codes = torch.empty(len(groups), w.shape[1], dtype=torch.uint8, device=w.device)
    scales = Exl2Scales(codes, torch.empty(len(groups), dtype=torch.float16, device=w.device))
    places = zip(groups, *scales.tensors, strict=True)
    steps = [GroupStep(group.rows, ScaleSearch(group.bits, fine), tuple(kept)) for group, *kept in places]
    return Exl2Solution(groups, f.perm, gptq(w, f, steps).codes, scales)


def rounding_losses(
    w: Tensor, f: HessianFactors, size: int, widths: Sequence[int], fine: int
) -> tuple[Tensor, ...]:
    """For each width, what each number adds to the loss if all rows have it, in groups of `size`.

    All are rounded side by side, as columns of one matrix.
    """
    choose = MultiWidthSearch(tuple(widths), fine)
    steps = [GroupStep(min(size, len(w) - a), choose) for a in range(0, len(w), size)]
    return gptq(w.repeat(1, len(widths)), f, steps).losses.chunk(len(widths), 1)


def solve_exl2(
    w: Tensor,
    f: HessianFactors,
    groups: Sequence[Group],
    config: SolverConfig,
    outputs: OutputFactors | None = None,
) -> Exl2Solution:
    """The best codes and scales for `w` (inputs, columns); `outputs` where their gradients are known."""
    solution = gptq_only(w, f, groups, config.scale_steps)
    target = w[f.perm]
    gradient = f.hessian @ (target - solution.values())
    for left in reversed(range(config.sweeps)):
        moved = _fit_scales(solution, f.hessian, gradient)
        if outputs is not None and not (moved and left):
            break  # codes will be chosen anew: only the scales count
        descend_one_sided(solution.codes, gradient, f.hessian, solution.sizes, solution.grids())
    if outputs is not None:
        half, scale = solution.half_ranges[solution.group_of], solution.element_scales()
        codes = gptq_two_sided(target, scale, half, f.inv_chol, outputs)
        solution.codes = descend_two_sided(codes, target, scale, half, f.hessian, outputs.hessian)
    return solution


def output_losses(w: Tensor, f: HessianFactors, solution: Exl2Solution) -> Tensor:
    """(columns,) the damped squared error of each output, averaged over the calibration."""
    error = w[f.perm] - solution.values()
    return (error * (f.hessian @ error)).sum(0)


def _fit_scales(s: Exl2Solution, h: Tensor, gradient: Tensor) -> bool:
    """Move each group's scales to the grid points best for the codes as they are; True if any moved."""
    a, before = 0, s.group_scales()
    for group, *scale in zip(s.groups, *s.scales.tensors, strict=True):
        b = a + group.rows
        change = torch.empty_like(s.codes[a:b])
        block = (s.codes[a:b], h[a:b, a:b], gradient[a:b])
        GRAPHS.run(_fit_group, (*block, *scale), (*scale, change))
        gradient.addmm_(h[:, a:b], change, alpha=-1)
        a = b
    return not torch.equal(before, s.group_scales())


def _fit_group(
    codes: Tensor,
    h: Tensor,
    gradient: Tensor,
    factors: Tensor,
    maximum: Tensor,
    new_factors: Tensor,
    new_maximum: Tensor,
    change: Tensor,
) -> None:
    """The scales of one group, and by how much its values change; new ones may take the place of the old."""
    now = GroupScale(factors, maximum)
    curve = (codes * (h @ codes)).sum(0)
    slope = (codes * gradient).sum(0)
    wish = now.decode() + torch.where(curve > 0, slope / curve, torch.zeros_like(curve))
    found = refit_scales(now, wish, curve)
    torch.sub(found.value(codes), now.value(codes), out=change)
    new_factors.copy_(found.codes)
    new_maximum.copy_(found.maximum)
