"""Dense matrices in sixteen bits: most files have no more, and a processor waits for memory.

Nothing is rounded: numbers that need all of float32 are left to plain torch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...errors import Unsupported
from . import library
from .blocks import SLOT, TILE, Blocks
from .shelf import Shelf

FLOAT_BITS = 16
_KINDS = {torch.float16: 1, torch.bfloat16: 5}


def narrowed(data: Tensor, made: library.Library, threads: int, shelf: Shelf) -> Tensor:
    """The same numbers, (outputs, inputs), as float16 or bfloat16."""
    outputs, inputs = data.shape
    if data.dtype is not torch.float32 or outputs % TILE or inputs % SLOT:
        raise Unsupported(f"dense matrices of whole tiles of {TILE} by {SLOT} only")
    data = data.contiguous()
    memory = shelf.take(2 * data.numel())
    for dtype, kind in _KINDS.items():
        if not made.narrow(data.data_ptr(), data.numel(), kind, memory.data_ptr(), threads):
            return memory.view(dtype).view(outputs, inputs)
    raise Unsupported("its dense numbers need more than sixteen bits")


def arrange_floats(data: Tensor, bias: Tensor | None) -> Blocks:
    """Sixteen-bit floats as the C functions take them, where they lie."""
    outputs, inputs = data.shape
    bias = None if bias is None else bias.float().contiguous()
    run = library.Run(
        codes=data.data_ptr(),
        scales=library.Factors(kind=_KINDS[data.dtype]),
        bits=FLOAT_BITS,
        blocks=inputs // SLOT,
    )
    matrix = library.Matrix(
        runs=ctypes.addressof(run),
        bias=None if bias is None else bias.data_ptr(),
        count=1,
        inputs=inputs,
        outputs=outputs,
        places=inputs,
    )
    return Blocks(inputs, outputs, matrix, (run, data, bias))
