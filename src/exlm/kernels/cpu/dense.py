"""Dense matrices in as few bits as hold their numbers exactly: 12 (BF12), else 16. Nothing is rounded.

Decoding waits for memory, and most files need no more: models are trained in bfloat16, and so are the heads
and embedding tables of quantised ones, whatever type their files name. Plain torch takes other matrices.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from . import bindings
from .arena import HugePageArena, copy_to_arena
from .bindings import KIND_BF12, KINDS
from .packed import KBLOCK, PackedMatrix

F16_BITS, BF12_BITS = 16, 12
F16_TILE = 8
"""Outputs are a multiple of it."""

BF12_BLOCK = 64
"""Inputs of BF12 matrices are a multiple of it."""

NUMBERS_PER_OUTLIER = 256
"""At most one number of so many may be an outlier: one takes eight bytes beside the codes (csrc/bf12.h)."""


def pack_bf12(
    data: Tensor, bias: Tensor | None, library: bindings.Library, threads: int, arena: HugePageArena
) -> PackedMatrix:
    """(outputs, inputs) float32 numbers of eight significant bits, as BF12."""
    outputs, inputs = data.shape
    if data.dtype is not torch.float32 or outputs % F16_TILE or inputs % BF12_BLOCK:
        raise Unsupported(f"its shape is no multiple of BF12 tiles of {F16_TILE} by {BF12_BLOCK}")
    data = data.contiguous()
    shape = data.data_ptr(), outputs, inputs
    units, counts = torch.empty(outputs), torch.empty(outputs, dtype=torch.int32)
    if library.bf12_plan(*shape, units.data_ptr(), counts.data_ptr(), threads):
        raise Unsupported("its dense numbers need more than eight significant bits")
    outliers = int(counts.sum())
    if outliers * NUMBERS_PER_OUTLIER > data.numel():
        raise Unsupported("too many of its dense numbers are far smaller than the largest")
    units = copy_to_arena(units, arena)
    begin = copy_to_arena(F.pad(torch.cumsum(counts, 0), (1, 0)).int(), arena)
    index, values = torch.empty(outliers, dtype=torch.int32), torch.empty(outliers)
    bf12 = bindings.Bf12(units.data_ptr(), begin.data_ptr(), index.data_ptr(), values.data_ptr())
    codes = arena.allocate(data.numel() * BF12_BITS // 8)
    library.bf12_pack(*shape, ctypes.addressof(bf12), codes.data_ptr(), threads)
    segment = bindings.Segment(
        codes=codes.data_ptr(),
        scales=bindings.FactorTable(kind=KIND_BF12),
        bits=BF12_BITS,
        packs=inputs // BF12_BLOCK,
    )
    return _float_matrix(inputs, outputs, segment, bias, bf12, (codes, units, begin, index, values))


def narrow(data: Tensor, library: bindings.Library, threads: int, arena: HugePageArena) -> Tensor:
    """(outputs, inputs) float32 numbers as float16 or bfloat16."""
    outputs, inputs = data.shape
    if data.dtype is not torch.float32 or outputs % F16_TILE or inputs % KBLOCK:
        raise Unsupported(f"its shape is no multiple of dense tiles of {F16_TILE} by {KBLOCK}")
    data = data.contiguous()
    memory = arena.allocate(2 * data.numel())
    for dtype in (torch.float16, torch.bfloat16):
        if not library.narrow(data.data_ptr(), data.numel(), KINDS[dtype], memory.data_ptr(), threads):
            return memory.view(dtype).view(outputs, inputs)
    raise Unsupported("its dense numbers need more than sixteen bits")


def pack_narrow(data: Tensor, bias: Tensor | None) -> PackedMatrix:
    """(outputs, inputs) float16 or bfloat16 as C takes it, in place."""
    outputs, inputs = data.shape
    segment = bindings.Segment(
        codes=data.data_ptr(),
        scales=bindings.FactorTable(kind=KINDS[data.dtype]),
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
        bias=None if bias is None else bias.data_ptr(),
        bf12=None if bf12 is None else ctypes.addressof(bf12),
        segment_count=1,
        inputs=inputs,
        outputs=outputs,
        k_padded=inputs,
    )
    return PackedMatrix(inputs, outputs, matrix, (segment, bf12, bias, *buffers))
