"""Dense matrices in twelve bits a number, without loss: of floats with eight significant bits.

Most models are trained in bfloat16, and so are the heads and tables of quantised ones, whatever their files
call them. How the bits lie is told in native/lean.h.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import Unsupported
from . import library
from .blocks import TILE, Blocks
from .shelf import Shelf, shelved

LEAN_BITS = 12
BLOCK = 64
"""Inputs of a block."""

_KIND = 6

LISTED = 256
"""At most one number of so many is listed beside the codes: a number there takes eight bytes."""


def arrange_lean(
    data: Tensor, bias: Tensor | None, made: library.Library, threads: int, shelf: Shelf
) -> Blocks:
    """Numbers (outputs, inputs) of float32 as the C functions take them."""
    outputs, inputs = data.shape
    if data.dtype is not torch.float32 or outputs % TILE or inputs % BLOCK:
        raise Unsupported(f"lean matrices of whole tiles of {TILE} by {BLOCK} only")
    data, bias = data.contiguous(), None if bias is None else bias.float().contiguous()
    units, counts = torch.empty(outputs), torch.empty(outputs, dtype=torch.int32)
    shape = (data.data_ptr(), outputs, inputs)
    if made.look_lean(*shape, units.data_ptr(), counts.data_ptr(), threads):
        raise Unsupported("its dense numbers need more than eight significant bits")
    many = int(counts.sum())
    if many * LISTED > data.numel():
        raise Unsupported("too many of its dense numbers are far smaller than the largest")
    begins = F.pad(torch.cumsum(counts, 0), (1, 0)).int()
    units, begins = shelved(units, shelf), shelved(begins, shelf)
    listed, values = torch.empty(many, dtype=torch.int32), torch.empty(many)
    lean = library.Lean(units.data_ptr(), begins.data_ptr(), listed.data_ptr(), values.data_ptr())
    codes = shelf.take(data.numel() * LEAN_BITS // 8)
    made.repack_lean(*shape, ctypes.addressof(lean), codes.data_ptr(), threads)
    run = library.Run(
        codes=codes.data_ptr(),
        scales=library.Factors(kind=_KIND),
        bits=LEAN_BITS,
        blocks=inputs // BLOCK,
    )
    matrix = library.Matrix(
        runs=ctypes.addressof(run),
        bias=None if bias is None else bias.data_ptr(),
        lean=ctypes.addressof(lean),
        count=1,
        inputs=inputs,
        outputs=outputs,
        places=inputs,
    )
    return Blocks(inputs, outputs, matrix, (run, lean, codes, units, begins, listed, values, bias))
