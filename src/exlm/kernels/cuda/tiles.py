"""Packed weights rearranged for the tensor cores: every lane's codes side by side, all formats alike.

A brick is 128 stored inputs by a tile of 16 outputs: eight steps of a tensor core. Of step s, lane 4·g + q
keeps the inputs 16·s + 4·q to 16·s + 4·q + 3 of the outputs g and g + 8. Codes are cut into planes of 4, 2
and 1 bits, so that none crosses a word: 5 bits are 4 + 1. Behind the codes of a brick lie its scales, then
zero points, then minimums, where there are any. Widths are sorted into runs, runs padded to whole bricks;
`source` says which input stands where. What the numbers mean is unchanged: `expand` is the way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from ...formats import PackedWeight
from ...formats.bits import unpack
from ...formats.packed import Segment

BLOCK = 128  # inputs
TILE = 16  # outputs

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
"""The bits of each plane, lowest first."""

Zeros = Literal["half", "none", "table"]
"""Zero points: half the range of the codes, zero, or one for each group and output."""


@dataclass(frozen=True)
class Layout:
    """What bricks of one launch have in common, whatever their widths."""

    steps: int  # sixteens of inputs with one scale: 1, 2, 4 or 8
    zeros: Zeros
    minima: bool

    @property
    def groups(self) -> int:
        """Scales for each output of a brick."""
        return 8 // self.steps

    @property
    def tables(self) -> int:
        """Numbers for each group and output."""
        return 1 + (self.zeros == "table") + self.minima

    def brick(self, bits: int) -> int:
        """Bytes of a brick."""
        return 256 * bits + 32 * self.groups * self.tables


@dataclass(frozen=True, eq=False)
class Run:
    """The bricks of one width."""

    bits: int
    bricks: Tensor  # (tiles, blocks, bytes) uint8

    @property
    def blocks(self) -> int:
        """Blocks of inputs."""
        return int(self.bricks.shape[1])


@dataclass(frozen=True, eq=False)
class Tiles:
    """A rearranged matrix."""

    layout: Layout
    runs: tuple[Run, ...]
    in_features: int
    out_features: int
    source: Tensor | None  # (128 blocks,) int32: the input that stands there, -1 for padding; None: in order
    factor: float  # of every sum: keeps small float32 scales from vanishing in float16
    bias: Tensor | None  # float16

    @property
    def blocks(self) -> int:
        """Blocks of inputs."""
        return sum(run.blocks for run in self.runs)

    @property
    def tiles(self) -> int:
        """Tiles of outputs."""
        return -(-self.out_features // TILE)

    @property
    def widths(self) -> tuple[int, ...]:
        """The bits of each run."""
        return tuple(run.bits for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes held, source and bias included."""
        others = (tensor.nbytes for tensor in (self.source, self.bias) if tensor is not None)
        return sum(run.bricks.nbytes for run in self.runs) + sum(others)


def arrange(*weights: PackedWeight) -> list[Tiles]:
    """Rearrange packed weights in one layout, where they are; `Unsupported` if they are not known here."""
    layout = _layout([segment for weight in weights for segment in weight.segments])
    return [_arrange(weight, layout) for weight in weights]


def expand(tiles: Tiles) -> Tensor:
    """(outputs, 128 blocks) float16: the numbers as the kernels unpack them, in the order they are stored."""
    layout, parts = tiles.layout, []
    for run in tiles.runs:
        codes, at = torch.zeros(1, dtype=torch.int32, device=run.bricks.device), 0
        low = 0
        for bits in PLANES[run.bits]:
            size = 256 * bits
            codes = codes | _unplane(run.bricks[:, :, at : at + size], bits) << low
            at, low = at + size, low + bits
        scale, *others = run.bricks[:, :, at:].contiguous().view(torch.float16).chunk(layout.tables, -1)
        numbers = codes.double()
        if layout.zeros == "half":
            numbers -= 1 << (run.bits - 1)
        elif layout.zeros == "table":
            numbers += _lanes(others.pop(0), layout).double()
        numbers *= _lanes(scale, layout).double()
        if layout.minima:
            numbers += _lanes(others.pop(0), layout).double()
        parts.append(_from_lanes(numbers.half()))
    return torch.cat(parts, 1)[: tiles.out_features]


