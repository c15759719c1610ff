"""Packed weights rearranged for the tensor cores: every lane's codes side by side, all formats alike.

A brick is 128 stored inputs by a tile of 16 outputs: eight steps of a tensor core. Of step s, lane 4·g + q
keeps the inputs 16·s + 4·q to 16·s + 4·q + 3 of the outputs g and g + 8. Codes are cut into planes of 4, 2
and 1 bits, so that none crosses a word: 5 bits are 4 + 1. Behind the codes of a brick lie its scales, then
zero points, then minimums, where there are any.

All bricks of a matrix have codes of one width, that of most of its codes: a kernel for several would need
registers and shared memory for the widest. Narrower codes are widened. Wider ones are cut into digits, each a
brick of its own with its own multiple of the scales; their sum is the number. These few bricks may also have
finer groups than the others. `source` says which input stands where. What the numbers mean is unchanged:
`expand` is the way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from ...formats import PackedWeight
from ...formats.bits import unpack
from ...formats.packed import Segment
from .lanes import BLOCK, PLANES, TILE, from_lanes, plane, spread, to_lanes, unplane

MOST = 1 << 20  # codes that are rearranged at a time, if not very many: each takes ten bytes meanwhile
MOST_ON_GPU = 1 << 22  # of a large matrix, where each step is a launch
_LARGEST = 65504.0  # of float16

Zeros = Literal["half", "none", "table"]
"""Zero points: half the range of the codes, zero, or one for each group and output."""


@dataclass(frozen=True)
class Layout:
    """What the bricks of a matrix have in common."""

    bits: int
    steps: int  # sixteens of inputs with one scale: 1, 2, 4 or 8
    fine: int  # the same in the bricks of codes that had another width
    zeros: Zeros
    minima: bool

    @property
    def tables(self) -> int:
        """Numbers for each group and output."""
        return 1 + (self.zeros == "table") + self.minima

    def brick(self, fine: bool) -> int:
        """Bytes of a brick."""
        return 256 * self.bits + 32 * self.tables * 8 // (self.fine if fine else self.steps)

    @property
    def largest(self) -> int:
        """Bytes of the largest brick."""
        return max(self.brick(False), self.brick(True))


@dataclass(frozen=True)
class Share:
    """Blocks of inputs whose codes have so many digits."""

    digits: int
    blocks: int


@dataclass(frozen=True, eq=False)
class Run:
    """Bricks with groups of one size, those of a block's digits side by side."""

    bricks: Tensor  # (tiles, bricks of a tile, bytes) uint8
    shares: tuple[Share, ...]

    @property
    def stored(self) -> int:
        """Bricks of a tile."""
        return sum(share.digits * share.blocks for share in self.shares)


