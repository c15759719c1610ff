"""A matrix as a GGUF file stores it → a weight: codes repacked, not rounded again.

A stored row is one output, cut into blocks of neighbouring inputs. The common types become a `PackedWeight`
that dequantises to the same float32 bit for bit; the rare ones are dequantised here. Where the bytes come
from is the checkpoint's business, and how a block is laid out that of `gguf_blocks`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import BadTensor, MissingExtra
from .bytewise import squeeze
from .dense import DenseWeight
from .gguf_blocks import LAYOUTS, Layout, Parts, split
from .packed import PackedWeight, Segment
from .room import room
from .scales import Direct, Nested, Scales

log = logging.getLogger(__name__)

SLAB = 2**18
"""Values repacked at once: what is in the air fits a processor's cache, whatever the matrix."""


class Kind(NamedTuple):
    """A stored type: its name, and how many values take how many bytes."""

    name: str
    block: int
    size: int


KINDS: dict[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    9: Kind("Q8_1", 32, 40),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
    41: Kind("Q1_0", 128, 18),
}
"""Every type by the number files give it."""

REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that files had once and llama.cpp has given up, by their numbers."""

FLOATS: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_BY_NAME = {kind.name: kind for kind in KINDS.values()}


def read(
    raw: Tensor, kind: str, in_features: int, out_features: int, where: str
) -> PackedWeight | DenseWeight:
    """The weight in these bytes, one row for each output; `where` is what errors call it.

    Plain floats share memory with `raw`; everything else is new.
    """
    found = _BY_NAME.get(kind)
    if found is None:
        raise BadTensor(f"{where}: expected one of {', '.join(_BY_NAME)}, found the type {kind!r}.")
    if in_features % found.block:
        raise BadTensor(f"{where}: {in_features} inputs are not whole {kind} blocks of {found.block}.")
    expected = (out_features, in_features // found.block * found.size)
    if raw.dtype is not torch.uint8 or raw.shape != expected or min(expected) < 1:
        raise BadTensor(
            f"{where}: {out_features} outputs of {in_features} inputs in {kind} are {list(expected)} bytes, "
            f"found {list(raw.shape)} of {str(raw.dtype).removeprefix('torch.')}."
        )
    if kind in FLOATS:
        return DenseWeight(_as_floats(raw, FLOATS[kind]))
    if kind in LAYOUTS:
        return PackedWeight(
            form=f"gguf {kind}",
            in_features=in_features,
            out_features=out_features,
            segments=(_segment(raw, LAYOUTS[kind], in_features, where),),
            dtype=torch.float32,
        )
    return DenseWeight(_dequantized(raw, kind, in_features, where))


def _as_floats(raw: Tensor, dtype: torch.dtype) -> Tensor:
    aligned = raw.is_contiguous() and raw.data_ptr() % dtype.itemsize == 0
    return (raw if aligned else raw.clone(memory_format=torch.contiguous_format)).view(dtype)


def _slabs(outputs: int, inputs: int) -> Iterator[slice]:
    step = max(1, SLAB // inputs)
    for start in range(0, outputs, step):
        yield slice(start, min(start + step, outputs))


def _segment(raw: Tensor, layout: Layout, inputs: int, where: str) -> Segment:
    """All blocks of a matrix, a few outputs at a time."""
    outputs = raw.shape[0]
    codes = room((inputs * layout.bits // 32, outputs), torch.int32)
    tables: list[Tensor | None] = []
    for slab in _slabs(outputs, inputs):
        parts = layout.cut(split(raw[slab], layout.size))
        words = squeeze(parts.codes, layout.bits).permute(2, 3, 0, 4, 1)
        codes.view(*words.shape[:-1], outputs)[..., slab] = words
        if not tables:
            tables = [None if part is None else _table(part, outputs) for part in parts[1:]]
        for table, part in zip(tables, parts[1:], strict=True):
            if table is not None and part is not None:
                table[:, slab] = part.flatten(1).T
    whole = Parts(codes, *tables)  # type: ignore[arg-type]  # at least one slab: the scales are there
    for table in (whole.scales, whole.minimum):
        if table is not None and not bool(table.isfinite().all()):
            raise BadTensor(
                f"{where}: expected finite scales, found infinity or NaN. Download the file again."
            )
    parents = torch.arange(inputs // layout.block, dtype=torch.int32)
    parents = parents.repeat_interleave(layout.block // layout.group)
    return Segment(
        bits=layout.bits,
        sizes=(layout.group,) * (inputs // layout.group),
        codes=codes,
        scales=_scales(whole.scales, whole.sub_scales, parents),
        zero=layout.zero,
        minimum=None if whole.minimum is None else _scales(whole.minimum, whole.sub_minimum, parents),
        codebook=torch.tensor(layout.codebook, dtype=torch.float32) if layout.codebook else None,
    )


def _table(part: Tensor, outputs: int) -> Tensor:
    """Room for one part of every output, the outputs side by side."""
    return room((part[0].numel(), outputs), part.dtype)


def _scales(supers: Tensor, codes: Tensor | None, parents: Tensor) -> Scales:
    return Direct(supers) if codes is None else Nested(codes, supers, parents)


def _dequantized(raw: Tensor, kind: str, inputs: int, where: str) -> Tensor:
    """(outputs, inputs) float16 of a type no kernel knows."""
    try:
        import gguf
    except ImportError:
        raise MissingExtra(
            f"{where} is stored as {kind}, which needs another package: pip install gguf"
        ) from None
    _note(kind)
    out = torch.empty((raw.shape[0], inputs), dtype=torch.float16)
    for slab in _slabs(*out.shape):
        try:
            with np.errstate(all="ignore"):  # what overflows is found below
                values = gguf.quants.dequantize(raw[slab].numpy(), gguf.GGMLQuantizationType[kind])
        except (NotImplementedError, KeyError):
            raise BadTensor(
                f"{where}: {kind} is no type for a matrix that is multiplied with. "
                f"Quantise the model to one of {', '.join(LAYOUTS)}."
            ) from None
        out[slab] = torch.from_numpy(values)
    if not bool(out.isfinite().all()):
        raise BadTensor(f"{where}: the values of this {kind} tensor are not finite in float16.")
    return out


@cache
def _note(kind: str) -> None:
    """Say once for each type that it does not stay small."""
    log.warning(
        "GGUF %s tensors have no kernel here: they are unpacked to float16, which takes more memory.", kind
    )