def _layout(segments: Sequence[Segment]) -> Layout:
    if odd := [segment.bits for segment in segments if segment.bits not in PLANES]:
        raise Unsupported(f"codes of {odd[0]} bits are not known to the CUDA kernels")
    if any(segment.codebook is not None for segment in segments):
        raise Unsupported("codebooks are not known to the CUDA kernels")
    # The last group of a segment may end early: only padding follows, unless another of its width does.
    sizes = [size for segment in segments for size in segment.sizes[:-1]] + [BLOCK]
    ends = [segment.sizes[-1] for segment in segments]
    common = math.gcd(*sizes, *(ends if len({s.bits for s in segments}) < len(segments) else ()))
    if common % TILE:
        raise Unsupported(
            f"groups of {common} inputs are not known to the CUDA kernels, which want 16 at least"
        )
    zeros: Zeros = "table"
    constants = [segment.zero if isinstance(segment.zero, int) else None for segment in segments]
    if all(zero == 1 << (segment.bits - 1) for zero, segment in zip(constants, segments, strict=True)):
        zeros = "half"
    elif all(zero == 0 for zero in constants):
        zeros = "none"
    return Layout(common // TILE, zeros, any(segment.minimum is not None for segment in segments))


def _arrange(weight: PackedWeight, layout: Layout) -> Tiles:
    device = weight.segments[0].codes.device
    order = weight.order
    if order is None:
        order = torch.arange(weight.in_features, dtype=torch.int32, device=device)
    pieces: Sequence[Tensor] = order.split_with_sizes([segment.rows for segment in weight.segments])
    pairs = sorted(zip(weight.segments, pieces, strict=True), key=lambda pair: -pair[0].bits)
    factor = _factor(weight)
    runs, sources = [], []
    for _, members in groupby(pairs, key=lambda pair: pair[0].bits):
        segments, orders = zip(*members, strict=True)
        runs.append(_run(segments, layout, factor))
        standing = torch.cat(orders).to(torch.int32)
        sources.append(F.pad(standing, (0, -len(standing) % BLOCK), value=-1))
    source = torch.cat(sources)
    moved = not torch.equal(source, torch.arange(weight.in_features, dtype=torch.int32, device=device))
    return Tiles(
        layout,
        tuple(runs),
        weight.in_features,
        weight.out_features,
        source if moved else None,
        1.0 / factor,
        None if weight.bias is None else weight.bias.half(),
    )


def _run(segments: Sequence[Segment], layout: Layout, factor: float) -> Run:
    """The bricks of segments of one width."""
    bits, columns = segments[0].bits, segments[0].codes.shape[1]
    codes = torch.cat([unpack(segment.codes, segment.bits, segment.rows) for segment in segments])
    rows = len(codes)
    lanes = _to_lanes(F.pad(codes, (0, -columns % TILE, 0, -rows % BLOCK)))
    parts, low = [], 0
    for width in PLANES[bits]:
        parts.append(_plane((lanes >> low) & ((1 << width) - 1), width))
        low += width
    each = TILE * layout.steps
    repeats = torch.tensor([-(-size // each) for segment in segments for size in segment.sizes])
    blocks = -(-rows // BLOCK)

    def table(values: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([part.float() for part in values]).repeat_interleave(repeats.to(codes.device), 0)
        whole = F.pad(whole, (0, -columns % TILE, 0, blocks * layout.groups - len(whole)))
        grid = whole.half().view(blocks, layout.groups, -1, 2, 8).permute(2, 0, 1, 4, 3)
        return grid.reshape(grid.shape[0], blocks, -1).contiguous().view(torch.uint8)

    parts.append(table([segment.scales.expand().float() * factor for segment in segments]))
    if layout.zeros == "table":
        parts.append(table([-_zeros(segment, columns) for segment in segments]))
    if layout.minima:
        parts.append(table([-_minima(segment, columns) * factor for segment in segments]))
    return Run(bits, torch.cat(parts, -1))


def _zeros(segment: Segment, columns: int) -> Tensor:
    if isinstance(segment.zero, Tensor):
        return segment.zero.float()
    return torch.full((len(segment.sizes), columns), float(segment.zero), device=segment.codes.device)


def _minima(segment: Segment, columns: int) -> Tensor:
    if segment.minimum is not None:
        return segment.minimum.expand().float()
    return torch.zeros(len(segment.sizes), columns, device=segment.codes.device)


def _factor(weight: PackedWeight) -> float:
    """A power of two for scales that float16 would round away; one where float16 is what the format says."""
    if weight.dtype is torch.float16:
        return 1.0
    largest = 0.0
    for segment in weight.segments:
        reach = segment.scales.expand().float().abs().max() * 2**segment.bits
        if segment.minimum is not None:
            reach = torch.maximum(reach, segment.minimum.expand().float().abs().max())
        largest = max(largest, float(reach))
    return 1.0 if largest == 0.0 else 2.0 ** (12 - math.frexp(largest)[1])


def _to_lanes(rows: Tensor) -> Tensor:
    """(inputs, outputs) → (tiles, blocks, lane, step, register, 2)."""
    # An input is (block, step, q, half, pair), an output (tile, eight, g); a register is (half, eight).
    shape = (rows.shape[0] // BLOCK, 8, 4, 2, 2, rows.shape[1] // TILE, 2, 8)
    lanes = rows.reshape(shape).permute(5, 0, 7, 2, 1, 3, 6, 4)  # tile, block, g, q, step, half, eight, pair
    return lanes.reshape(shape[5], shape[0], 32, 8, 4, 2)


def _from_lanes(lanes: Tensor) -> Tensor:
    """The way back, to (outputs, inputs)."""
    tiles, blocks = lanes.shape[:2]
    parts = lanes.view(tiles, blocks, 8, 4, 8, 2, 2, 2)  # tile, block, g, q, step, half, eight, pair
    return parts.permute(0, 6, 2, 1, 4, 3, 5, 7).reshape(tiles * TILE, blocks * BLOCK)


def _plane(lanes: Tensor, bits: int) -> Tensor:
    """Numbers of a few bits → (tiles, blocks, 256 · bits) uint8.

    In a word fields go upwards, pairs 16 bits apart; of four words or fewer each lane has its own in a row.
    """
    tiles, blocks = lanes.shape[:2]
    count = 2 * bits  # words of a lane
    fields = lanes.reshape(tiles, blocks, 32, count, 16 // bits, 2)
    words = torch.zeros(fields.shape[:4], dtype=torch.int32, device=lanes.device)
    for field in range(16 // bits):
        for pair in range(2):
            words |= fields[..., field, pair].to(torch.int32) << (bits * field + 16 * pair)
    pieces = words.view(tiles, blocks, 32, -1, min(4, count)).transpose(2, 3).contiguous()
    return pieces.view(torch.uint8).flatten(2)


def _unplane(data: Tensor, bits: int) -> Tensor:
    """The way back, to (tiles, blocks, lane, step, register, 2) int32."""
    tiles, blocks = data.shape[:2]
    pieces = data.contiguous().view(torch.int32).view(tiles, blocks, -1, 32, min(4, 2 * bits))
    words = pieces.transpose(2, 3).flatten(3)
    shifts = torch.tensor([[bits * field + 16 * pair for pair in range(2)] for field in range(16 // bits)])
    numbers = (words[..., None, None] >> shifts.to(words.device)) & ((1 << bits) - 1)
    return numbers.reshape(tiles, blocks, 32, 8, 4, 2)


def _lanes(table: Tensor, layout: Layout) -> Tensor:
    """A table's number for every code: (tiles, blocks, lane, step, register, 1)."""
    tiles, blocks = table.shape[:2]
    grid = table.reshape(tiles, blocks, layout.groups, 8, 2).repeat_interleave(layout.steps, 2)
    lanes = grid.transpose(2, 3)[:, :, :, None, :, None, :].expand(-1, -1, -1, 4, -1, 2, -1)
    return lanes.reshape(tiles, blocks, 32, 8, 4, 1)
