"""A packed weight, rearranged for processors: outputs side by side, along them sixteen inputs at a time.

A run for each width. Codes stay as small as they are, and so do two-level factors; groups are filled up to
whole slots of sixteen. Plain weights lie in bands of 48 and 32 outputs where whole numbers are multiplied,
others in quads, filled up to tiles of eight: how the bits lie is told in csrc/w_panels.h and csrc/packed.h.
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
from ...formats.scales import KQuantScales, PlainScales, Scales
from . import bindings
from .arena import HugePageArena, copy_to_arena

KBLOCK = 16
OUT_TILE = 8
PANEL_N, NARROW_PANEL_N = 48, 32
"""Outputs of a band, and of the last one or two, so that no more than to a multiple of 32 is filled up."""
MAX_SPAN = 16
"""Slots whose sums of whole numbers fit 32 bits, whatever their codes."""
CODEBOOK_BITS = 4
"""Codes of this width may stand for any bytes: a shuffle of sixteen bytes looks them up."""

_TABLE_PADDING = 16  # numbers that C may read behind a table
_KINDS = {torch.float16: 1, torch.float32: 2, torch.uint8: 3, torch.int8: 4}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix as the C functions take it, and the tensors that hold its memory."""

    in_features: int
    out_features: int
    struct: bindings.Matrix
    buffers: tuple[object, ...]

    @property
    def address(self) -> int:
        """Where C finds it."""
        return ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.buffers if isinstance(part, Tensor))


@dataclass(frozen=True, eq=False)
class _PackedSegment:
    """One segment, rearranged."""

    struct: bindings.Segment
    row_of_k: Tensor  # (places,) the stored row at each, -1 for none
    buffers: tuple[Tensor, ...]


def pack_matrix(
    weight: PackedWeight, library: bindings.Library, threads: int, arena: HugePageArena | None = None
) -> PackedMatrix:
    """The weight, rearranged by so many threads; onto the arena, where there is one."""
    arena = arena or HugePageArena()
    round_f16 = _rounds_to_f16(weight.dtype)
    parts: list[_PackedSegment] = []
    inputs: list[Tensor] = []
    row, k, spans = 0, 0, 0
    for segment in weight.segments:
        part = _pack_panels(segment, library, threads, arena)
        part.struct.first_k, part.struct.first_span = k, spans
        inputs.append(torch.where(part.row_of_k < 0, -1, part.row_of_k + row))
        parts.append(part)
        row, k, spans = row + segment.in_features, k + len(part.row_of_k), spans + part.struct.span_count
    input_of_k = _input_of_k(torch.cat(inputs), weight.perm, arena)
    segments = (bindings.Segment * len(parts))(*(part.struct for part in parts))
    bias = None if weight.bias is None else weight.bias.float().contiguous()
    matrix = bindings.Matrix(
        segments=ctypes.addressof(segments),
        input_of_k=_address(input_of_k),
        bias=_address(bias),
        segment_count=len(parts),
        inputs=weight.in_features,
        outputs=weight.out_features,
        k_padded=k,
        round_f16=int(round_f16),
        span_count=spans,
    )
    buffers = (segments, input_of_k, bias, *(tensor for part in parts for tensor in part.buffers))
    return PackedMatrix(weight.in_features, weight.out_features, matrix, buffers)


def _rounds_to_f16(dtype: torch.dtype) -> bool:
    if dtype not in (torch.float16, torch.float32):
        raise Unsupported(f"its weights are rounded to {str(dtype).removeprefix('torch.')}")
    return dtype is torch.float16


