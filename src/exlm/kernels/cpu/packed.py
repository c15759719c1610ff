"""Repacking: from `formats.PackedWeight` to the panels that the C kernels multiply.

Codes keep their width, and so do two-level scales; groups are padded to kblocks of sixteen inputs. Nothing is
rounded. The layout is drawn in csrc/w_panels.h, the structs are those of csrc/matrix.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import Unsupported
from ...formats.packed import KQuantScales, PackedWeight, PlainScales, Scales, Segment
from . import bindings
from .arena import HugePageArena, copy_to_arena
from .bindings import KINDS

KBLOCK = 16
PANEL_N, NARROW_PANEL_N = 48, 32
"""Outputs of a panel, and of the last one or two, so that padding goes to a multiple of 32 only."""

MAX_SPAN = 16
"""kblocks whose products of 8-bit codes and 16-bit activations fit an int32 sum."""

CODEBOOK_BITS = 4
"""Codes of this width may stand for any sixteen bytes: a byte shuffle looks them up (IQ4_NL, IQ4_XS)."""

_TABLE_PADDING = 16  # numbers that C may read past the end of a table


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix as C takes it, and what holds its memory."""

    in_features: int
    out_features: int
    struct: bindings.Matrix
    buffers: tuple[object, ...]

    @property
    def address(self) -> int:
        """Of the struct."""
        return ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.buffers if isinstance(part, Tensor))


@dataclass(frozen=True, eq=False)
class _PackedSegment:
    struct: bindings.Segment
    row_of_k: Tensor  # (k,) the segment's stored row at each k, -1 for padding
    buffers: tuple[Tensor, ...]


def pack_matrix(
    weight: PackedWeight, library: bindings.Library, threads: int, arena: HugePageArena | None = None
) -> PackedMatrix:
    """The weight in panels, repacked by so many threads into the arena."""
    arena = arena or HugePageArena()
    if weight.dtype not in (torch.float16, torch.float32):
        raise Unsupported(f"its weights are rounded to {str(weight.dtype).removeprefix('torch.')}")
    parts: list[_PackedSegment] = []
    rows: list[Tensor] = []
    row, k, spans = 0, 0, 0
    for segment in weight.segments:
        part = _pack_segment(segment, library, threads, arena)
        part.struct.first_k, part.struct.first_span = k, spans
        rows.append(torch.where(part.row_of_k < 0, -1, part.row_of_k + row))
        parts.append(part)
        row, k, spans = row + segment.in_features, k + len(part.row_of_k), spans + part.struct.span_count
    input_of_k = _input_of_k(torch.cat(rows), weight.perm, arena)
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
        round_f16=int(weight.dtype is torch.float16),
        span_count=spans,
    )
    buffers = (segments, input_of_k, bias, *(tensor for part in parts for tensor in part.buffers))
    return PackedMatrix(weight.in_features, weight.out_features, matrix, buffers)


