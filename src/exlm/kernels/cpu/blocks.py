"""A packed weight, rearranged for processors: outputs side by side, along them sixteen inputs at a time.

A run for each width. Codes stay as small as they are, and so do two-level factors; groups are filled up to
whole slots of sixteen. Plain weights lie in bands of 48 and 32 outputs where whole numbers are multiplied,
others in quads, filled up to tiles of eight: how the bits lie is told in native/bands.h and native/matrix.h.
Nothing is rounded here: the numbers are the stored ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import Unsupported
from ...formats.packed import PackedWeight, Segment
from ...formats.scales import Direct, Nested, Scales
from . import library
from .shelf import Shelf, shelved

SLOT = 16
QUAD = 4
TILE = 8
BAND, NARROW = 48, 32
"""Outputs of a band, and of the last one or two, so that no more than to a multiple of 32 is filled up."""
SPAN = 16
"""Slots whose sums of whole numbers fit 32 bits, whatever their codes."""
TABLE_BITS = 5
"""Codes up to this width are looked up; wider ones are computed, and cannot stand for anything else."""

_SLOTS = {2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 8: 1}  # the fewest whose codes fill whole bytes
_BEHIND = 16  # numbers that C may read behind a table
_KINDS = {torch.float16: 1, torch.float32: 2, torch.uint8: 3, torch.int8: 4}


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
    places: Tensor  # (places,) the stored row at each, -1 for none
    held: tuple[Tensor, ...]


def arrange(weight: PackedWeight, made: library.Library, threads: int, shelf: Shelf | None = None) -> Blocks:
    """The weight, rearranged by so many threads; onto the shelf, where there is one."""
    shelf = shelf or Shelf()
    rounded, banded = _is_rounded(weight.dtype), made.digits and is_plain(weight)
    parts: list[_Part] = []
    sources: list[Tensor] = []
    row, place, spans = 0, 0, 0
    for segment in weight.segments:
        part = (_banded if banded else _segment)(segment, made, threads, shelf)
        part.run.first, part.run.span = place, spans
        sources.append(torch.where(part.places < 0, -1, part.places + row))
        parts.append(part)
        row, place, spans = row + segment.rows, place + len(part.places), spans + part.run.count
    source = _source(torch.cat(sources), weight.order, shelf)
    runs = (library.Run * len(parts))(*(part.run for part in parts))
    bias = None if weight.bias is None else weight.bias.float().contiguous()
    matrix = library.Matrix(
        runs=ctypes.addressof(runs),
        source=_address(source),
        bias=_address(bias),
        count=len(parts),
        inputs=weight.in_features,
        outputs=weight.out_features,
        places=place,
        rounded=int(rounded),
        spans=spans,
    )
    held = (runs, source, bias, *(tensor for part in parts for tensor in part.held))
    return Blocks(weight.in_features, weight.out_features, matrix, held)


def _is_rounded(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float16, torch.float32):
        raise Unsupported(f"its weights are rounded to {str(dtype).removeprefix('torch.')}")
    return dtype is torch.float16


def is_plain(weight: PackedWeight) -> bool:
    """Whether codes stand for themselves, so that sums of them can be scaled."""
    return all(segment.codebook is None for segment in weight.segments)


def _banded(segment: Segment, made: library.Library, threads: int, shelf: Shelf) -> _Part:
    bits = 8 if segment.bits == 7 else segment.bits
    columns, block = segment.codes.shape[1], SLOT << (bits & 1)
    places, owners = _places(segment.sizes, block)
    blocks, codes = len(places) // block, segment.codes.contiguous()
    out = shelf.take(_padded(columns, NARROW) * len(places) * bits // 8)
    made.repack_bands(
        *(codes.data_ptr(), columns, segment.bits, bits, places.data_ptr(), blocks),
        *(out.data_ptr(), threads),
    )
    told, tables = _groups(segment, True, shelf)
    spans = shelved(_spans(owners), shelf)
    run = library.Run(
        codes=out.data_ptr(), spans=spans.data_ptr(), bits=bits, blocks=blocks, count=len(spans), **told
    )
    return _Part(run, places, (out, spans, *tables))


def _spans(owners: Tensor) -> Tensor:
    """(spans, 3) the first slot, the slots and the group of each."""
    sizes = torch.bincount(owners)
    inside = torch.arange(len(owners)) - (torch.cumsum(sizes, 0) - sizes)[owners]
    first = (inside % SPAN == 0).nonzero().flatten()
    slots = torch.diff(first, append=torch.tensor([len(owners)]))
    return torch.stack((first, slots, owners[first]), 1).int().contiguous()


def _segment(segment: Segment, made: library.Library, threads: int, shelf: Shelf) -> _Part:
    bits = 8 if segment.bits == 7 else segment.bits
    columns, block = segment.codes.shape[1], _SLOTS[bits] * SLOT
    places, owners = _places(segment.sizes, block)
    blocks, codes = len(places) // block, segment.codes.contiguous()
    out = shelf.take(_padded(columns, TILE) * len(places) * bits // 8)
    made.repack(
        *(codes.data_ptr(), columns, segment.bits, bits, places.data_ptr(), blocks),
        *(out.data_ptr(), threads),
    )
    told, tables = _groups(segment, False, shelf)
    book = _book(segment)
    run = library.Run(
        codes=out.data_ptr(), owners=owners.data_ptr(), book=_address(book), bits=bits, blocks=blocks, **told
    )
    return _Part(run, places, (out, owners, *tables, *(() if book is None else (book,))))


def _groups(segment: Segment, banded: bool, shelf: Shelf) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """What a run says of its groups, and the tensors that hold it."""
    zero = segment.zero
    scales, tables = _factors(segment.scales, banded, shelf)
    minima, more = _factors(segment.minimum, banded, shelf)
    zeros, most = _factors(Direct(zero) if isinstance(zero, Tensor) else None, banded, shelf)
    told = {"scales": scales, "minima": minima, "zeros": zeros, "groups": len(segment.sizes)}
    return {**told, "zero": zero if isinstance(zero, int) else 0}, (*tables, *more, *most)


def _places(sizes: Sequence[int], block: int) -> tuple[Tensor, Tensor]:
    """The stored row at each place, groups filled up to slots and all of it to blocks; each slot's group."""
    rows = torch.tensor(sizes)
    slots = -(-rows // SLOT)
    owners = torch.repeat_interleave(torch.arange(len(sizes)), slots)
    if any(size % SLOT for size in sizes):
        begins = torch.cumsum(slots, 0) - slots
        inside = (torch.arange(len(owners)) - begins[owners])[:, None] * SLOT + torch.arange(SLOT)
        stored = (torch.cumsum(rows, 0) - rows)[owners, None] + inside
        places = torch.where(inside < rows[owners, None], stored, -1).flatten().int()
    else:
        places = torch.arange(sum(sizes), dtype=torch.int32)
    missing = -len(places) % block
    owners = torch.cat((owners, owners[-1:].expand(missing // SLOT)))
    return torch.nn.functional.pad(places, (0, missing), value=-1), owners.int()


def _book(segment: Segment) -> Tensor | None:
    """(32,) what the lowest bits of a number stand for, the zero point that all share taken off."""
    if segment.bits > TABLE_BITS:
        if segment.codebook is not None:
            raise Unsupported(f"its codes of {segment.bits} bits stand for other numbers")
        return None
    count = 1 << segment.bits
    plain = torch.arange(count).float() if segment.codebook is None else segment.codebook.float()
    if isinstance(segment.zero, int):
        plain = plain - segment.zero
    return plain.repeat((1 << TABLE_BITS) // count).contiguous()


def _factors(scales: Scales | None, banded: bool, shelf: Shelf) -> tuple[library.Factors, tuple[Tensor, ...]]:
    """A table of (groups, columns) as C takes it, and the tensors that hold it."""
    if scales is None:
        return library.Factors(), ()
    if (
        isinstance(scales, Nested)
        and scales.supers.dtype is torch.float16
        and (each := _even(scales.parents))
    ):
        table, supers = (_side_by_side(part, banded, shelf) for part in (scales.codes, scales.supers))
        factors = library.Factors(
            table=table.data_ptr(),
            supers=supers.data_ptr(),
            kind=_KINDS[table.dtype],
            each=each,
            many=scales.supers.shape[0],
        )
        return factors, (table, supers)
    whole = scales.expand()
    table = _side_by_side(whole if whole.dtype in _KINDS else whole.float(), banded, shelf)
    return library.Factors(table=table.data_ptr(), kind=_KINDS[table.dtype]), (table,)


def _even(parents: Tensor) -> int:
    """How many groups each super-group has, if it is the same for all but the last; else 0."""
    each = int((parents == 0).sum())
    return each if each and torch.equal(parents.long(), torch.arange(len(parents)) // each) else 0


def _side_by_side(table: Tensor, banded: bool, shelf: Shelf) -> Tensor:
    """(groups, columns) → (quads, groups, 4) or, band by band, (groups, 48 or 32), with room behind."""
    groups, columns = table.shape
    whole = _padded(columns, NARROW if banded else TILE)
    padded = torch.nn.functional.pad(table, (0, whole - columns)) if whole > columns else table
    out = shelf.take((padded.numel() + _BEHIND) * table.itemsize).view(table.dtype)
    wide = whole - -(whole // SLOT) % 3 * NARROW  # columns in bands of three sides
    parts = [(0, wide, BAND), (wide, whole, NARROW)] if banded else [(0, whole, QUAD)]
    for first, stop, side in parts:
        part = padded[:, first:stop].reshape(groups, -1, side).transpose(0, 1)
        out[first * groups : stop * groups].view(part.shape).copy_(part)
    return out


def _padded(columns: int, whole: int) -> int:
    return -(-columns // whole) * whole


def _source(places: Tensor, order: Tensor | None, shelf: Shelf) -> Tensor | None:
    """The input at each place; None if they are all there and in order."""
    if order is not None:
        places = torch.where(places < 0, -1, order.long()[places.clamp(min=0)])
    if torch.equal(places, torch.arange(len(places))):
        return None
    return shelved(places.int(), shelf)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