def _pack_panels(
    segment: Segment, library: bindings.Library, threads: int, arena: HugePageArena
) -> _PackedSegment:
    bits = 8 if segment.bits == 7 else segment.bits
    columns, block = segment.codes.shape[1], KBLOCK << (bits & 1)
    places, owners = _rows_of_k(segment.group_sizes, block)
    blocks, codes = len(places) // block, segment.codes.contiguous()
    out = arena.allocate(_padded(columns, NARROW_PANEL_N) * len(places) * bits // 8)
    library.repack_panels(
        *(codes.data_ptr(), columns, segment.bits, bits, places.data_ptr(), blocks),
        *(out.data_ptr(), threads),
    )
    book, offset = _codebook(segment)
    told, tables = _groups(segment, offset, arena)
    spans = copy_to_arena(_spans(owners), arena)
    run = bindings.Segment(
        codes=out.data_ptr(),
        codebook=_address(book),
        spans=spans.data_ptr(),
        bits=bits,
        packs=blocks,
        span_count=len(spans),
        **told,
    )
    return _PackedSegment(run, places, (out, spans, *tables, *(() if book is None else (book,))))


def _spans(owners: Tensor) -> Tensor:
    """(spans, 3) the first slot, the slots and the group of each."""
    sizes = torch.bincount(owners)
    inside = torch.arange(len(owners)) - (torch.cumsum(sizes, 0) - sizes)[owners]
    first = (inside % MAX_SPAN == 0).nonzero().flatten()
    slots = torch.diff(first, append=torch.tensor([len(owners)]))
    return torch.stack((first, slots, owners[first]), 1).int().contiguous()


def _groups(segment: Segment, offset: int, arena: HugePageArena) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """What a run says of its groups, and the tensors that hold it."""
    zero = segment.zero
    scales, tables = _factor_table(segment.scales, arena)
    minima, more = _factor_table(segment.minimum, arena)
    zeros, most = _factor_table(PlainScales(zero) if isinstance(zero, Tensor) else None, arena)
    told = {"scales": scales, "minima": minima, "zeros": zeros, "groups": len(segment.group_sizes)}
    return {**told, "zero": zero + offset if isinstance(zero, int) else 0}, (*tables, *more, *most)


def _rows_of_k(sizes: Sequence[int], block: int) -> tuple[Tensor, Tensor]:
    """The stored row at each place, groups filled up to slots and all of it to blocks; each slot's group."""
    rows = torch.tensor(sizes)
    slots = -(-rows // KBLOCK)
    owners = torch.repeat_interleave(torch.arange(len(sizes)), slots)
    if any(size % KBLOCK for size in sizes):
        begins = torch.cumsum(slots, 0) - slots
        inside = (torch.arange(len(owners)) - begins[owners])[:, None] * KBLOCK + torch.arange(KBLOCK)
        stored = (torch.cumsum(rows, 0) - rows)[owners, None] + inside
        places = torch.where(inside < rows[owners, None], stored, -1).flatten().int()
    else:
        places = torch.arange(sum(sizes), dtype=torch.int32)
    missing = -len(places) % block
    owners = torch.cat((owners, owners[-1:].expand(missing // KBLOCK)))
    return torch.nn.functional.pad(places, (0, missing), value=-1), owners.int()


def _codebook(segment: Segment) -> tuple[Tensor | None, int]:
    """(16,) uint8, what codes of 4 bits stand for, and what was added to make them unsigned bytes."""
    book = segment.codebook
    if book is None:
        return None, 0
    if segment.bits != CODEBOOK_BITS:
        raise Unsupported(f"its codes of {segment.bits} bits stand for other numbers")
    offset = 0 if isinstance(segment.zero, Tensor) or book.min() >= 0 else 128
    shifted = book.float() + offset
    if not torch.equal(shifted, shifted.clamp(0, 255).round()):
        raise Unsupported("its codes stand for numbers that are not whole ones of eight bits")
    return shifted.to(torch.uint8), offset


def _factor_table(
    scales: Scales | None, arena: HugePageArena
) -> tuple[bindings.FactorTable, tuple[Tensor, ...]]:
    """A table of (groups, columns) as C takes it, and the tensors that hold it."""
    if scales is None:
        return bindings.FactorTable(), ()
    if (
        isinstance(scales, KQuantScales)
        and scales.superblock_scales.dtype is torch.float16
        and (each := _groups_per_super(scales.superblock_of_group))
    ):
        table, supers = (_interleaved(part, arena) for part in (scales.codes, scales.superblock_scales))
        factors = bindings.FactorTable(
            table=table.data_ptr(),
            super_scales=supers.data_ptr(),
            kind=_KINDS[table.dtype],
            groups_per_super=each,
            super_groups=scales.superblock_scales.shape[0],
        )
        return factors, (table, supers)
    whole = scales.expand()
    table = _interleaved(whole if whole.dtype in _KINDS else whole.float(), arena)
    return bindings.FactorTable(table=table.data_ptr(), kind=_KINDS[table.dtype]), (table,)


def _groups_per_super(parents: Tensor) -> int:
    """How many groups each super-group has, if it is the same for all but the last; else 0."""
    each = int((parents == 0).sum())
    return each if each and torch.equal(parents.long(), torch.arange(len(parents)) // each) else 0


def _interleaved(table: Tensor, arena: HugePageArena) -> Tensor:
    """(groups, columns) → band by band, (groups, 48 or 32), with room behind."""
    groups, columns = table.shape
    whole = _padded(columns, NARROW_PANEL_N)
    padded = torch.nn.functional.pad(table, (0, whole - columns)) if whole > columns else table
    out = arena.allocate((padded.numel() + _TABLE_PADDING) * table.itemsize).view(table.dtype)
    wide = whole - -(whole // KBLOCK) % 3 * NARROW_PANEL_N  # columns in bands of three sides
    parts = [(0, wide, PANEL_N), (wide, whole, NARROW_PANEL_N)]
    for first, stop, side in parts:
        part = padded[:, first:stop].reshape(groups, -1, side).transpose(0, 1)
        out[first * groups : stop * groups].view(part.shape).copy_(part)
    return out


def _padded(columns: int, whole: int) -> int:
    return -(-columns // whole) * whole


def _input_of_k(places: Tensor, order: Tensor | None, arena: HugePageArena) -> Tensor | None:
    """The input at each place; None if they are all there and in order."""
    if order is not None:
        places = torch.where(places < 0, -1, order.long()[places.clamp(min=0)])
    if torch.equal(places, torch.arange(len(places))):
        return None
    return copy_to_arena(places.int(), arena)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
