"""Defines what the stored bits of a matrix mean, for every supported format.

It takes the tensors of one matrix (or the bytes of a GGUF tensor), checks them, and gives a `Weight`:
`PackedWeight` for quantised formats, `DenseWeight` for plain floats; `dequantize()` in plain torch is the
oracle of every kernel. It reads no files: `checkpoint` does. Every package above it, kernels included, may
import it.
"""

from .packed import Exl2Scales, KQuantScales, PackedWeight, PlainScales, Scales, Segment
from .weight import DenseWeight, Range, Weight

__all__ = [
    "DenseWeight",
    "Exl2Scales",
    "KQuantScales",
    "PackedWeight",
    "PlainScales",
    "Range",
    "Scales",
    "Segment",
    "Weight",
]
