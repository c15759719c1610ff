"""The formats in which safetensors files store matrices, in the order in which they are looked for.

A new format is one module (detect, read, verify) that makes a `WeightFormat`, and its entry here. GGUF's
types are in `gguf_types`: its files name the type of each tensor, so nothing is detected.
"""

from __future__ import annotations

from . import awq, exl2, gptq
from .weight_format import WeightFormat

DENSE = WeightFormat("dense", "weight", ("weight",))
"""Plain floats. `checkpoint` reads them itself: there is nothing to decode, and they are cast as they are
copied."""

FORMATS: tuple[WeightFormat, ...] = (
    exl2.FORMAT,
    gptq.FORMAT,
    awq.FORMAT,
    WeightFormat("EXL3", "trellis"),
    WeightFormat("compressed-tensors", "weight_packed"),
    DENSE,
)
