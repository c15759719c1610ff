"""Weights in the layouts that the C kernels multiply. No number is rounded.

The way of one weight from a file to a dot product:

    formats/*: codes (words, outputs), scales, zeros           formats/*: (outputs, inputs) numbers
        |  repack_panels, exlm_repack_panels: groups are            |  pack_dense: 12 bits a number (BF12),
        |  padded to kblocks of 16 k                                |  else 16, if they hold every number
        v                                                           v
    panels of 48 outputs (drawn in csrc/w_panels.h)            rows of outputs (drawn in csrc/bf12.h)
        |  exlm_linear, gemm_int8: activations become               |  exlm_linear, gemm_float: float32 FMA
        |  integers of 16 or 8 bits (csrc/exlm_cpu.c)               |
        v                                                           v
    y (rows, outputs) float32

The inputs of a quantised weight are numbered in three ways. A stored row is one input's codes, in the file's
order. k counts stored rows with the padding of groups between them: row_of_k gives the stored row at each k, -1
for padding. input_of_k gives the column of x there, which differs where the file is permuted (act-order).

A `PackedMatrix` holds the C struct of such a matrix (csrc/matrix.h) and the memory that it points to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from ...formats import DenseWeight, PackedWeight
from ...formats.host_buffers import HugePageArena
from ...formats.packed import KQuantScales, PlainScales, Scales, Segment
from ..interface import ActivationBits
from . import bindings
from .bindings import BF12_DTYPE, C_DTYPES, Library, address

KBLOCK = 16
PANEL_N, LAST_PANEL_N = 48, 32
"""Outputs of a panel, and of the last one or two, so that padding goes to a multiple of 32 only."""

MAX_SPAN = {16: 16, 8: 2}
"""By bits of an activation: kblocks whose products with 8-bit codes fit an int32 sum, or which share a scale."""

CODEBOOK_BITS = 4
"""Codes of this width may stand for any sixteen bytes: a byte shuffle looks them up (IQ4_NL, IQ4_XS)."""

F16_BITS, BF12_BITS = 16, 12
FLOAT_TILE_N = 8
"""Dense matrices have a multiple of this many outputs."""

BF12_BLOCK = 64
"""BF12 matrices have a multiple of this many inputs."""

NUMBERS_PER_OUTLIER = 256
"""At most one BF12 number in this many may be an outlier, which takes eight bytes beside the codes."""

_TABLE_PADDING = 16  # numbers that C may read past the end of a table


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix as C takes it, and the buffers that hold its memory."""

    in_features: int
    out_features: int
    struct: bindings.Matrix
    buffers: tuple[object, ...]

    @property
    def address(self) -> int:
        """Address of the struct."""
        return ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers if isinstance(buffer, Tensor))


@dataclass(frozen=True, eq=False)
class _PackedSegment:
    struct: bindings.Segment
    row_of_k: Tensor  # (k,) the segment's stored row at each k, -1 for padding
    buffers: tuple[Tensor, ...]


def repack_panels(
    weight: PackedWeight, library: Library, arena: HugePageArena, activation_bits: ActivationBits = 16
) -> PackedMatrix:
    """A quantised weight in panels; codes keep their width, and so do two-level scales.

    Its products take activations of so many bits.
    """
    if weight.dtype not in (torch.float16, torch.float32):
        raise Unsupported(f"its weights are rounded to {str(weight.dtype).removeprefix('torch.')}")
    segments: list[_PackedSegment] = []
    row_of_k: list[Tensor] = []
    row, k, spans = 0, 0, 0
    for stored in weight.segments:
        segment = _repack_segment(stored, library, arena, MAX_SPAN[activation_bits])
        segment.struct.first_k, segment.struct.first_span = k, spans
        row_of_k.append(torch.where(segment.row_of_k < 0, -1, segment.row_of_k + row))
        segments.append(segment)
        row, k, spans = (row + stored.in_features, k + len(segment.row_of_k), spans + segment.struct.span_count)
    input_of_k = _input_of_k(torch.cat(row_of_k), weight.perm, arena)
    structs = (bindings.Segment * len(segments))(*(segment.struct for segment in segments))
    bias = None if weight.bias is None else weight.bias.float().contiguous()
    matrix = bindings.Matrix(
        segments=ctypes.addressof(structs),
        input_of_k=address(input_of_k),
        bias=address(bias),
        segment_count=len(segments),
        inputs=weight.in_features,
        outputs=weight.out_features,
        k_padded=k,
        round_f16=int(weight.dtype is torch.float16),
        span_count=spans,
        act_bytes=activation_bits // 8,
    )
    buffers = (structs, input_of_k, bias, *(tensor for segment in segments for tensor in segment.buffers))
    return PackedMatrix(weight.in_features, weight.out_features, matrix, buffers)


