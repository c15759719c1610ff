"""Bricks filled by torch, on any device: on a GPU a launch for each step, but it says what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from ...formats.bits import unpack
from ...formats.packed import Segment
from .lanes import BIT_PLANES, TILE_K, TILE_N, plane, to_lanes
from .layout import LARGEST, RepackJob, digits

MOST = 1 << 20
"""Codes that are rearranged at a time, if not very many: each takes ten bytes meanwhile."""


def fill(pieces: Sequence[tuple[Tensor, RepackJob]]) -> None:
    """Codes, then scales and what else groups have."""
    for bricks, piece in pieces:
        _fill(bricks, piece)


def _fill(bricks: Tensor, piece: RepackJob) -> None:
    size, outputs = 256 * piece.layout.bits, piece.outputs
    step = max(TILE_N, max(MOST, piece.rows * outputs // 32) // piece.rows // TILE_N * TILE_N)
    for start in range(0, outputs, step):
        made = _planes(piece, start, min(start + step, outputs))
        bricks[start // TILE_N : start // TILE_N + len(made), ..., :size] = made
    bricks[..., size:] = _tables(piece)


def too_large(piece: RepackJob) -> Unsupported:
    """The reason to decline a piece with a scale that float16 cannot say."""
    return Unsupported(f"scales above {LARGEST / (1 << piece.layout.bits * (piece.digits - 1)):.0f}")


def _tables(piece: RepackJob) -> Tensor:
    """(tiles, blocks, digits, bytes)."""
    layout, segments, blocks, groups = piece.layout, piece.segments, piece.blocks, piece.groups
    device, outputs = segments[0].codes.device, piece.outputs
    sizes = [size for segment in segments for size in segment.group_sizes]
    repeats = torch.tensor([-(-size * groups // TILE_K) for size in sizes], device=device)
    times = torch.tensor([float(1 << layout.bits * place) for place in range(piece.digits)], device=device)

    def table(values: Sequence[Tensor], times: Tensor) -> Tensor:
        read_source = torch.cat([one.float() for one in values]).repeat_interleave(repeats, 0)
        read_source = F.pad(read_source, (0, -outputs % TILE_N, 0, blocks * groups - len(read_source)))
        grid = read_source.view(blocks, 1, groups, -1, 2, 8) * times.view(1, -1, 1, 1, 1, 1)
        if float(grid.abs().max()) > LARGEST:
            raise too_large(piece)
        lanes = grid.half().permute(3, 0, 1, 2, 5, 4)  # tile, block, digit, group, lane's output, eight
        return lanes.reshape(len(lanes), blocks, piece.digits, -1).contiguous().view(torch.uint8)

    tables = [table([one.scales.expand().float() * piece.factor for one in segments], times)]
    once = (times == 1).float()
    if layout.zeros == "table":
        tables.append(table([-_zeros(one, outputs) for one in segments], once))
    if layout.minima:
        tables.append(table([-_minima(one, outputs) * piece.factor for one in segments], once))
    return torch.cat(tables, -1)


def _planes(piece: RepackJob, start: int, stop: int) -> Tensor:
    """The codes of some outputs as bricks hold them, (tiles, blocks, digits, bytes)."""
    width, signed = piece.layout.bits, piece.layout.zeros == "half"
    cut = []
    for segment in piece.segments:
        codes = unpack(segment.codes[:, start:stop], segment.bits, segment.in_features)
        cut.append(torch.stack(_cut(codes, segment.bits, width, signed)))
    every = torch.cat(cut, 1)
    every = F.pad(every, (0, -every.shape[2] % TILE_N, 0, -every.shape[1] % TILE_K))
    made = []
    for codes in every:
        lanes, low, planes = to_lanes(codes), 0, []
        for bits in BIT_PLANES[width]:
            planes.append(plane((lanes >> low) & ((1 << bits) - 1), bits))
            low += bits
        made.append(torch.cat(planes, -1))
    return torch.stack(made, 2)


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


def _zeros(segment: Segment, outputs: int) -> Tensor:
    if isinstance(segment.zero, Tensor):
        return segment.zero.float()
    return torch.full((len(segment.group_sizes), outputs), float(segment.zero), device=segment.codes.device)


def _minima(segment: Segment, outputs: int) -> Tensor:
    if segment.minimum is not None:
        return segment.minimum.expand().float()
    return torch.zeros(len(segment.group_sizes), outputs, device=segment.codes.device)
