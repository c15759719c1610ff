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

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from ...formats import PackedWeight
from ...formats.packed import Segment
from .filling import fill as plainly
from .lanes import BIT_PLANES, TILE_K, TILE_N, from_lanes, spread, unplane
from .layout import RepackFn, RepackJob, TileLayout, Zeros, digits


@dataclass(frozen=True)
class DigitSpan:
    """Blocks of inputs whose codes have so many digits."""

    digits: int
    blocks: int


@dataclass(frozen=True, eq=False)
class TileRun:
    """Bricks with groups of one size, those of a block's digits side by side."""

    bricks: Tensor  # (tiles, bricks of a tile, bytes) uint8
    shares: tuple[DigitSpan, ...]

    @property
    def stored(self) -> int:
        """Bricks of a tile."""
        return sum(share.digits * share.blocks for share in self.shares)


@dataclass(frozen=True, eq=False)
class MmaWeight:
    """A rearranged matrix."""

    layout: TileLayout
    fine: TileRun  # codes that had another width; perhaps none
    main: TileRun
    in_features: int
    out_features: int
    source: Tensor | None  # (128 blocks,) int32 on the CPU: the input there, -1 for padding; None: in order
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
    def shares(self) -> tuple[DigitSpan, ...]:
        """Those of both runs."""
        return self.fine.shares + self.main.shares

    @property
    def tiles(self) -> int:
        """Tiles of outputs."""
        return -(-self.out_features // TILE_N)

    @property
    def nbytes(self) -> int:
        """Bytes held, source and bias included."""
        held = (self.fine.bricks, self.main.bricks, self.source, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def repack(weight: PackedWeight, fill: RepackFn = plainly) -> MmaWeight:
    """Rearrange a packed weight, where it is; `Unsupported` if it is not known here."""
    zeros = _zeros_of(weight.segments)
    bits = _width(weight.segments, zeros)
    natural = torch.arange(weight.in_features, dtype=torch.int32)
    order = natural if weight.perm is None else weight.perm.cpu()
    pieces = dict(
        zip(map(id, weight.segments), order.split_with_sizes([s.in_features for s in weight.segments]), strict=True)
    )
    main = [one for one in weight.segments if one.bits == bits]
    others: dict[int, list[Segment]] = {}
    for one in sorted((one for one in weight.segments if one.bits != bits), key=lambda one: -one.bits):
        others.setdefault(digits(one.bits, bits, zeros == "half"), []).append(one)
    steps, fine = _steps([main]), _steps([*others.values()] or [main])
    minima = any(segment.minimum is not None for segment in weight.segments)
    layout = TileLayout(bits, steps, fine if others else steps, zeros, minima)
    factor = _factor(weight)
    like = RepackJob((), 1, layout, False, factor, weight.out_features)
    device = weight.segments[0].codes.device
    fine_run, first = _run(others, like, True, device)
    main_run, rest = _run({1: main}, like, False, device)
    fill([*first, *rest])
    source = torch.cat([_padded(torch.cat([pieces[id(s)] for s in part])) for part in [*others.values(), main]])
    return MmaWeight(
        layout,
        fine_run,
        main_run,
        weight.in_features,
        weight.out_features,
        None if source.equal(natural) else source,
        1.0 / factor,
        None if weight.bias is None else weight.bias.half(),
    )


def unify_groups(matrices: Sequence[MmaWeight]) -> list[MmaWeight]:
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


def _finer(run: TileRun, layout: TileLayout, old: int, new: int) -> TileRun:
    if old == new or not run.shares:
        return run
    codes, tables = run.bricks.split_with_sizes([256 * layout.bits, run.bricks.shape[2] - 256 * layout.bits], -1)
    grid = tables.reshape(*tables.shape[:2], layout.tables, 8 // old, 32)
    split = grid.repeat_interleave(old // new, -2)
    return replace(run, bricks=torch.cat([codes, split.flatten(-3)], -1))


def tile_perm(tiles: MmaWeight) -> Tensor:
    """`source` for each brick: a block as often as its codes have digits; -1 for padding."""
    source = tiles.source
    if source is None:
        source = _padded(torch.arange(tiles.in_features, dtype=torch.int32))
    shares = tiles.shares
    parts = source.view(-1, TILE_K).split_with_sizes([share.blocks for share in shares])
    every = [part.repeat_interleave(share.digits, 0) for part, share in zip(parts, shares, strict=True)]
    return torch.cat(every).flatten()


def expand(tiles: MmaWeight) -> Tensor:
    """(outputs, 128 blocks) float16: the numbers as the kernels unpack them, in the order they are stored."""
    parts = []
    for run, fine in ((tiles.fine, True), (tiles.main, False)):
        at = 0
        for share in run.shares:
            bricks = run.bricks[:, at : at + share.digits * share.blocks]
            parts.append(_numbers(bricks.view(len(bricks), share.blocks, share.digits, -1), tiles.layout, fine))
            at += share.digits * share.blocks
    return torch.cat(parts, 1)[: tiles.out_features]


def _numbers(bricks: Tensor, layout: TileLayout, fine: bool) -> Tensor:
    """(tiles, blocks, digits, bytes) → (outputs, inputs)."""
    groups = 8 // (layout.fine if fine else layout.steps)
    total = torch.zeros(1, dtype=torch.float64, device=bricks.device)
    for place in range(bricks.shape[2]):
        brick = bricks[:, :, place]
        codes, at, low = torch.zeros(1, dtype=torch.int32, device=brick.device), 0, 0
        for bits in BIT_PLANES[layout.bits]:
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


def _width(segments: Sequence[Segment], zeros: Zeros) -> int:
    """The width of all bricks: the one that takes the least space."""
    if odd := [segment.bits for segment in segments if segment.bits not in BIT_PLANES]:
        raise Unsupported(f"codes of {odd[0]} bits are not known to the CUDA kernels")
    if any(segment.codebook is not None for segment in segments):
        raise Unsupported("codebooks are not known to the CUDA kernels")

    def space(width: int) -> int:
        return sum(s.in_features * width * digits(s.bits, width, zeros == "half") for s in segments)

    return min(sorted({segment.bits for segment in segments}), key=space)


def _zeros_of(segments: Sequence[Segment]) -> Zeros:
    constants = [segment.zero if isinstance(segment.zero, int) else None for segment in segments]
    if all(zero == 1 << (segment.bits - 1) for zero, segment in zip(constants, segments, strict=True)):
        return "half"
    return "none" if all(zero == 0 for zero in constants) else "table"


def _steps(parts: Sequence[Sequence[Segment]]) -> int:
    """Sixteens of inputs with one scale in every group; the last of a part may end early."""
    common = TILE_K
    for part in parts:
        *sizes, _ = (size for segment in part for size in segment.group_sizes)
        common = math.gcd(*sizes, common)
    if common % TILE_N:
        raise Unsupported(f"groups of {common} inputs are not known to the CUDA kernels, which want 16 at least")
    return common // TILE_N


def _padded(order: Tensor) -> Tensor:
    return F.pad(order.to(torch.int32), (0, -len(order) % TILE_K), value=-1)


def _run(
    parts: dict[int, list[Segment]], like: RepackJob, fine: bool, device: torch.device
) -> tuple[TileRun, list[tuple[Tensor, RepackJob]]]:
    """The bricks of segments, by the number of their digits; and what is still to be filled with what."""
    pieces = [replace(like, segments=tuple(part), digits=n, fine=fine) for n, part in parts.items()]
    shares = tuple(DigitSpan(piece.digits, piece.blocks) for piece in pieces)
    sizes = [piece.digits * piece.blocks for piece in pieces]
    size = like.layout.brick(fine)
    bricks = torch.empty(-(-like.outputs // TILE_N), sum(sizes), size, dtype=torch.uint8, device=device)
    rooms = [
        mine.view(len(bricks), piece.blocks, piece.digits, size)
        for piece, mine in zip(pieces, bricks.split_with_sizes(sizes, 1), strict=True)
    ]
    return TileRun(bricks, shares), list(zip(rooms, pieces, strict=True))


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
