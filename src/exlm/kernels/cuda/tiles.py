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
from dataclasses import dataclass, replace
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
MOST = 1 << 20  # codes that are rearranged at a time, unless there are very many

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
"""The bits of each plane, lowest first."""

Zeros = Literal["half", "none", "table"]
"""Zero points: half the range of the codes, zero, or one for each group and output."""


@dataclass(frozen=True)
class Layout:
    """What bricks of one launch have in common."""

    steps: tuple[
        tuple[int, int], ...
    ]  # for codes of so many bits: sixteens of inputs with one scale, 1, 2, 4 or 8
    zeros: Zeros
    minima: bool

    def groups(self, bits: int) -> int:
        """Scales for each output of a brick."""
        return 8 // dict(self.steps)[bits]

    @property
    def tables(self) -> int:
        """Numbers for each group and output."""
        return 1 + (self.zeros == "table") + self.minima

    def brick(self, bits: int) -> int:
        """Bytes of a brick."""
        return 256 * bits + 32 * self.groups(bits) * self.tables

    @property
    def largest(self) -> int:
        """Bytes of the largest brick."""
        return max(self.brick(bits) for bits, _ in self.steps)


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


def arrange(weight: PackedWeight) -> Tiles:
    """Rearrange a packed weight, where it is; `Unsupported` if it is not known here."""
    return _arrange(weight, _layout(weight.segments))


def alike(matrices: Sequence[Tiles]) -> list[Tiles]:
    """The same matrices in one layout: scales repeated where others have more of them."""
    layouts = [one.layout for one in matrices]
    first = layouts[0]
    if any((one.zeros, one.minima) != (first.zeros, first.minima) for one in layouts):
        raise Unsupported("matrices whose zero points or minimums are kept in different ways")
    steps: dict[int, int] = {}
    for bits, count in (pair for one in layouts for pair in one.steps):
        steps[bits] = min(count, steps.get(bits, 8))
    common = Layout(tuple(sorted(steps.items())), first.zeros, first.minima)
    return [
        replace(one, layout=common, runs=tuple(_finer(run, one.layout, common) for run in one.runs))
        for one in matrices
    ]


def _finer(run: Run, old: Layout, new: Layout) -> Run:
    times = new.groups(run.bits) // old.groups(run.bits)
    if times == 1:
        return run
    codes, tables = run.bricks[..., : 256 * run.bits], run.bricks[..., 256 * run.bits :]
    grid = tables.reshape(*tables.shape[:2], old.tables, old.groups(run.bits), 32)
    split = grid.repeat_interleave(times, -2)
    return Run(run.bits, torch.cat([codes, split.flatten(-3)], -1))


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
            numbers += _lanes(others.pop(0), layout.groups(run.bits)).double()
        numbers *= _lanes(scale, layout.groups(run.bits)).double()
        if layout.minima:
            numbers += _lanes(others.pop(0), layout.groups(run.bits)).double()
        parts.append(_from_lanes(numbers.half()))
    return torch.cat(parts, 1)[: tiles.out_features]


def _layout(segments: Sequence[Segment]) -> Layout:
    if odd := [segment.bits for segment in segments if segment.bits not in PLANES]:
        raise Unsupported(f"codes of {odd[0]} bits are not known to the CUDA kernels")
    if any(segment.codebook is not None for segment in segments):
        raise Unsupported("codebooks are not known to the CUDA kernels")
    steps = tuple((bits, _steps(segments, bits)) for bits in sorted({segment.bits for segment in segments}))
    zeros: Zeros = "table"
    constants = [segment.zero if isinstance(segment.zero, int) else None for segment in segments]
    if all(zero == 1 << (segment.bits - 1) for zero, segment in zip(constants, segments, strict=True)):
        zeros = "half"
    elif all(zero == 0 for zero in constants):
        zeros = "none"
    return Layout(steps, zeros, any(segment.minimum is not None for segment in segments))


def _steps(segments: Sequence[Segment], bits: int) -> int:
    """Sixteens of inputs with one scale in every group of a width."""
    *sizes, _ = (size for segment in segments if segment.bits == bits for size in segment.sizes)
    common = math.gcd(*sizes, BLOCK)  # the last group may end early: only padding follows
    if common % TILE:
        raise Unsupported(
            f"groups of {common} inputs are not known to the CUDA kernels, which want 16 at least"
        )
    return common // TILE


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
    rows = sum(segment.rows for segment in segments)
    blocks, groups, device = -(-rows // BLOCK), layout.groups(bits), segments[0].codes.device
    bricks = torch.empty(-(-columns // TILE), blocks, layout.brick(bits), dtype=torch.uint8, device=device)
    many = max(MOST, rows * columns // 32)
    step = max(TILE, many // rows // TILE * TILE)
    for start in range(0, columns, step):  # a part at a time: codes one by one take several times their space
        first, part = start // TILE, _planes(segments, start, min(start + step, columns))
        bricks[first : first + len(part), :, : 256 * bits] = part
    sizes = [size for segment in segments for size in segment.sizes]
    repeats = torch.tensor([-(-size * groups // BLOCK) for size in sizes], device=device)

    def table(values: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([part.float() for part in values]).repeat_interleave(repeats, 0)
        whole = F.pad(whole, (0, -columns % TILE, 0, blocks * groups - len(whole)))
        grid = whole.half().view(blocks, groups, -1, 2, 8).permute(2, 0, 1, 4, 3)
        return grid.reshape(grid.shape[0], blocks, -1).contiguous().view(torch.uint8)

    tables = [table([segment.scales.expand().float() * factor for segment in segments])]
    if layout.zeros == "table":
        tables.append(table([-_zeros(segment, columns) for segment in segments]))
    if layout.minima:
        tables.append(table([-_minima(segment, columns) * factor for segment in segments]))
    bricks[:, :, 256 * bits :] = torch.cat(tables, -1)
    return Run(bits, bricks)


def _planes(segments: Sequence[Segment], start: int, stop: int) -> Tensor:
    """The codes of some outputs as bricks hold them, (tiles, blocks, bytes)."""
    parts = [unpack(segment.codes[:, start:stop], segment.bits, segment.rows) for segment in segments]
    codes = torch.cat(parts).to(torch.uint8)
    lanes = _to_lanes(F.pad(codes, (0, -codes.shape[1] % TILE, 0, -len(codes) % BLOCK)))
    planes, low = [], 0
    for width in PLANES[segments[0].bits]:
        planes.append(_plane((lanes >> low) & ((1 << width) - 1), width))
        low += width
    return torch.cat(planes, -1)


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


def _lanes(table: Tensor, groups: int) -> Tensor:
    """A table's number for every code: (tiles, blocks, lane, step, register, 1)."""
    tiles, blocks = table.shape[:2]
    grid = table.reshape(tiles, blocks, groups, 8, 2).repeat_interleave(8 // groups, 2)
    lanes = grid.transpose(2, 3)[:, :, :, None, :, None, :].expand(-1, -1, -1, 4, -1, 2, -1)
    return lanes.reshape(tiles, blocks, 32, 8, 4, 1)
