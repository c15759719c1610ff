"""One matrix on the grid of EXL2 or of GPTQ, so that the model's output changes least.

EXL2: GPTQ with a scale search per group, then one-sided coordinate descent that alternates between scales and
codes. Where the output Hessian G is known, GPTQ is run again on both sides with these scales, and codes then
move by ±1 as long as that lowers tr(G Eᵀ H E). GPTQ: GPTQ with a search for scale and zero point, then
coordinate descent on the codes. Which recipe a matrix gets is decided in `allocation`.

EXL2's scales are a 4-bit code per column and one float16 maximum per group: a column's scale is maximum ·
((code + 1) / 16)². All computations use the scales as a reader decodes them, roundings included. What runs in
a CUDA graph never waits for the device (`cuda_graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import Exl2Scales, PackedWeight, PlainScales, Segment
from ..formats.packed import pack
from .allocation import QuantGroup
from .coordinate_descent import descend_one_sided, descend_two_sided
from .cuda_graphs import GRAPHS
from .gptq import Grid, GroupStep, HessianFactors, OutputFactors, gptq, gptq_two_sided
from .options import SolverOptions

GPTQ_BITS = 4
MAX_CODE = (1 << GPTQ_BITS) - 1
RANGE_STEPS = 32
"""Fractions of a column's full range that are tried as the range of its GPTQ grid."""

SQRT_STEPS = 16  # values of (code + 1), which is squared
FP16_MAX = 65504.0
TINY = 1e-30
MIN_SCALE_RATIO = {2: 0.35, 3: 0.45, 4: 0.6}
"""Smallest scale tried, by width, relative to the one that covers the largest weight; else 0.75."""

GPU_CHUNK, CPU_CHUNK = 2**25, 2**18
"""Numbers rounded at once while scales are tried: what fills a GPU, and what fits a CPU's cache."""

MAXIMUM_RATIOS = (1.0, 0.94, 0.97, 0.985, 0.995, 1.005, 1.015, 1.03, 1.06)
"""Maxima that a refit tries, relative to the present one."""


# -- EXL2's scales ---------------------------------------------------------------------------------


class GroupScale(NamedTuple):
    """The scales of one group."""

    codes: Tensor  # (columns,) uint8, 0 to 15
    maximum: Tensor  # () float16

    def decode(self) -> Tensor:
        """(columns,) float32: the scales that a reader gets."""
        return Exl2Scales(self.codes[None], self.maximum[None]).expand()[0].float()

    def value(self, codes: Tensor) -> Tensor:
        """What a reader decodes from weight codes (rows, columns)."""
        return (codes * self.decode()).half().float()

    def zeroed_unless(self, valid: Tensor) -> GroupScale:
        """The same if `valid`, else the scale of a group of zeros."""
        return GroupScale(self.codes * valid, self.maximum * valid)

    def grid(self, bits: int) -> Grid:
        """The values that weights of this width may have."""
        half_range = torch.full((), float(1 << (bits - 1)), device=self.codes.device)
        return Grid(self.decode(), -half_range, half_range - 1)


@dataclass(frozen=True)
class ScaleSearch:
    """`gptq.ChooseGrid` for one width: searches a group's scales, and writes them to its outputs."""

    bits: int
    steps: int

    def __call__(self, w: Tensor, importance: Tensor, codes: Tensor, maximum: Tensor) -> Grid:
        """The grid of these rows."""
        found = search_scales(w, self.bits, importance, self.steps)
        codes.copy_(found.codes)
        maximum.copy_(found.maximum)
        return found.grid(self.bits)


@dataclass(frozen=True)
class MultiWidthSearch:
    """`gptq.ChooseGrid` for several widths at once, each for an equal share of the columns."""

    widths: tuple[int, ...]
    steps: int

    def __call__(self, w: Tensor, importance: Tensor) -> Grid:
        """The grid of these rows."""
        parts = w.chunk(len(self.widths), 1)
        pairs = zip(parts, self.widths, strict=True)
        grids = [search_scales(part, bits, importance, self.steps).grid(bits) for part, bits in pairs]
        columns = parts[0].shape[1]
        return Grid(*(torch.cat([x.expand(columns) for x in each]) for each in zip(*grids, strict=True)))


