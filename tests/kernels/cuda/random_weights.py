"""Packed weights of every kind the formats know, filled with chance."""

from __future__ import annotations

import torch

from exlm.formats.packed import PackedWeight, PlainScales, Segment, pack

KINDS: dict[str, tuple[list[tuple[int, list[int]]], int, bool, bool]] = {
    "4 bits": ([(4, [128] * 4)], 64, False, False),
    "all widths, odd columns": (
        [(8, [32] * 3), (6, [32] * 2), (5, [32] * 3), (4, [64] * 3), (3, [128, 96]), (2, [128] * 2)],
        201,
        False,
        False,
    ),
    "short last group": ([(4, [128] * 3 + [32])], 40, False, False),
    "zero points": ([(4, [128] * 5)], 96, True, False),
    "zero points of 3 and 8 bits": ([(8, [64] * 2), (3, [64] * 4)], 17, True, False),
    "minimums": ([(5, [32] * 8)], 48, False, True),
    "groups of 16": ([(6, [16] * 16)], 33, False, False),
    "minimums of 2 bits": ([(2, [16] * 16)], 80, False, True),
    "4 bits in small groups": ([(4, [32] * 16)], 72, False, False),
    "6 and 4 bits": ([(6, [32] * 4), (4, [128] * 3)], 56, False, False),
    "one width in two places": ([(4, [32] * 4), (6, [32] * 4), (4, [32] * 3)], 32, False, False),
}
"""Segments (bits, groups), outputs, whether zero points differ, whether there are minimums."""


def segment(bits: int, sizes: list[int], outputs: int, zeros: bool, minima: bool) -> Segment:
    """Random codes."""
    codes = pack(torch.randint(0, 1 << bits, (sum(sizes), outputs)), bits)
    scales = PlainScales((torch.rand(len(sizes), outputs) * 0.01).half())
    floor = PlainScales((torch.rand(len(sizes), outputs) * 0.1).half()) if minima else None
    zero: int | torch.Tensor = 0 if minima else 1 << (bits - 1)
    if zeros:
        zero = torch.randint(0, 1 << bits, (len(sizes), outputs), dtype=torch.uint8)
    return Segment(bits, tuple(sizes), codes, scales, zero, floor)


def weight(kind: str, *, order: bool = True, bias: bool = False, seed: int = 0) -> PackedWeight:
    """A random matrix of a kind; all of as many inputs have them in the same order."""
    torch.manual_seed(sum(map(ord, kind)) + seed)
    parts, outputs, zeros, minima = KINDS[kind]
    segments = tuple(segment(bits, sizes, outputs, zeros, minima) for bits, sizes in parts)
    return matrix(segments, outputs, order, bias, kind)


def matrix(
    segments: tuple[Segment, ...], outputs: int, order: bool = True, bias: bool = False, name: str = "w"
) -> PackedWeight:
    """Segments as a matrix."""
    inputs = sum(one.in_features for one in segments)
    places = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)).int()
    added = torch.randn(outputs).half() if bias else None
    return PackedWeight(name, inputs, outputs, segments, torch.float16, places if order else None, added)
