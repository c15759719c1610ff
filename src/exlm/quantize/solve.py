"""One matrix onto EXL2's grid so that the model's answers change least.

GPTQ with searched scales comes first, then descent on scales and codes, then, where the gradients of the
outputs are known, a second rounding that heeds them. Which recipe is used is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import PackedWeight, Segment, Squared
from ..formats.bits import pack
from . import scaling
from .recipe import Group
from .rounding import Factors, Grid, descend, feed_back
from .scaling import GroupScale
from .settle import settle
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
    scales: list[GroupScale]

    @property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [group.rows for group in self.groups]

    def grids(self) -> list[Grid]:
        """What each group may hold."""
        return [scale.grid(group.bits) for scale, group in zip(self.scales, self.groups, strict=True)]

    def factors(self) -> Tensor:
        """(groups, columns) float32: the scales as a reader decodes them."""
        return torch.stack([scale.decoded() for scale in self.scales])

    def spread(self) -> Tensor:
        """(inputs, columns) float32: the scale of every number."""
        sizes = torch.tensor(self.sizes, device=self.codes.device)
        return self.factors().repeat_interleave(sizes, 0)

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
            scales = self.scales[first : first + len(sizes)]
            table = Squared(torch.stack([s.codes for s in scales]), torch.stack([s.maximum for s in scales]))
            segments.append(Segment(bits, sizes, pack(codes, bits), table, 1 << (bits - 1)))
            row, first = row + sum(sizes), first + len(sizes)
        inputs, columns = self.codes.shape
        order = self.order.to(torch.int32)
        return PackedWeight("exl2", inputs, columns, tuple(segments), torch.float16, order, bias)


def quick(w: Tensor, f: Factors, groups: Sequence[Group], fine: int) -> Solution:
    """GPTQ alone."""
    scales: list[GroupScale] = []

    def choose(number: int, rows: Tensor, importance: Tensor) -> Grid:
        bits = groups[number].bits
        scales.append(scaling.choose(rows, bits, importance, fine))
        return scales[-1].grid(bits)

    rounded = feed_back(w, f, [group.rows for group in groups], choose)
    return Solution(groups, f.order, rounded.codes, scales)


def losses(w: Tensor, f: Factors, size: int, widths: Sequence[int], fine: int) -> tuple[Tensor, ...]:
    """For each width, what each number adds to the loss if all rows have it, in groups of `size`.

    All are rounded side by side, as columns of one matrix.
    """

    def choose(_: int, rows: Tensor, importance: Tensor) -> Grid:
        parts = zip(rows.chunk(len(widths), 1), widths, strict=True)
        grids = [scaling.choose(part, bits, importance, fine).grid(bits) for part, bits in parts]
        return Grid(*(torch.cat([x.expand(w.shape[1]) for x in each]) for each in zip(*grids, strict=True)))

    sizes = [min(size, len(w) - a) for a in range(0, len(w), size)]
    return feed_back(w.repeat(1, len(widths)), f, sizes, choose).losses.chunk(len(widths), 1)


def solve(
    w: Tensor, f: Factors, groups: Sequence[Group], effort: Effort, outputs: Outputs | None = None
) -> Solution:
    """The best codes and scales for `w` (inputs, columns); `outputs` where their gradients are known."""
    solution = quick(w, f, groups, effort.fine)
    target = w[f.order]
    gradient = f.hessian @ (target - solution.values())
    for _ in range(effort.sweeps):
        moved = _fit_scales(solution, f.hessian, gradient)
        if outputs is not None and not moved:
            break  # codes will be chosen anew: only the scales count
        descend(solution.codes, gradient, f.hessian, solution.sizes, solution.grids())
    if outputs is not None:
        halves = torch.tensor([float(1 << (g.bits - 1)) for g in groups], device=w.device)
        half = halves.repeat_interleave(torch.tensor(solution.sizes, device=w.device))
        scale = solution.spread()
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
    for number, group in enumerate(s.groups):
        b = a + group.rows
        codes, scale = s.codes[a:b], s.scales[number]
        curve = (codes * (h[a:b, a:b] @ codes)).sum(0)
        slope = (codes * gradient[a:b]).sum(0)
        wish = scale.decoded() + torch.where(curve > 0, slope / curve, torch.zeros_like(curve))
        s.scales[number] = found = scaling.move(scale, wish, curve)
        change = found.grid(group.bits).value(codes) - scale.grid(group.bits).value(codes)
        gradient.addmm_(h[:, a:b], change, alpha=-1)
        a = b
    return not torch.equal(before, s.factors())
