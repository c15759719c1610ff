"""A packed weight, rearranged for processors: tiles of 16 outputs, blocks of 32 inputs, a run for each width.

The codes stay as small as they are; groups are filled up to whole blocks. How a block's bits lie is told
in native/matrix.h. Nothing is rounded here: the numbers are the stored ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import Unsupported
from ...formats.packed import PackedWeight, Segment
from ...formats.scales import Scales
from . import library

TILE = 16
BLOCK = 32


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix as the C functions take it, and the tensors that hold its memory."""

    in_features: int
    out_features: int
    matrix: library.Matrix
    held: tuple[object, ...]

    @property
    def address(self) -> int:
        """Where C finds it."""
        return ctypes.addressof(self.matrix)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.held if isinstance(part, Tensor))


@dataclass(frozen=True, eq=False)
class _Part:
    """One segment, rearranged."""

    run: library.Run
    places: Tensor  # (32 · blocks,) the stored row at each place, -1 for none
    held: tuple[Tensor, ...]


def arrange(weight: PackedWeight, made: library.Library, threads: int) -> Blocks:
    """The weight, rearranged by so many threads."""
    parts: list[_Part] = []
    sources: list[Tensor] = []
    first, block, group = 0, 0, 0
    for segment in weight.segments:
        part = _segment(segment, made, threads)
        part.run.first_block, part.run.first_group = block, group
        block, group = block + part.run.blocks, group + part.run.groups
        sources.append(torch.where(part.places < 0, -1, part.places + first))
        parts.append(part)
        first += segment.rows
    source = _source(torch.cat(sources), weight.order)
    runs = (library.Run * len(parts))(*(part.run for part in parts))
    bias = None if weight.bias is None else weight.bias.float().contiguous()
    matrix = library.Matrix(
        runs=ctypes.addressof(runs),
        source=_address(source),
        bias=_address(bias),
        count=len(parts),
        inputs=weight.in_features,
        outputs=weight.out_features,
        blocks=block,
        groups=group,
    )
    held = (runs, source, bias, *(tensor for part in parts for tensor in part.held))
    return Blocks(weight.in_features, weight.out_features, matrix, held)


def _segment(segment: Segment, made: library.Library, threads: int) -> _Part:
    fine = _is_fine(segment.sizes)
    places, spans = _places(segment.sizes, 16 if fine else BLOCK)
    owners = torch.repeat_interleave(torch.arange(len(spans)), spans)
    if fine:
        spans = torch.ones(len(places) // 16, dtype=torch.int32)
        owners = torch.cat((owners, owners[-1:]))[: len(spans)]  # a last half block of nothing
    book, bits, zero = _book(segment)
    tiles, blocks = -(-segment.codes.shape[1] // TILE), len(places) // BLOCK
    codes, out = segment.codes.contiguous(), torch.empty(tiles * blocks * bits * TILE, dtype=torch.int32)
    made.repack(
        *(codes.data_ptr(), codes.shape[1], segment.bits, places.data_ptr(), blocks, _address(book), bits),
        *(out.data_ptr(), threads),
    )
    pick = owners if fine else None
    scales, minima, zeros = _tables(segment, pick)
    run = library.Run(
        codes=out.data_ptr(),
        scales=scales.data_ptr(),
        minima=_address(minima),
        zeros=_address(zeros),
        spans=spans.data_ptr(),
        bits=bits,
        blocks=blocks,
        groups=len(spans),
        zero=zero,
        wide=int(scales.dtype is torch.float32),
        fine=int(fine),
    )
    held = (out, scales, spans, *(table for table in (minima, zeros) if table is not None))
    return _Part(run, places, held)


def _is_fine(sizes: Sequence[int]) -> bool:
    """Whether factors for each half block take less memory than groups filled up to whole blocks."""
    whole = sum(-(-size // BLOCK) * BLOCK for size in sizes)
    halves = sum(-(-size // 16) * 16 for size in sizes)
    return whole > halves * 1.1


def _places(sizes: Sequence[int], unit: int) -> tuple[Tensor, Tensor]:
    """The stored row at each place, every group filled up to whole units; and the units of each group."""
    rows = torch.tensor(sizes)
    units = -(-rows // unit)
    total = int(units.sum()) * unit
    starts = torch.cumsum(units * unit, 0) - units * unit
    place = torch.arange(total)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), units * unit)
    inside = place - starts[owner]
    stored = (torch.cumsum(rows, 0) - rows)[owner] + inside
    places = torch.where(inside < rows[owner], stored, -1).int()
    return torch.nn.functional.pad(places, (0, -total % BLOCK), value=-1), units.int()


def _book(segment: Segment) -> tuple[Tensor | None, int, int]:
    """What codes become (None: nothing else), in how many bits, and the zero point that all columns share."""
    zero = segment.zero if isinstance(segment.zero, int) else 0
    if segment.codebook is None:
        return None, segment.bits, zero
    values = segment.codebook.float()
    low, high = int(values.min()), int(values.max())
    if not torch.equal(values, values.round()) or high - low > 255:
        raise Unsupported("its codes stand for numbers that are not whole, or too far apart")
    return (values - low).to(torch.uint8), 8, zero - low


def _tables(segment: Segment, pick: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scales, minima and zero points, (tiles, groups, 16); the first two in float16 if both are that."""

    def rows(table: Tensor) -> Tensor:
        return _tiled(table if pick is None else table[pick])

    def floats(scales: Scales) -> Tensor:
        table = scales.expand()
        return table if table.dtype is torch.float16 else table.float()

    scales = floats(segment.scales)
    minima = None if segment.minimum is None else floats(segment.minimum)
    if minima is not None and minima.dtype is not scales.dtype:
        scales, minima = scales.float(), minima.float()
    zeros = rows(segment.zero) if isinstance(segment.zero, Tensor) else None
    return rows(scales), None if minima is None else rows(minima), zeros


def _tiled(table: Tensor) -> Tensor:
    """(groups, columns) → (tiles, groups, 16)."""
    groups, columns = table.shape
    padded = torch.nn.functional.pad(table, (0, -columns % TILE))
    return padded.view(groups, -1, TILE).transpose(0, 1).contiguous()


def _source(places: Tensor, order: Tensor | None) -> Tensor | None:
    """The input at each place; None if they are all there and in order."""
    if order is not None:
        places = torch.where(places < 0, -1, order.long()[places.clamp(min=0)])
    if torch.equal(places, torch.arange(len(places))):
        return None
    return places.int().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
