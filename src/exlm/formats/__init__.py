"""Defines what the stored bits of a matrix mean, for every supported format.

It takes the tensors of one matrix (or the bytes of a GGUF tensor), checks them, and gives a `Weight`:
`PackedWeight` for quantised formats, `DenseWeight` for plain floats; `dequantize()` in plain torch is the
oracle of every kernel. It reads no files: `checkpoint` does. Every package above it, kernels included, may
import it.
"""

from . import awq, exl2, gptq
from .matrix_format import DENSE, MatrixFormat
from .packed import DenseWeight, Exl2Scales, KQuantScales, PackedWeight, PlainScales, Range, Scales, Segment, Weight

__all__ = [
    "DENSE",
    "FORMATS",
    "DenseWeight",
    "Exl2Scales",
    "KQuantScales",
    "MatrixFormat",
    "PackedWeight",
    "PlainScales",
    "Range",
    "Scales",
    "Segment",
    "Weight",
]

FORMATS: tuple[MatrixFormat, ...] = (
    exl2.FORMAT,
    gptq.FORMAT,
    awq.FORMAT,
    MatrixFormat("EXL3", "trellis"),
    MatrixFormat("compressed-tensors", "weight_packed"),
    DENSE,
)
"""The formats of matrices in safetensors files, in the order in which they are looked for.

GGUF is not among them: its files name the type of each tensor, so nothing is detected.
"""
