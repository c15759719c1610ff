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
from .recipe import Group
from .rounding import Factors, Grid, Step, descend, feed_back
from .scaling import GroupScale, Search, SideBySide, move
from .settle import settle
from .tape import TAPE
from .wave import Outputs, round_both


@dataclass(frozen=True)
class Effort:
    """How hard the solver tries."""

    damping: float = 0.01  # of the mean of H's diagonal, added to it
    ridge: float = 0.05  # the same for the gradients of the outputs
    sweeps: int = 2  # of descent behind GPTQ; 0: GPTQ alone
    fine: int = 24  # steps of the search for a column's scale


@dataclass
class Solution:
    """A matrix on the grid, rows in stored order."""

    groups: Sequence[Group]
    order: Tensor
    codes: Tensor  # (inputs, columns) float32: whole numbers around zero
    scales: Exl2Scales  # of all groups

    @property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [group.rows for group in self.groups]

    @cached_property
    def halves(self) -> Tensor:
        """(groups,) float32: half the range of each group's codes."""
        return torch.tensor([float(1 << (group.bits - 1)) for group in self.groups]).to(self.codes.device)

    @cached_property
    def group_of(self) -> Tensor:
        """(inputs,) the group of every row."""
        sizes = torch.tensor(self.sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.codes.device)

    def grids(self) -> list[Grid]:
        """What each group may hold."""
        return list(map(Grid, self.factors(), -self.halves, self.halves - 1))

    def factors(self) -> Tensor:
        """(groups, columns) float32: the scales as a reader decodes them."""
        return self.scales.expand().float()

    def spread(self) -> Tensor:
        """(inputs, columns) float32: the scale of every number."""
        return self.factors()[self.group_of]

    def values(self) -> Tensor:
        """(inputs, columns) float32 in stored order, with every rounding a reader makes."""
        return (self.codes * self.spread()).half().float()

    def dequantize(self) -> Tensor:
        """(inputs, columns) float32 in the order of the inputs."""
        out = torch.empty_like(self.codes)
        out[self.order] = self.values()
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
        order = self.order.to(torch.int32)
        return PackedWeight("exl2", inputs, columns, tuple(segments), torch.float16, order, bias)


def quick(w: Tensor, f: Factors, groups: Sequence[Group], fine: int) -> Solution:
    """GPTQ alone."""
    codes = torch.empty(len(groups), w.shape[1], dtype=torch.uint8, device=w.device)
    scales = Exl2Scales(codes, torch.empty(len(groups), dtype=torch.float16, device=w.device))
    places = zip(groups, *scales.tensors, strict=True)
    steps = [Step(group.rows, Search(group.bits, fine), tuple(kept)) for group, *kept in places]
    return Solution(groups, f.order, feed_back(w, f, steps).codes, scales)


def losses(w: Tensor, f: Factors, size: int, widths: Sequence[int], fine: int) -> tuple[Tensor, ...]:
    """For each width, what each number adds to the loss if all rows have it, in groups of `size`.

    All are rounded side by side, as columns of one matrix.
    """
    choose = SideBySide(tuple(widths), fine)
    steps = [Step(min(size, len(w) - a), choose) for a in range(0, len(w), size)]
    return feed_back(w.repeat(1, len(widths)), f, steps).losses.chunk(len(widths), 1)


def solve(
    w: Tensor, f: Factors, groups: Sequence[Group], effort: Effort, outputs: Outputs | None = None
) -> Solution:
    """The best codes and scales for `w` (inputs, columns); `outputs` where their gradients are known."""
    solution = quick(w, f, groups, effort.fine)
    target = w[f.order]
    gradient = f.hessian @ (target - solution.values())
    for left in reversed(range(effort.sweeps)):
        moved = _fit_scales(solution, f.hessian, gradient)
        if outputs is not None and not (moved and left):
            break  # codes will be chosen anew: only the scales count
        descend(solution.codes, gradient, f.hessian, solution.sizes, solution.grids())
    if outputs is not None:
        half, scale = solution.halves[solution.group_of], solution.spread()
        codes = round_both(target, scale, half, f.upper, outputs)
        solution.codes = settle(codes, target, scale, half, f.hessian, outputs.gradients)
    return solution


def loss(w: Tensor, f: Factors, solution: Solution) -> Tensor:
    """(columns,) the damped squared error of each output, averaged over the calibration."""
    error = w[f.order] - solution.values()
    return (error * (f.hessian @ error)).sum(0)


def _fit_scales(s: Solution, h: Tensor, gradient: Tensor) -> bool:
    """Move each group's scales to the grid points best for the codes as they are; True if any moved."""
    a, before = 0, s.factors()
    for group, *scale in zip(s.groups, *s.scales.tensors, strict=True):
        b = a + group.rows
        change = torch.empty_like(s.codes[a:b])
        block = (s.codes[a:b], h[a:b, a:b], gradient[a:b])
        TAPE.play(_fit_group, (*block, *scale), (*scale, change))
        gradient.addmm_(h[:, a:b], change, alpha=-1)
        a = b
    return not torch.equal(before, s.factors())


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
    wish = now.decoded() + torch.where(curve > 0, slope / curve, torch.zeros_like(curve))
    found = move(now, wish, curve)
    torch.sub(found.value(codes), now.value(codes), out=change)
    new_factors.copy_(found.codes)
    new_maximum.copy_(found.maximum)
