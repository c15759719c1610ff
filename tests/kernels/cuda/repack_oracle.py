"""Repacking in torch, and the way back: what repack.cu must produce, and what tiles mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from exlm.formats import PackedWeight
from exlm.formats.packed import Segment, unpack
from exlm.kernels.cuda import repack as cuda
from exlm.kernels.cuda.repack import MAX_F16, RepackJob
from exlm.kernels.cuda.weight_tile import BIT_PLANES, TILE_K, TILE_N, MmaWeight, TileLayout, num_digits


def repack(weight: PackedWeight) -> MmaWeight:
    """As the kernels repack, on any device."""
    return cuda.repack(weight, fill_tiles)


def fill_tiles(jobs: Sequence[RepackJob]) -> None:
    """Codes, then tables of scales, zero points and minimums."""
    for job in jobs:
        code_bytes = 256 * job.layout.bits
        job.tiles[..., :code_bytes] = _code_bytes(job)
        job.tiles[..., code_bytes:] = _table_bytes(job)


def _table_bytes(job: RepackJob) -> Tensor:
    """(n_tiles, k_blocks, digits, bytes)."""
    layout, segments, k_blocks, groups = job.layout, job.segments, job.k_blocks, job.num_groups
    device, outputs = segments[0].codes.device, job.outputs
    sizes = [size for segment in segments for size in segment.group_sizes]
    repeats = torch.tensor([-(-size * groups // TILE_K) for size in sizes], device=device)
    radix_powers = torch.tensor([float(1 << layout.bits * digit) for digit in range(job.num_digits)], device=device)

    def table(values: Sequence[Tensor], factors: Tensor) -> Tensor:
        rows = torch.cat([one.float() for one in values]).repeat_interleave(repeats, 0)
        rows = F.pad(rows, (0, -outputs % TILE_N, 0, k_blocks * groups - len(rows)))
        grid = rows.view(k_blocks, 1, groups, -1, 2, 8) * factors.view(1, -1, 1, 1, 1, 1)
        if float(grid.abs().max()) > MAX_F16:
            raise job.overflow()
        entries = grid.half().permute(3, 0, 1, 2, 5, 4)  # n tile, k block, digit, group, g, output g or g + 8
        return entries.reshape(len(entries), k_blocks, job.num_digits, -1).contiguous().view(torch.uint8)

    tables = [table([one.scales.expand().float() * job.factor for one in segments], radix_powers)]
    lowest_digit = (radix_powers == 1).float()
    if layout.zero_points == "table":
        tables.append(table([-_zeros(one, outputs) for one in segments], lowest_digit))
    if layout.has_mins:
        tables.append(table([-_minima(one, outputs) * job.factor for one in segments], lowest_digit))
    return torch.cat(tables, -1)


def _code_bytes(job: RepackJob) -> Tensor:
    """(n_tiles, k_blocks, digits, bytes)."""
    bits, signed = job.layout.bits, job.layout.zero_points == "half"
    digits = []
    for segment in job.segments:
        codes = unpack(segment.codes, segment.bits, segment.in_features)
        digits.append(torch.stack(_digits(codes, segment.bits, bits, signed)))
    every = torch.cat(digits, 1)
    every = F.pad(every, (0, -every.shape[2] % TILE_N, 0, -every.shape[1] % TILE_K))
    made = []
    for digit in every:
        lanes, low, planes = to_fragments(digit), 0, []
        for plane_bits in BIT_PLANES[bits]:
            planes.append(pack_plane((lanes >> low) & ((1 << plane_bits) - 1), plane_bits))
            low += plane_bits
        made.append(torch.cat(planes, -1))
    return torch.stack(made, 2)


def _digits(codes: Tensor, bits: int, tile_bits: int, signed: bool) -> list[Tensor]:
    """The lowest first; signed digits are stored half a range too high, as codes are."""
    rest, out = codes.to(torch.int16), []
    half = 1 << (tile_bits - 1) if signed else 0
    if signed:
        rest = rest - (1 << (bits - 1))
    for _ in range(num_digits(bits, tile_bits, signed)):
        out.append(((rest + half) & ((1 << tile_bits) - 1)).to(torch.uint8))
        rest = (rest + half) >> tile_bits
    return out


def _zeros(segment: Segment, outputs: int) -> Tensor:
    if isinstance(segment.zero, Tensor):
        return segment.zero.float()
    return torch.full((len(segment.group_sizes), outputs), float(segment.zero), device=segment.codes.device)


def _minima(segment: Segment, outputs: int) -> Tensor:
    if segment.minimum is not None:
        return segment.minimum.expand().float()
    return torch.zeros(len(segment.group_sizes), outputs, device=segment.codes.device)


# -- fragment order --------------------------------------------------------------------------------


def to_fragments(rows: Tensor) -> Tensor:
    """(inputs, outputs) → (n tile, k block, lane, k16 step, A register, 2)."""
    # An input is (k block, step, c, k half, pair), an output (n tile, row half, g); a register is (k half, row half).
    shape = (rows.shape[0] // TILE_K, 8, 4, 2, 2, rows.shape[1] // TILE_N, 2, 8)
    lanes = rows.reshape(shape).permute(5, 0, 7, 2, 1, 3, 6, 4)  # n tile, k block, g, c, step, k half, row half, pair
    return lanes.reshape(shape[5], shape[0], 32, 8, 4, 2)


def from_fragments(lanes: Tensor) -> Tensor:
    """The way back, to (outputs, inputs)."""
    n_tiles, k_blocks = lanes.shape[:2]
    parts = lanes.view(n_tiles, k_blocks, 8, 4, 8, 2, 2, 2)  # n tile, k block, g, c, step, k half, row half, pair
    return parts.permute(0, 6, 2, 1, 4, 3, 5, 7).reshape(n_tiles * TILE_N, k_blocks * TILE_K)


def pack_plane(lanes: Tensor, bits: int) -> Tensor:
    """Bits of codes → (n tile, k block, 256 · bits) uint8: the words of a bit plane, as weight_tile.h draws them."""
    n_tiles, k_blocks = lanes.shape[:2]
    lane_words = 2 * bits
    fields = lanes.reshape(n_tiles, k_blocks, 32, lane_words, 16 // bits, 2)
    words = torch.zeros(fields.shape[:4], dtype=torch.int32, device=lanes.device)
    for field in range(16 // bits):
        for pair in range(2):
            words |= fields[..., field, pair].to(torch.int32) << (bits * field + 16 * pair)
    chunks = words.view(n_tiles, k_blocks, 32, -1, min(4, lane_words)).transpose(2, 3).contiguous()
    return chunks.view(torch.uint8).flatten(2)


def unpack_plane(data: Tensor, bits: int) -> Tensor:
    """The way back, to (n tile, k block, lane, k16 step, A register, 2) int32."""
    n_tiles, k_blocks = data.shape[:2]
    chunks = data.contiguous().view(torch.int32).view(n_tiles, k_blocks, -1, 32, min(4, 2 * bits))
    words = chunks.transpose(2, 3).flatten(3)
    shifts = torch.tensor([[bits * field + 16 * pair for pair in range(2)] for field in range(16 // bits)])
    numbers = (words[..., None, None] >> shifts.to(words.device)) & ((1 << bits) - 1)
    return numbers.reshape(n_tiles, k_blocks, 32, 8, 4, 2)


# -- what tiles mean -------------------------------------------------------------------------------


def expand(weight: MmaWeight) -> Tensor:
    """(outputs, packed inputs) float16, as the kernels dequantise."""
    parts = []
    for region, fine in ((weight.fine, True), (weight.main, False)):
        at = 0
        for span in region.spans:
            tiles = region.tiles[:, at : at + span.num_digits * span.k_blocks]
            grid = tiles.view(len(tiles), span.k_blocks, span.num_digits, -1)
            parts.append(_expand_tiles(grid, weight.layout, fine))
            at += span.num_digits * span.k_blocks
    return torch.cat(parts, 1)[: weight.out_features]


def _expand_tiles(tiles: Tensor, layout: TileLayout, fine: bool) -> Tensor:
    """(n_tiles, k_blocks, digits, bytes) → (outputs, inputs)."""
    groups = layout.num_groups(fine)
    total = torch.zeros(1, dtype=torch.float64, device=tiles.device)
    for digit in range(tiles.shape[2]):
        data = tiles[:, :, digit]
        codes, at, low = torch.zeros(1, dtype=torch.int32, device=data.device), 0, 0
        for bits in BIT_PLANES[layout.bits]:
            codes = codes | unpack_plane(data[..., at : at + 256 * bits], bits) << low
            at, low = at + 256 * bits, low + bits
        tables = data[..., at:].contiguous().view(torch.float16).chunk(layout.num_tables, -1)
        scale, *others = (_broadcast_table(table, groups).double() for table in tables)
        value = codes.double()
        if layout.zero_points == "half":
            value -= 1 << (layout.bits - 1)
        elif layout.zero_points == "table":
            value += others.pop(0)
        total = total + value * scale
        if layout.has_mins:
            total = total + others.pop(0)
    return from_fragments(total.half())


def _broadcast_table(table: Tensor, groups: int) -> Tensor:
    """A table's number for every code: (n tile, k block, lane, k16 step, A register, 1)."""
    n_tiles, k_blocks = table.shape[:2]
    grid = table.reshape(n_tiles, k_blocks, groups, 8, 2).repeat_interleave(8 // groups, 2)
    lanes = grid.transpose(2, 3)[:, :, :, None, :, None, :].expand(-1, -1, -1, 4, -1, 2, -1)
    return lanes.reshape(n_tiles, k_blocks, 32, 8, 4, 1)