def _pack_segment(
    segment: Segment, library: bindings.Library, threads: int, arena: HugePageArena
) -> _PackedSegment:
    bits = 8 if segment.bits == 7 else segment.bits
    outputs, pack_rows = segment.codes.shape[1], KBLOCK << (bits & 1)
    row_of_k, group_of_kblock = _rows_of_k(segment.group_sizes, pack_rows)
    packs, stored = len(row_of_k) // pack_rows, segment.codes.contiguous()
    codes = arena.allocate(_pad(outputs, NARROW_PANEL_N) * len(row_of_k) * bits // 8)
    library.repack_panels(
        *(stored.data_ptr(), outputs, segment.bits, bits, row_of_k.data_ptr(), packs),
        *(codes.data_ptr(), threads),
    )
    codebook, offset = _codebook(segment)
    zero = segment.zero
    scales, scale_buffers = _factor_table(segment.scales, arena)
    minima, minimum_buffers = _factor_table(segment.minimum, arena)
    zeros, zero_buffers = _factor_table(PlainScales(zero) if isinstance(zero, Tensor) else None, arena)
    spans = copy_to_arena(_spans(group_of_kblock), arena)
    struct = bindings.Segment(
        codes=codes.data_ptr(),
        scales=scales,
        minima=minima,
        zeros=zeros,
        codebook=_address(codebook),
        spans=spans.data_ptr(),
        bits=bits,
        packs=packs,
        groups=len(segment.group_sizes),
        zero=zero + offset if isinstance(zero, int) else 0,
        span_count=len(spans),
    )
    buffers = (codes, spans, *scale_buffers, *minimum_buffers, *zero_buffers)
    return _PackedSegment(struct, row_of_k, buffers if codebook is None else (*buffers, codebook))


def _rows_of_k(sizes: Sequence[int], pack_rows: int) -> tuple[Tensor, Tensor]:
    """The stored row at each k, -1 for padding (groups to kblocks, the end to packs); each kblock's group."""
    rows = torch.tensor(sizes)
    kblocks = -(-rows // KBLOCK)
    group_of_kblock = torch.repeat_interleave(torch.arange(len(sizes)), kblocks)
    if any(size % KBLOCK for size in sizes):
        begins = torch.cumsum(kblocks, 0) - kblocks
        in_group = (torch.arange(len(group_of_kblock)) - begins[group_of_kblock])[:, None] * KBLOCK
        in_group = in_group + torch.arange(KBLOCK)
        stored = (torch.cumsum(rows, 0) - rows)[group_of_kblock, None] + in_group
        row_of_k = torch.where(in_group < rows[group_of_kblock, None], stored, -1).flatten().int()
    else:
        row_of_k = torch.arange(sum(sizes), dtype=torch.int32)
    missing = -len(row_of_k) % pack_rows
    group_of_kblock = torch.cat((group_of_kblock, group_of_kblock[-1:].expand(missing // KBLOCK)))
    return torch.nn.functional.pad(row_of_k, (0, missing), value=-1), group_of_kblock.int()


def _spans(group_of_kblock: Tensor) -> Tensor:
    """(spans, 3) int32: the first kblock, the number of kblocks and the group of each GroupSpan."""
    sizes = torch.bincount(group_of_kblock)
    in_group = torch.arange(len(group_of_kblock)) - (torch.cumsum(sizes, 0) - sizes)[group_of_kblock]
    first = (in_group % MAX_SPAN == 0).nonzero().flatten()
    kblocks = torch.diff(first, append=torch.tensor([len(group_of_kblock)]))
    return torch.stack((first, kblocks, group_of_kblock[first]), 1).int().contiguous()


def _codebook(segment: Segment) -> tuple[Tensor | None, int]:
    """(16,) uint8, what codes of 4 bits stand for, and what was added to make them unsigned bytes."""
    codebook = segment.codebook
    if codebook is None:
        return None, 0
    if segment.bits != CODEBOOK_BITS:
        raise Unsupported(f"its codes of {segment.bits} bits stand for other numbers")
    offset = 0 if isinstance(segment.zero, Tensor) or codebook.min() >= 0 else 128
    shifted = codebook.float() + offset
    if not torch.equal(shifted, shifted.clamp(0, 255).round()):
        raise Unsupported("its codes stand for numbers that are not whole ones of eight bits")
    return shifted.to(torch.uint8), offset


def _factor_table(
    scales: Scales | None, arena: HugePageArena
) -> tuple[bindings.FactorTable, tuple[Tensor, ...]]:
    """A table of (groups, outputs) as C takes it, and the tensors that hold it."""
    if scales is None:
        return bindings.FactorTable(), ()
    if (
        isinstance(scales, KQuantScales)
        and scales.superblock_scales.dtype is torch.float16
        and (each := _groups_per_super(scales.superblock_of_group))
    ):
        table, supers = (_in_panels(part, arena) for part in (scales.codes, scales.superblock_scales))
        factors = bindings.FactorTable(
            table=table.data_ptr(),
            super_scales=supers.data_ptr(),
            kind=KINDS[table.dtype],
            groups_per_super=each,
            super_groups=scales.superblock_scales.shape[0],
        )
        return factors, (table, supers)
    expanded = scales.expand()
    table = _in_panels(expanded if expanded.dtype in KINDS else expanded.float(), arena)
    return bindings.FactorTable(table=table.data_ptr(), kind=KINDS[table.dtype]), (table,)


def _groups_per_super(superblock_of_group: Tensor) -> int:
    """How many groups each superblock has, if it is the same for all but the last; else 0."""
    each = int((superblock_of_group == 0).sum())
    expected = torch.arange(len(superblock_of_group)) // max(each, 1)
    return each if each and torch.equal(superblock_of_group.long(), expected) else 0


def _in_panels(table: Tensor, arena: HugePageArena) -> Tensor:
    """(groups, outputs) → panel by panel (groups, 48 or 32), and padding behind."""
    groups, outputs = table.shape
    padded_outputs = _pad(outputs, NARROW_PANEL_N)
    padded = torch.nn.functional.pad(table, (0, padded_outputs - outputs))
    out = arena.allocate((padded.numel() + _TABLE_PADDING) * table.itemsize).view(table.dtype)
    narrow_panels = -(padded_outputs // KBLOCK) % 3
    wide = padded_outputs - narrow_panels * NARROW_PANEL_N  # outputs in panels of 48
    for first, stop, width in ((0, wide, PANEL_N), (wide, padded_outputs, NARROW_PANEL_N)):
        part = padded[:, first:stop].reshape(groups, -1, width).transpose(0, 1)
        out[first * groups : stop * groups].view(part.shape).copy_(part)
    return out


def _pad(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _input_of_k(row_of_k: Tensor, perm: Tensor | None, arena: HugePageArena) -> Tensor | None:
    """The input at each k; None if each k is its own input."""
    if perm is not None:
        row_of_k = torch.where(row_of_k < 0, -1, perm.long()[row_of_k.clamp(min=0)])
    if torch.equal(row_of_k, torch.arange(len(row_of_k))):
        return None
    return copy_to_arena(row_of_k.int(), arena)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