def _repack_segment(segment: Segment, library: Library, arena: HugePageArena, max_span: int) -> _PackedSegment:
    bits = 8 if segment.bits == 7 else segment.bits
    outputs, pack_rows = segment.codes.shape[1], KBLOCK << (bits & 1)
    row_of_k, group_of_kblock = _pad_groups(segment.group_sizes, pack_rows)
    packs, stored = len(row_of_k) // pack_rows, segment.codes.contiguous()
    codes = arena.allocate(_round_up(outputs, LAST_PANEL_N) * len(row_of_k) * bits // 8)
    widths, target = (segment.bits, bits), (codes.data_ptr(), torch.get_num_threads())
    library.repack_panels(stored.data_ptr(), outputs, *widths, row_of_k.data_ptr(), packs, *target)
    codebook, offset = _codebook(segment)
    zero = segment.zero
    scales, scale_buffers = _factor_table(segment.scales, arena)
    minima, minimum_buffers = _factor_table(segment.minimum, arena)
    zeros, zero_buffers = _factor_table(PlainScales(zero) if isinstance(zero, Tensor) else None, arena)
    spans = arena.copy(_cut_spans(group_of_kblock, max_span))
    struct = bindings.Segment(
        codes=codes.data_ptr(),
        scales=scales,
        minima=minima,
        zeros=zeros,
        codebook=address(codebook),
        spans=spans.data_ptr(),
        bits=bits,
        packs=packs,
        groups=len(segment.group_sizes),
        zero=zero + offset if isinstance(zero, int) else 0,
        span_count=len(spans),
    )
    buffers = (codes, spans, *scale_buffers, *minimum_buffers, *zero_buffers)
    return _PackedSegment(struct, row_of_k, buffers if codebook is None else (*buffers, codebook))


def _pad_groups(group_sizes: Sequence[int], pack_rows: int) -> tuple[Tensor, Tensor]:
    """(stored row at each k or -1 for padding, group of each kblock): whole kblocks and a whole last pack."""
    sizes = torch.tensor(group_sizes)
    kblocks = -(-sizes // KBLOCK)
    group_of_kblock = torch.repeat_interleave(torch.arange(len(sizes)), kblocks)
    if any(size % KBLOCK for size in group_sizes):
        first_kblock = torch.cumsum(kblocks, 0) - kblocks
        in_group = (torch.arange(len(group_of_kblock)) - first_kblock[group_of_kblock])[:, None] * KBLOCK
        in_group = in_group + torch.arange(KBLOCK)
        stored_row = (torch.cumsum(sizes, 0) - sizes)[group_of_kblock, None] + in_group
        row_of_k = torch.where(in_group < sizes[group_of_kblock, None], stored_row, -1).flatten().int()
    else:
        row_of_k = torch.arange(sum(group_sizes), dtype=torch.int32)
    missing = -len(row_of_k) % pack_rows
    group_of_kblock = torch.cat((group_of_kblock, group_of_kblock[-1:].expand(missing // KBLOCK)))
    return F.pad(row_of_k, (0, missing), value=-1), group_of_kblock.int()


def _cut_spans(group_of_kblock: Tensor, max_span: int) -> Tensor:
    """(spans, 3) int32: the first kblock, the number of kblocks and the group of each GroupSpan."""
    sizes = torch.bincount(group_of_kblock)
    in_group = torch.arange(len(group_of_kblock)) - (torch.cumsum(sizes, 0) - sizes)[group_of_kblock]
    first = (in_group % max_span == 0).nonzero().flatten()
    kblocks = torch.diff(first, append=torch.tensor([len(group_of_kblock)]))
    return torch.stack((first, kblocks, group_of_kblock[first]), 1).int().contiguous()


def _codebook(segment: Segment) -> tuple[Tensor | None, int]:
    """((16,) uint8, the number of each 4-bit code; what was added to make them unsigned bytes)."""
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


def _factor_table(scales: Scales | None, arena: HugePageArena) -> tuple[bindings.FactorTable, tuple[Tensor, ...]]:
    """A (groups, outputs) table as C takes it, and the tensors that hold it; a NULL table for None."""
    if scales is None:
        return bindings.FactorTable(), ()
    if (
        isinstance(scales, KQuantScales)
        and scales.superblock_scales.dtype is torch.float16
        and (groups_per_super := _groups_per_super(scales.superblock_of_group))
    ):
        table, supers = (_to_panels(part, arena) for part in (scales.codes, scales.superblock_scales))
        factors = bindings.FactorTable(
            table=table.data_ptr(),
            super_scales=supers.data_ptr(),
            dtype=C_DTYPES[table.dtype],
            groups_per_super=groups_per_super,
            super_groups=scales.superblock_scales.shape[0],
        )
        return factors, (table, supers)
    expanded = scales.expand()
    table = _to_panels(expanded if expanded.dtype in C_DTYPES else expanded.float(), arena)
    return bindings.FactorTable(table=table.data_ptr(), dtype=C_DTYPES[table.dtype]), (table,)


def _groups_per_super(superblock_of_group: Tensor) -> int:
    """How many groups each superblock has, if it is the same for all but the last; else 0."""
    groups = int((superblock_of_group == 0).sum())
    expected = torch.arange(len(superblock_of_group)) // max(groups, 1)
    return groups if groups and torch.equal(superblock_of_group.long(), expected) else 0


def _to_panels(table: Tensor, arena: HugePageArena) -> Tensor:
    """(groups, outputs) → panel by panel (groups, 48 or 32), and padding behind."""
    groups, outputs = table.shape
    padded_outputs = _round_up(outputs, LAST_PANEL_N)
    padded = F.pad(table, (0, padded_outputs - outputs))
    out = arena.allocate((padded.numel() + _TABLE_PADDING) * table.itemsize).view(table.dtype)
    last_panels = -(padded_outputs // KBLOCK) % 3
    full = padded_outputs - last_panels * LAST_PANEL_N  # outputs in panels of 48
    for first, stop, width in ((0, full, PANEL_N), (full, padded_outputs, LAST_PANEL_N)):
        part = padded[:, first:stop].reshape(groups, -1, width).transpose(0, 1)
        out[first * groups : stop * groups].view(part.shape).copy_(part)
    return out


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _input_of_k(row_of_k: Tensor, perm: Tensor | None, arena: HugePageArena) -> Tensor | None:
    """The input at each k; None if each k is its own input."""
    if perm is not None:
        row_of_k = torch.where(row_of_k < 0, -1, perm.long()[row_of_k.clamp(min=0)])
    if torch.equal(row_of_k, torch.arange(len(row_of_k))):
        return None
    return arena.copy(row_of_k.int())


def pack_dense(weight: DenseWeight, library: Library, arena: HugePageArena) -> PackedMatrix:
    """A dense weight in 12 bits a number, else in 16, if they hold it exactly.

    Decoding waits for memory, and most files need no more bits: models are trained in bfloat16, and so are
    the heads and embedding tables of quantised ones, whatever type their files name.
    """
    if library.prefers_bf12:
        with suppress(Unsupported):
            return pack_bf12(weight.data, weight.bias, library, arena)
    return pack_16bit(cast_to_16bit(weight.data, library, arena), weight.bias)


def pack_bf12(data: Tensor, bias: Tensor | None, library: Library, arena: HugePageArena) -> PackedMatrix:
    """(outputs, inputs) float32 numbers of eight significant bits, as BF12."""
    outputs, inputs = data.shape
    if data.dtype is not torch.float32 or outputs % FLOAT_TILE_N or inputs % BF12_BLOCK:
        raise Unsupported(f"its shape is no multiple of BF12 tiles of {FLOAT_TILE_N} by {BF12_BLOCK}")
    data = data.contiguous()
    matrix, threads = (data.data_ptr(), outputs, inputs), torch.get_num_threads()
    units, counts = torch.empty(outputs), torch.empty(outputs, dtype=torch.int32)
    if library.bf12_plan(*matrix, units.data_ptr(), counts.data_ptr(), threads):
        raise Unsupported("its dense numbers need more than eight significant bits")
    outliers = int(counts.sum())
    if outliers * NUMBERS_PER_OUTLIER > data.numel():
        raise Unsupported("too many of its dense numbers are far smaller than the largest")
    units = arena.copy(units)
    begin = arena.copy(F.pad(torch.cumsum(counts, 0), (1, 0)).int())
    index, values = torch.empty(outliers, dtype=torch.int32), torch.empty(outliers)
    bf12 = bindings.Bf12(units.data_ptr(), begin.data_ptr(), index.data_ptr(), values.data_ptr())
    codes = arena.allocate(data.numel() * BF12_BITS // 8)
    library.bf12_pack(*matrix, ctypes.addressof(bf12), codes.data_ptr(), threads)
    segment = bindings.Segment(
        codes=codes.data_ptr(),
        scales=bindings.FactorTable(dtype=BF12_DTYPE),
        bits=BF12_BITS,
        packs=inputs // BF12_BLOCK,
    )
    return _float_matrix(inputs, outputs, segment, bias, bf12, (codes, units, begin, index, values))


def cast_to_16bit(data: Tensor, library: Library, arena: HugePageArena) -> Tensor:
    """(outputs, inputs) float32 numbers as float16 or bfloat16, whichever holds every one of them."""
    outputs, inputs = data.shape
    if data.dtype is not torch.float32 or outputs % FLOAT_TILE_N or inputs % KBLOCK:
        raise Unsupported(f"its shape is no multiple of dense tiles of {FLOAT_TILE_N} by {KBLOCK}")
    data = data.contiguous()
    memory, threads = arena.allocate(2 * data.numel()), torch.get_num_threads()
    for dtype in (torch.float16, torch.bfloat16):
        if not library.cast_16bit(data.data_ptr(), data.numel(), C_DTYPES[dtype], memory.data_ptr(), threads):
            return memory.view(dtype).view(outputs, inputs)
    raise Unsupported("its dense numbers need more than sixteen bits")


def pack_16bit(data: Tensor, bias: Tensor | None) -> PackedMatrix:
    """(outputs, inputs) float16 or bfloat16 as C takes it; the memory is `data`'s own."""
    outputs, inputs = data.shape
    segment = bindings.Segment(
        codes=data.data_ptr(),
        scales=bindings.FactorTable(dtype=C_DTYPES[data.dtype]),
        bits=F16_BITS,
        packs=inputs // KBLOCK,
    )
    return _float_matrix(inputs, outputs, segment, bias, None, (data,))


def _float_matrix(
    inputs: int,
    outputs: int,
    segment: bindings.Segment,
    bias: Tensor | None,
    bf12: bindings.Bf12 | None,
    buffers: tuple[Tensor, ...],
) -> PackedMatrix:
    bias = None if bias is None else bias.float().contiguous()
    matrix = bindings.Matrix(
        segments=ctypes.addressof(segment),
        bias=address(bias),
        bf12=None if bf12 is None else ctypes.addressof(bf12),
        segment_count=1,
        inputs=inputs,
        outputs=outputs,
        k_padded=inputs,
    )
    return PackedMatrix(inputs, outputs, matrix, (segment, bf12, bias, *buffers))
