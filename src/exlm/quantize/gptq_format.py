"""One matrix onto GPTQ's grid: 4 bits, a scale and a zero point for each group and column, act-order.

Shares the feedback with EXL2; only the grids differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import PackedWeight, PlainScales, Segment
from ..formats.bits import pack
from .gptq import Grid, GroupStep, HessianFactors, descend_one_sided, gptq

BITS = 4
MAX_CODE = (1 << BITS) - 1
RANGE_STEPS = 32


def solve_gptq(
    w: Tensor, f: HessianFactors, group: int, sweeps: int, bias: Tensor | None = None
) -> tuple[Tensor, PackedWeight]:
    """(inputs, columns) as a reader decodes it in the order of the inputs, and the stored form."""
    inputs, columns = w.shape
    sizes = [min(group, inputs - a) for a in range(0, inputs, group)]
    table = w.new_empty(len(sizes), len(Grid._fields), columns)
    grids = [Grid(*kept) for kept in table]
    steps = [
        GroupStep(rows, search_affine_grid, tuple(grid)) for rows, grid in zip(sizes, grids, strict=True)
    ]
    codes = gptq(w, f, steps).codes
    if sweeps:
        spread = torch.cat(
            [grid.value(c) for grid, c in zip(grids, codes.split_with_sizes(sizes), strict=True)]
        )
        gradient = f.hessian @ (w[f.perm] - spread)
        for _ in range(sweeps):
            descend_one_sided(codes, gradient, f.hessian, sizes, grids)
    scale, low, _ = table.unbind(1)
    zeros = (-low).to(torch.uint8)
    above = zeros.repeat_interleave(torch.tensor(sizes, device=w.device), 0)
    scales = PlainScales(scale.half())
    stored = pack(codes.to(torch.int16) + above, BITS)
    segment = Segment(BITS, tuple(sizes), stored, scales, zeros)
    order = f.perm.to(torch.int32)
    weight = PackedWeight("gptq", inputs, columns, (segment,), torch.float16, order, bias)
    return weight.dequantize().float(), weight


def search_affine_grid(w: Tensor, importance: Tensor, *kept: Tensor) -> Grid:
    """The scale and zero point of each column that round its rows best, searched from the full range inwards.

    Zero points run from 1 to 15: the older layout stores them less one.
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
    for place, tensor in zip(kept, found, strict=True):
        place.copy_(tensor)
    return found