@dataclass(frozen=True, eq=False)
class Tiles:
    """A rearranged matrix."""

    layout: Layout
    fine: Run  # codes that had another width; perhaps none
    main: Run
    in_features: int
    out_features: int
    source: Tensor | None  # (128 blocks,) int32: the input that stands there, -1 for padding; None: in order
    factor: float  # of every sum: keeps small float32 scales from vanishing in float16
    bias: Tensor | None  # float16

    @property
    def blocks(self) -> int:
        """Blocks of inputs."""
        return sum(share.blocks for share in self.shares)

    @property
    def stored(self) -> int:
        """Bricks of a tile: blocks of inputs, each as often as its codes have digits."""
        return self.fine.stored + self.main.stored

    @property
    def shares(self) -> tuple[Share, ...]:
        """Those of both runs."""
        return self.fine.shares + self.main.shares

    @property
    def tiles(self) -> int:
        """Tiles of outputs."""
        return -(-self.out_features // TILE)

    @property
    def nbytes(self) -> int:
        """Bytes held, source and bias included."""
        held = (self.fine.bricks, self.main.bricks, self.source, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def arrange(weight: PackedWeight) -> Tiles:
    """Rearrange a packed weight, where it is; `Unsupported` if it is not known here."""
    zeros = _zeros_of(weight.segments)
    bits = _width(weight.segments, zeros)
    order, device = weight.order, weight.segments[0].codes.device
    if order is None:
        order = torch.arange(weight.in_features, dtype=torch.int32, device=device)
    pieces = dict(
        zip(map(id, weight.segments), order.split_with_sizes([s.rows for s in weight.segments]), strict=True)
    )
    main = [one for one in weight.segments if one.bits == bits]
    others: dict[int, list[Segment]] = {}
    for one in sorted((one for one in weight.segments if one.bits != bits), key=lambda one: -one.bits):
        others.setdefault(digits(one.bits, bits, zeros == "half"), []).append(one)
    steps, fine = _steps([main]), _steps([*others.values()] or [main])
    minima = any(segment.minimum is not None for segment in weight.segments)
    layout = Layout(bits, steps, fine if others else steps, zeros, minima)
    factor = _factor(weight)
    source = torch.cat(
        [_padded(torch.cat([pieces[id(s)] for s in part])) for part in [*others.values(), main]]
    )
    moved = not torch.equal(source, torch.arange(weight.in_features, dtype=torch.int32, device=device))
    return Tiles(
        layout,
        _run(others, layout, True, factor, weight.out_features, device),
        _run({1: main}, layout, False, factor, weight.out_features, device),
        weight.in_features,
        weight.out_features,
        source if moved else None,
        1.0 / factor,
        None if weight.bias is None else weight.bias.half(),
    )


def alike(matrices: Sequence[Tiles]) -> list[Tiles]:
    """The same matrices with groups of the same sizes: scales repeated where others have more of them."""
    layouts = [one.layout for one in matrices]
    first = layouts[0]
    if any((one.zeros, one.minima) != (first.zeros, first.minima) for one in layouts):
        raise Unsupported("matrices whose zero points or minimums are kept in different ways")
    steps = min(one.steps for one in layouts)
    fine = min([one.layout.fine for one in matrices if one.fine.shares], default=steps)
    out = []
    for one in matrices:
        layout = replace(one.layout, steps=steps, fine=fine)
        runs = (
            _finer(one.fine, one.layout, one.layout.fine, fine),
            _finer(one.main, one.layout, one.layout.steps, steps),
        )
        out.append(replace(one, layout=layout, fine=runs[0], main=runs[1]))
    return out


def _finer(run: Run, layout: Layout, old: int, new: int) -> Run:
    if old == new or not run.shares:
        return run
    codes, tables = run.bricks.split_with_sizes(
        [256 * layout.bits, run.bricks.shape[2] - 256 * layout.bits], -1
    )
    grid = tables.reshape(*tables.shape[:2], layout.tables, 8 // old, 32)
    split = grid.repeat_interleave(old // new, -2)
    return replace(run, bricks=torch.cat([codes, split.flatten(-3)], -1))


def stored_source(tiles: Tiles) -> Tensor:
    """`source` for each brick: a block as often as its codes have digits; -1 for padding."""
    source = tiles.source
    if source is None:
        source = torch.arange(tiles.blocks * BLOCK, dtype=torch.int32, device=tiles.main.bricks.device)
        source = torch.where(source < tiles.in_features, source, -1)
    times = torch.tensor([share.digits for share in tiles.shares for _ in range(share.blocks)])
    return source.view(-1, BLOCK).repeat_interleave(times.to(source.device), 0).flatten()


def expand(tiles: Tiles) -> Tensor:
    """(outputs, 128 blocks) float16: the numbers as the kernels unpack them, in the order they are stored."""
    parts = []
    for run, fine in ((tiles.fine, True), (tiles.main, False)):
        at = 0
        for share in run.shares:
            bricks = run.bricks[:, at : at + share.digits * share.blocks]
            parts.append(
                _numbers(bricks.view(len(bricks), share.blocks, share.digits, -1), tiles.layout, fine)
            )
            at += share.digits * share.blocks
    return torch.cat(parts, 1)[: tiles.out_features]


def _numbers(bricks: Tensor, layout: Layout, fine: bool) -> Tensor:
    """(tiles, blocks, digits, bytes) → (outputs, inputs)."""
    groups = 8 // (layout.fine if fine else layout.steps)
    total = torch.zeros(1, dtype=torch.float64, device=bricks.device)
    for place in range(bricks.shape[2]):
        brick = bricks[:, :, place]
        codes, at, low = torch.zeros(1, dtype=torch.int32, device=brick.device), 0, 0
        for bits in PLANES[layout.bits]:
            codes = codes | unplane(brick[..., at : at + 256 * bits], bits) << low
            at, low = at + 256 * bits, low + bits
        tables = brick[..., at:].contiguous().view(torch.float16).chunk(layout.tables, -1)
        scale, *others = (spread(table, groups).double() for table in tables)
        digit = codes.double()
        if layout.zeros == "half":
            digit -= 1 << (layout.bits - 1)
        elif layout.zeros == "table":
            digit += others.pop(0)
        total = total + digit * scale
        if layout.minima:
            total = total + others.pop(0)
    return from_lanes(total.half())


def digits(bits: int, width: int, signed: bool) -> int:
    """Into how many digits of a width codes of so many bits are cut."""
    if not signed:
        return -(-bits // width)
    half, low, high, count = 1 << (width - 1), -(1 << (bits - 1)), (1 << (bits - 1)) - 1, 1
    while low < -half or high >= half:
        low, high, count = (low + half) >> width, (high + half) >> width, count + 1
    return count


def _cut(codes: Tensor, bits: int, width: int, signed: bool) -> list[Tensor]:
    """Codes as digits, the lowest first; signed ones stand half a range too high, as codes do."""
    rest, out = codes.to(torch.int16), []
    half = 1 << (width - 1) if signed else 0
    if signed:
        rest = rest - (1 << (bits - 1))
    for _ in range(digits(bits, width, signed)):
        out.append(((rest + half) & ((1 << width) - 1)).to(torch.uint8))
        rest = (rest + half) >> width
    return out


def _width(segments: Sequence[Segment], zeros: Zeros) -> int:
    """The width of all bricks: the one that takes the least space."""
    if odd := [segment.bits for segment in segments if segment.bits not in PLANES]:
        raise Unsupported(f"codes of {odd[0]} bits are not known to the CUDA kernels")
    if any(segment.codebook is not None for segment in segments):
        raise Unsupported("codebooks are not known to the CUDA kernels")

    def space(width: int) -> int:
        return sum(s.rows * width * digits(s.bits, width, zeros == "half") for s in segments)

    return min(sorted({segment.bits for segment in segments}), key=space)


def _zeros_of(segments: Sequence[Segment]) -> Zeros:
    constants = [segment.zero if isinstance(segment.zero, int) else None for segment in segments]
    if all(zero == 1 << (segment.bits - 1) for zero, segment in zip(constants, segments, strict=True)):
        return "half"
    return "none" if all(zero == 0 for zero in constants) else "table"


def _steps(parts: Sequence[Sequence[Segment]]) -> int:
    """Sixteens of inputs with one scale in every group; the last of a part may end early."""
    common = BLOCK
    for part in parts:
        *sizes, _ = (size for segment in part for size in segment.sizes)
        common = math.gcd(*sizes, common)
    if common % TILE:
        raise Unsupported(
            f"groups of {common} inputs are not known to the CUDA kernels, which want 16 at least"
        )
    return common // TILE


def _padded(order: Tensor) -> Tensor:
    return F.pad(order.to(torch.int32), (0, -len(order) % BLOCK), value=-1)


def _run(
    parts: dict[int, list[Segment]],
    layout: Layout,
    fine: bool,
    factor: float,
    columns: int,
    device: torch.device,
) -> Run:
    """The bricks of segments, by the number of their digits."""
    blocks = {count: -(-sum(one.rows for one in part) // BLOCK) for count, part in parts.items()}
    shares = tuple(Share(count, blocks[count]) for count in parts)
    stored = sum(share.digits * share.blocks for share in shares)
    shape = (-(-columns // TILE), stored, layout.brick(fine))
    bricks = torch.empty(shape, dtype=torch.uint8, device=device)
    at = 0
    for count, part in parts.items():
        wide = count * blocks[count]
        mine = bricks[:, at : at + wide].view(shape[0], blocks[count], count, shape[2])
        rows = sum(one.rows for one in part)
        most = max(MOST, min(MOST_ON_GPU, rows * columns // 8)) if device.type == "cuda" else MOST
        step = max(TILE, max(most, rows * columns // 32) // rows // TILE * TILE)
        for start in range(
            0, columns, step
        ):  # a part at a time: codes one by one take several times their space
            made = _planes(part, layout, count, start, min(start + step, columns))
            mine[start // TILE : start // TILE + len(made), ..., : 256 * layout.bits] = made
        mine[..., 256 * layout.bits :] = _tables(part, layout, count, fine, factor, columns)
        at += wide
    return Run(bricks, shares)


def _tables(
    part: Sequence[Segment], layout: Layout, count: int, fine: bool, factor: float, columns: int
) -> Tensor:
    """Scales and what else groups have, (tiles, blocks, digits, bytes)."""
    device, groups = part[0].codes.device, 8 // (layout.fine if fine else layout.steps)
    sizes = [size for segment in part for size in segment.sizes]
    blocks = -(-sum(sizes) // BLOCK)
    repeats = torch.tensor([-(-size * groups // BLOCK) for size in sizes], device=device)
    times = torch.tensor([float(1 << layout.bits * place) for place in range(count)], device=device)

    def table(values: Sequence[Tensor], times: Tensor) -> Tensor:
        whole = torch.cat([one.float() for one in values]).repeat_interleave(repeats, 0)
        whole = F.pad(whole, (0, -columns % TILE, 0, blocks * groups - len(whole)))
        grid = whole.view(blocks, 1, groups, -1, 2, 8) * times.view(1, -1, 1, 1, 1, 1)
        if float(grid.abs().max()) > _LARGEST:
            raise Unsupported(f"scales above {_LARGEST / float(times[-1]):.0f}")
        lanes = grid.half().permute(3, 0, 1, 2, 5, 4)  # tile, block, digit, group, lane's output, eight
        return lanes.reshape(len(lanes), blocks, count, -1).contiguous().view(torch.uint8)

    tables = [table([segment.scales.expand().float() * factor for segment in part], times)]
    once = (times == 1).float()
    if layout.zeros == "table":
        tables.append(table([-_zeros(segment, columns) for segment in part], once))
    if layout.minima:
        tables.append(table([-_minima(segment, columns) * factor for segment in part], once))
    return torch.cat(tables, -1)


def _planes(part: Sequence[Segment], layout: Layout, count: int, start: int, stop: int) -> Tensor:
    """The codes of some outputs as bricks hold them, (tiles, blocks, digits, bytes)."""
    signed = layout.zeros == "half"
    cut = []
    for segment in part:
        codes = unpack(segment.codes[:, start:stop], segment.bits, segment.rows)
        cut.append(torch.stack(_cut(codes, segment.bits, layout.bits, signed)))
    every = torch.cat(cut, 1)
    every = F.pad(every, (0, -every.shape[2] % TILE, 0, -every.shape[1] % BLOCK))
    made = []
    for codes in every:
        lanes, low, planes = to_lanes(codes), 0, []
        for width in PLANES[layout.bits]:
            planes.append(plane((lanes >> low) & ((1 << width) - 1), width))
            low += width
        made.append(torch.cat(planes, -1))
    return torch.stack(made, 2)


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
