"""Dense matrices in sixteen bits: most files have no more, and a processor waits for memory.

Nothing is rounded: numbers that need all of float32 are left to plain torch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...errors import Unsupported
from . import bindings
from .arena import HugePageArena
from .packed import KBLOCK, OUT_TILE, PackedMatrix

F16_BITS = 16
_KINDS = {torch.float16: 1, torch.bfloat16: 5}


def narrow(data: Tensor, library: bindings.Library, threads: int, arena: HugePageArena) -> Tensor:
    """The same numbers, (outputs, inputs), as float16 or bfloat16."""
    outputs, inputs = data.shape
    if data.dtype is not torch.float32 or outputs % OUT_TILE or inputs % KBLOCK:
        raise Unsupported(f"dense matrices of whole tiles of {OUT_TILE} by {KBLOCK} only")
    data = data.contiguous()
    memory = arena.allocate(2 * data.numel())
    for dtype, kind in _KINDS.items():
        if not library.narrow(data.data_ptr(), data.numel(), kind, memory.data_ptr(), threads):
            return memory.view(dtype).view(outputs, inputs)
    raise Unsupported("its dense numbers need more than sixteen bits")


def pack_narrow(data: Tensor, bias: Tensor | None) -> PackedMatrix:
    """Sixteen-bit floats as the C functions take them, where they lie."""
    outputs, inputs = data.shape
    bias = None if bias is None else bias.float().contiguous()
    run = bindings.Segment(
        codes=data.data_ptr(),
        scales=bindings.FactorTable(kind=_KINDS[data.dtype]),
        bits=F16_BITS,
        packs=inputs // KBLOCK,
    )
    matrix = bindings.Matrix(
        segments=ctypes.addressof(run),
        bias=None if bias is None else bias.data_ptr(),
        segment_count=1,
        inputs=inputs,
        outputs=outputs,
        k_padded=inputs,
    )
    return PackedMatrix(inputs, outputs, matrix, (run, data, bias))
