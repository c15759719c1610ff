"""Packed weights of every shape the form allows, filled with chance; how far off products may be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from exlm.formats.packed import Exl2Scales, KQuantScales, PackedWeight, PlainScales, Scales, Segment, pack

IQ4_CODEBOOK = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])


@dataclass(frozen=True)
class Recipe:
    """What a random weight is made of."""

    segments: tuple[tuple[int, tuple[int, ...]], ...]  # bits, sizes of groups
    columns: int
    scales: str = "half"
    zeros: bool = False
    minima: bool = False
    book: bool = False
    order: bool = False
    bias: bool = False


SIZES = st.one_of(
    st.lists(st.sampled_from([32, 64, 128]), min_size=1, max_size=4),
    st.lists(st.just(16), min_size=1, max_size=7),
    st.lists(st.integers(1, 70), min_size=1, max_size=4),
).map(tuple)

RECIPES = st.builds(
    Recipe,
    segments=st.lists(st.tuples(st.integers(2, 8), SIZES), min_size=1, max_size=3).map(tuple),
    columns=st.integers(1, 70) | st.integers(97, 160),  # narrow bands alone, and behind wide ones
    scales=st.sampled_from(["half", "float", "squared", "nested"]),
    zeros=st.booleans(),
    minima=st.booleans(),
    book=st.booleans(),
    order=st.booleans(),
    bias=st.booleans(),
)


def random_weight(recipe: Recipe, dtype: torch.dtype = torch.float32) -> PackedWeight:
    """A random weight."""
    segments = tuple(_segment(recipe, bits, sizes) for bits, sizes in recipe.segments)
    inputs = sum(segment.in_features for segment in segments)
    order = torch.randperm(inputs).int() if recipe.order else None
    bias = torch.randn(recipe.columns) if recipe.bias else None
    return PackedWeight("chance", inputs, recipe.columns, segments, dtype, order, bias)


def _segment(recipe: Recipe, bits: int, sizes: tuple[int, ...]) -> Segment:
    groups, columns, book = len(sizes), recipe.columns, recipe.book and bits == 4
    zero: int | Tensor = 1 << (bits - 1)
    if book:
        zero = 0
    elif recipe.zeros:
        zero = torch.randint(0, 1 << bits, (groups, columns), dtype=torch.uint8)
    return Segment(
        bits,
        sizes,
        pack(torch.randint(0, 1 << bits, (sum(sizes), columns)), bits),
        _scales(recipe.scales, groups, columns),
        zero,
        _scales("half", groups, columns) if recipe.minima else None,
        IQ4_CODEBOOK if book else None,
    )


def _scales(kind: str, groups: int, columns: int) -> Scales:
    codes = torch.randint(0, 16, (groups, columns), dtype=torch.uint8)
    match kind:
        case "squared":
            return Exl2Scales(codes, torch.rand(groups).half())
        case "nested":
            parents = torch.arange(groups, dtype=torch.int32) // 2
            return KQuantScales(codes, torch.rand(int(parents[-1]) + 1, columns).half(), parents)
    table = torch.rand(groups, columns) * 0.1
    return PlainScales(table.half() if kind == "half" else table)


def effective_weight(weight: PackedWeight) -> Tensor:
    """The float32 weights that products use: those before they are rounded to float16."""
    return replace(weight, dtype=torch.float32).dequantize()


def rounded_to_bytes(weight: PackedWeight, x: Tensor) -> Tensor:
    """The definition of activations of 8 bits: float64 numbers delta * q, with q = round(127 / largest * x).

    A delta, largest / 127, holds for up to 32 stored rows of a group, in the file's order.
    """
    order = torch.arange(weight.in_features) if weight.perm is None else weight.perm.long()
    out, first = torch.zeros_like(x, dtype=torch.float64), 0
    for size in (size for segment in weight.segments for size in segment.group_sizes):
        for inputs in order[first : first + size].split(32):
            largest = x[:, inputs].abs().amax(1, keepdim=True)
            inverse = torch.full_like(largest, 127) / largest  # 127 / largest would be 127 * (1 / largest)
            q = (x[:, inputs] * inverse).round()
            out[:, inputs] = torch.where(largest < 2.0**-100, 0.0, q.double() * (largest / 127).double())
        first += size
    return out


def tolerance(weight: PackedWeight, x: Tensor, absolute: float = 1e-7) -> Tensor:
    """How far a product may be off: float32 sums, and each x by half a step of its largest."""
    sizes = effective_weight(weight).double().abs()
    off = 1e-6 * (x.double().abs() @ sizes) + absolute
    return off + x.double().abs().amax(1, keepdim=True) * sizes.sum(0) / (2 * 16319)