def search_scales(w: Tensor, bits: int, importance: Tensor, steps: int) -> GroupScale:
    """The scales with the least rounding error of `w` (rows, columns), rows weighted by `importance`.

    The best unconstrained scale of each column is searched in `steps` values first, then the maximum whose
    grid of scales comes closest to all of them.
    """
    base = w.abs().amax(0) / ((2**bits - 1) / 2)
    tried = base * _linspace(1.1, MIN_SCALE_RATIO.get(bits, 0.75), steps, w)
    best = tried.gather(0, _rounding_errors(w, tried, bits, importance).argmin(0, keepdim=True))[0]
    maxima = (best.max() * _linspace(1.08, 0.7, max(4, steps // 2), w)[:, 0]).clamp(max=FP16_MAX).half()
    low, high = _bracket(best, maxima)
    below, above = (_rounding_errors(w, Exl2Scales(x, maxima).expand().float(), bits, importance) for x in (low, high))
    total = torch.minimum(below, above).sum(1).masked_fill(_underflows(maxima), torch.inf)
    at = total.argmin().view(1)
    found = GroupScale(_select(torch.where(above < below, high, low), at), _select(maxima, at))
    return found.zeroed_unless(torch.isfinite(_select(total, at)))


def refit_scales(now: GroupScale, target: Tensor, curvature: Tensor) -> GroupScale:
    """The scales with the least Σ curvature · (scale - target)² over columns; `now` if none is better."""

    def cost(scale: Tensor) -> Tensor:
        return curvature * (scale - target).square()

    least = cost(now.decode()).sum() * (1 - 1e-6)
    maxima = (now.maximum.float() * _maximum_ratios(target.device)).clamp(max=FP16_MAX).half()
    low, high = _bracket(target.clamp(min=0), maxima)
    below, above = (cost(Exl2Scales(x, maxima).expand().float()) for x in (low, high))
    total = torch.minimum(below, above).sum(1).masked_fill(_underflows(maxima), torch.inf)
    at = total.argmin().view(1)
    better = _select(total, at) < least
    codes = _select(torch.where(above < below, high, low), at)
    return GroupScale(torch.where(better, codes, now.codes), torch.where(better, _select(maxima, at), now.maximum))


@cache
def _maximum_ratios(device: torch.device) -> Tensor:
    """Made once per device: the copy waits for the device."""
    return torch.tensor(MAXIMUM_RATIOS, device=device)


def _rounding_errors(w: Tensor, scales: Tensor, bits: int, importance: Tensor) -> Tensor:
    """(scales, columns) the weighted squared errors of `w`, rounded with `scales` (scales, columns)."""
    half_range = 1 << (bits - 1)
    errors = torch.empty_like(scales)
    step = max(1, (GPU_CHUNK if w.is_cuda else CPU_CHUNK) // w.numel())
    for a in range(0, len(scales), step):
        scale = scales[a : a + step, None]
        inverse = scale.clamp(min=TINY).reciprocal_()  # where the scale is 0, every code decodes to 0
        error = (w * inverse).round_().clamp_(-half_range, half_range - 1).mul_(scale).sub_(w)
        torch.matmul(importance, error.square_(), out=errors[a : a + step])
    return errors


def _linspace(first: float, last: float, count: int, like: Tensor) -> Tensor:
    return torch.linspace(first, last, count, device=like.device)[:, None]


def _bracket(scale: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """(maxima, columns) codes of the two representable scales around each column's."""
    lower = ((scale / maxima.float()[:, None]).sqrt() * SQRT_STEPS).floor().clamp(1, SQRT_STEPS)
    upper = (lower + 1).clamp(max=SQRT_STEPS)
    return (lower - 1).to(torch.uint8), (upper - 1).to(torch.uint8)


def _underflows(maxima: Tensor) -> Tensor:
    """Whether a maximum's smallest scale is 0 in float16."""
    return (maxima.float() / 256).half() == 0


def _select(x: Tensor, at: Tensor) -> Tensor:
    """x[at], without a copy of the index to the host."""
    return x.index_select(0, at)[0]


# -- EXL2 ------------------------------------------------------------------------------------------


@dataclass
class Exl2Solution:
    """Codes and scales of a matrix, rows in stored order."""

    groups: Sequence[QuantGroup]
    perm: Tensor  # (inputs,) stored row → input
    codes: Tensor  # (inputs, columns) float32: integers around zero
    scales: Exl2Scales  # of all groups

    @property
    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [group.rows for group in self.groups]

    @cached_property
    def half_ranges(self) -> Tensor:
        """(groups,) float32: half the number of codes of each group, 2^(bits - 1)."""
        return torch.tensor([float(1 << (group.bits - 1)) for group in self.groups]).to(self.codes.device)

    @cached_property
    def group_of(self) -> Tensor:
        """(inputs,) the group of every row."""
        sizes = torch.tensor(self.sizes)
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.codes.device)

    def grids(self) -> list[Grid]:
        """Each group's grid."""
        return list(map(Grid, self.group_scales(), -self.half_ranges, self.half_ranges - 1))

    def group_scales(self) -> Tensor:
        """(groups, columns) float32: the scales as a reader decodes them."""
        return self.scales.expand().float()

    def element_scales(self) -> Tensor:
        """(inputs, columns) float32: the scale of every weight."""
        return self.group_scales()[self.group_of]

    def values(self) -> Tensor:
        """(inputs, columns) float32 in stored order, rounded as a reader rounds."""
        return (self.codes * self.element_scales()).half().float()

    def dequantize(self) -> Tensor:
        """(inputs, columns) float32 in the order of the inputs."""
        out = torch.empty_like(self.codes)
        out[self.perm] = self.values()
        return out

    def pack(self, bias: Tensor | None = None) -> PackedWeight:
        """The stored form."""
        segments, row, first = [], 0, 0
        for bits in dict.fromkeys(group.bits for group in self.groups):
            sizes = tuple(group.rows for group in self.groups if group.bits == bits)
            codes = self.codes[row : row + sum(sizes)].to(torch.int16) + (1 << (bits - 1))
            end = first + len(sizes)
            table = Exl2Scales(self.scales.codes[first:end], self.scales.group_max[first:end])
            segments.append(Segment(bits, sizes, pack(codes, bits), table, 1 << (bits - 1)))
            row, first = row + sum(sizes), end
        inputs, columns = self.codes.shape
        perm = self.perm.to(torch.int32)
        return PackedWeight("exl2", inputs, columns, tuple(segments), torch.float16, perm, bias)


def solve_exl2(
    w: Tensor,
    f: HessianFactors,
    groups: Sequence[QuantGroup],
    options: SolverOptions,
    outputs: OutputFactors | None = None,
) -> Exl2Solution:
    """The best codes and scales for `w` (inputs, columns); `outputs` where the output Hessian is known."""
    solution = gptq_exl2(w, f, groups, options.scale_steps)
    target = w[f.perm]
    gradient = f.hessian @ (target - solution.values())
    for left in reversed(range(options.sweeps)):
        moved = _fit_scales(solution, f.hessian, gradient)
        if outputs is not None and not (moved and left):
            break  # two-sided GPTQ will choose the codes again: only the scales matter
        descend_one_sided(solution.codes, gradient, f.hessian, solution.sizes, solution.grids())
    if outputs is not None:
        half_range, scale = solution.half_ranges[solution.group_of], solution.element_scales()
        codes = gptq_two_sided(target, scale, half_range, f.inv_chol, outputs)
        solution.codes = descend_two_sided(codes, target, scale, half_range, f.hessian, outputs.hessian)
    return solution


def gptq_exl2(w: Tensor, f: HessianFactors, groups: Sequence[QuantGroup], scale_steps: int) -> Exl2Solution:
    """GPTQ with a scale search per group, without descent."""
    codes = torch.empty(len(groups), w.shape[1], dtype=torch.uint8, device=w.device)
    scales = Exl2Scales(codes, torch.empty(len(groups), dtype=torch.float16, device=w.device))
    rows = zip(groups, *scales.tensors, strict=True)
    steps = [GroupStep(group.rows, ScaleSearch(group.bits, scale_steps), tuple(out)) for group, *out in rows]
    return Exl2Solution(groups, f.perm, gptq(w, f, steps).codes, scales)


def rounding_losses(
    w: Tensor, f: HessianFactors, group_size: int, widths: Sequence[int], scale_steps: int
) -> tuple[Tensor, ...]:
    """For each width, (inputs, columns) what each weight adds to GPTQ's loss if all rows have that width.

    All widths are rounded in one run, as columns of one matrix.
    """
    choose = MultiWidthSearch(tuple(widths), scale_steps)
    steps = [GroupStep(min(group_size, len(w) - a), choose) for a in range(0, len(w), group_size)]
    return gptq(w.repeat(1, len(widths)), f, steps).losses.chunk(len(widths), 1)


def _fit_scales(s: Exl2Solution, h: Tensor, gradient: Tensor) -> bool:
    """Refit each group's scales to its codes, in place; True if any changed.

    `gradient` is H (W - Ŵ), and is kept up to date.
    """
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
    scale_codes: Tensor,
    maximum: Tensor,
    new_scale_codes: Tensor,
    new_maximum: Tensor,
    change: Tensor,
) -> None:
    """The scales of one group, and the change of its values; the new scales may overwrite the old.

    In one column's scale s the loss is a parabola: curvature qᵀ H q, slope qᵀ H e at the present s.
    """
    now = GroupScale(scale_codes, maximum)
    curvature = (codes * (h @ codes)).sum(0)
    slope = (codes * gradient).sum(0)
    best = now.decode() + torch.where(curvature > 0, slope / curvature, torch.zeros_like(curvature))
    found = refit_scales(now, best, curvature)
    torch.sub(found.value(codes), now.value(codes), out=change)
    new_scale_codes.copy_(found.codes)
    new_maximum.copy_(found.maximum)


# -- GPTQ ------------------------------------------------------------------------------------------


def solve_gptq(
    w: Tensor, f: HessianFactors, group: int, sweeps: int, bias: Tensor | None = None
) -> tuple[Tensor, PackedWeight]:
    """Quantise `w` (inputs, columns) to 4 bits in groups of `group` rows; `sweeps` of descent follow.

    Returns the values as a reader decodes them, in the order of the inputs, and the stored form.
    """
    inputs, columns = w.shape
    sizes = [min(group, inputs - a) for a in range(0, inputs, group)]
    table = w.new_empty(len(sizes), len(Grid._fields), columns)
    grids = [Grid(*fields) for fields in table]
    steps = [GroupStep(rows, search_affine_grid, tuple(grid)) for rows, grid in zip(sizes, grids, strict=True)]
    codes = gptq(w, f, steps).codes
    if sweeps:
        values = torch.cat([grid.value(c) for grid, c in zip(grids, codes.split_with_sizes(sizes), strict=True)])
        gradient = f.hessian @ (w[f.perm] - values)
        for _ in range(sweeps):
            descend_one_sided(codes, gradient, f.hessian, sizes, grids)
    scale, low, _ = table.unbind(1)
    zeros = (-low).to(torch.uint8)
    row_zeros = zeros.repeat_interleave(torch.tensor(sizes, device=w.device), 0)
    stored = pack(codes.to(torch.int16) + row_zeros, GPTQ_BITS)
    segment = Segment(GPTQ_BITS, tuple(sizes), stored, PlainScales(scale.half()), zeros)
    perm = f.perm.to(torch.int32)
    weight = PackedWeight("gptq", inputs, columns, (segment,), torch.float16, perm, bias)
    return weight.dequantize().float(), weight


def search_affine_grid(w: Tensor, importance: Tensor, *outputs: Tensor) -> Grid:
    """The scale and zero point of each column with the least weighted error, from its full range inwards.

    Zero points run from 1 to 15: GPTQ's first layout stores them less one.
    """
    low, high = w.amin(0).clamp(max=0), w.amax(0).clamp(min=0)
    flat = high - low <= 0
    best = torch.full_like(low, torch.inf)
    found = Grid(torch.ones_like(low), -torch.full_like(low, 8.0), torch.full_like(low, 7.0))
    for p in torch.linspace(1.0, 0.5, RANGE_STEPS).tolist():
        scale = torch.where(flat, torch.ones_like(low), (high - low) * p / MAX_CODE).half().float()
        scale = scale.clamp(min=2.0**-24)
        zero = (-low * p / scale).round().clamp(1, MAX_CODE)
        grid = Grid(scale, -zero, MAX_CODE - zero)
        error = importance @ (grid.nearest(w) * scale - w).square()
        better = error < best
        best = torch.where(better, error, best)
        found = Grid(*(torch.where(better, new, old) for new, old in zip(grid, found, strict=True)))
    for output, field in zip(outputs, found, strict=True):
        output.copy_(field)
    return found
