"""Dense matrices in twelve bits a number, without loss: of floats with eight significant bits.

Most models are trained in bfloat16, and so are the heads and tables of quantised ones, whatever their files
call them. How the bits lie is told in csrc/bf12.h.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from . import bindings
from .arena import HugePageArena, copy_to_arena
from .packed import OUT_TILE, PackedMatrix

BF12_BITS = 12
BLOCK = 64
"""Inputs of a block."""

_KIND = 6

NUMBERS_PER_OUTLIER = 256
"""At most one number of so many is listed beside the codes: a number there takes eight bytes."""


def pack_bf12(
    data: Tensor, bias: Tensor | None, library: bindings.Library, threads: int, arena: HugePageArena
) -> PackedMatrix:
    """Numbers (outputs, inputs) of float32 as the C functions take them."""
    outputs, inputs = data.shape
    if data.dtype is not torch.float32 or outputs % OUT_TILE or inputs % BLOCK:
        raise Unsupported(f"lean matrices of whole tiles of {OUT_TILE} by {BLOCK} only")
    data, bias = data.contiguous(), None if bias is None else bias.float().contiguous()
    units, counts = torch.empty(outputs), torch.empty(outputs, dtype=torch.int32)
    shape = (data.data_ptr(), outputs, inputs)
    if library.bf12_plan(*shape, units.data_ptr(), counts.data_ptr(), threads):
        raise Unsupported("its dense numbers need more than eight significant bits")
    many = int(counts.sum())
    if many * NUMBERS_PER_OUTLIER > data.numel():
        raise Unsupported("too many of its dense numbers are far smaller than the largest")
    begins = F.pad(torch.cumsum(counts, 0), (1, 0)).int()
    units, begins = copy_to_arena(units, arena), copy_to_arena(begins, arena)
    listed, values = torch.empty(many, dtype=torch.int32), torch.empty(many)
    lean = bindings.Bf12(units.data_ptr(), begins.data_ptr(), listed.data_ptr(), values.data_ptr())
    codes = arena.allocate(data.numel() * BF12_BITS // 8)
    library.bf12_pack(*shape, ctypes.addressof(lean), codes.data_ptr(), threads)
    run = bindings.Segment(
        codes=codes.data_ptr(),
        scales=bindings.FactorTable(kind=_KIND),
        bits=BF12_BITS,
        packs=inputs // BLOCK,
    )
    matrix = bindings.Matrix(
        segments=ctypes.addressof(run),
        bias=None if bias is None else bias.data_ptr(),
        bf12=ctypes.addressof(lean),
        segment_count=1,
        inputs=inputs,
        outputs=outputs,
        k_padded=inputs,
    )
    return PackedMatrix(inputs, outputs, matrix, (run, lean, codes, units, begins, listed, values, bias))
