"""Makes a weight of the bytes of a GGUF tensor: codes are repacked and never rounded again.

A stored row is one output, cut into blocks of neighbouring inputs, which `gguf_types` takes apart. The common
types become a `PackedWeight` that dequantises to the same float32 bit for bit; the rare ones, for which no
kernel exists, are dequantised to float16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..errors import BadTensor, MissingExtra
from .bits import pack_codes
from .gguf_types import BLOCK_LAYOUTS, FLOAT_TYPES, GGUF_TYPES, BlockLayout, BlockParts, split_runs
from .host_buffers import pooled_empty
from .packed import KQuantScales, PackedWeight, PlainScales, Scales, Segment
from .weight import DenseWeight

log = logging.getLogger(__name__)

REPACK_CHUNK = 2**18
"""Values repacked at once: the intermediate tensors fit the processor's cache, whatever the matrix."""


_TYPE_BY_NAME = {one.name: one for one in GGUF_TYPES.values()}


def read(raw: Tensor, type_name: str, in_features: int, out_features: int, where: str) -> PackedWeight | DenseWeight:
    """The weight in these bytes, one row for each output; `where` is what errors call it.

    Plain floats share memory with `raw`; everything else is new.
    """
    stored_type = _TYPE_BY_NAME.get(type_name)
    if stored_type is None:
        raise BadTensor(f"{where}: expected one of {', '.join(_TYPE_BY_NAME)}, found the type {type_name!r}.")
    if in_features % stored_type.block_size:
        raise BadTensor(f"{where}: {in_features} inputs are not whole {type_name} blocks of {stored_type.block_size}.")
    expected = (out_features, in_features // stored_type.block_size * stored_type.block_bytes)
    if raw.dtype is not torch.uint8 or raw.shape != expected or min(expected) < 1:
        raise BadTensor(
            f"{where}: {out_features} outputs of {in_features} inputs in {type_name} are {list(expected)} "
            f"bytes, found {list(raw.shape)} of {str(raw.dtype).removeprefix('torch.')}."
        )
    if type_name in FLOAT_TYPES:
        return DenseWeight(_view_as(raw, FLOAT_TYPES[type_name]))
    if type_name in BLOCK_LAYOUTS:
        return PackedWeight(
            format_name=f"gguf {type_name}",
            in_features=in_features,
            out_features=out_features,
            segments=(_repack(raw, BLOCK_LAYOUTS[type_name], in_features, where),),
            dtype=torch.float32,
        )
    return DenseWeight(_dequantize(raw, type_name, in_features, where))


def _view_as(raw: Tensor, dtype: torch.dtype) -> Tensor:
    aligned = raw.is_contiguous() and raw.data_ptr() % dtype.itemsize == 0
    return (raw if aligned else raw.clone(memory_format=torch.contiguous_format)).view(dtype)


def _chunks(outputs: int, inputs: int) -> Iterator[slice]:
    step = max(1, REPACK_CHUNK // inputs)
    for start in range(0, outputs, step):
        yield slice(start, min(start + step, outputs))


def _repack(raw: Tensor, layout: BlockLayout, inputs: int, where: str) -> Segment:
    """Repack all blocks of a matrix, a few outputs at a time."""
    outputs = raw.shape[0]
    codes = pooled_empty((inputs * layout.bits // 32, outputs), torch.int32)
    tables: list[Tensor | None] = []
    for chunk in _chunks(outputs, inputs):
        parts = layout.unpack(split_runs(raw[chunk], layout.block_bytes))
        words = pack_codes(parts.codes, layout.bits).permute(2, 3, 0, 4, 1)
        codes.view(*words.shape[:-1], outputs)[..., chunk] = words
        if not tables:
            tables = [None if part is None else _table_buffer(part, outputs) for part in parts[1:]]
        for table, part in zip(tables, parts[1:], strict=True):
            if table is not None and part is not None:
                table[:, chunk] = part.flatten(1).T
    whole = BlockParts(codes, *tables)  # type: ignore[arg-type]  # at least one slab: the scales are there
    for table in (whole.scales, whole.minimum):
        if table is not None and not bool(table.isfinite().all()):
            raise BadTensor(f"{where}: expected finite scales, found infinity or NaN. Download the file again.")
    superblock_of_group = torch.arange(inputs // layout.block_size, dtype=torch.int32)
    superblock_of_group = superblock_of_group.repeat_interleave(layout.block_size // layout.group_size)
    return Segment(
        bits=layout.bits,
        group_sizes=(layout.group_size,) * (inputs // layout.group_size),
        codes=codes,
        scales=_scales(whole.scales, whole.sub_scales, superblock_of_group),
        zero=layout.zero,
        minimum=None if whole.minimum is None else _scales(whole.minimum, whole.sub_minimum, superblock_of_group),
        codebook=torch.tensor(layout.codebook, dtype=torch.float32) if layout.codebook else None,
    )


def _table_buffer(part: Tensor, outputs: int) -> Tensor:
    """A buffer (numbers of one output, outputs) for one part of the blocks."""
    return pooled_empty((part[0].numel(), outputs), part.dtype)


def _scales(superblock_scales: Tensor, codes: Tensor | None, superblock_of_group: Tensor) -> Scales:
    return (
        PlainScales(superblock_scales) if codes is None else KQuantScales(codes, superblock_scales, superblock_of_group)
    )


def _dequantize(raw: Tensor, type_name: str, inputs: int, where: str) -> Tensor:
    """(outputs, inputs) float16, for a type that no kernel supports."""
    try:
        import gguf
    except ImportError:
        raise MissingExtra(f"{where} is stored as {type_name}, which needs another package: pip install gguf") from None
    _warn_unpacked(type_name)
    out = torch.empty((raw.shape[0], inputs), dtype=torch.float16)
    for chunk in _chunks(*out.shape):
        try:
            with np.errstate(all="ignore"):  # overflow is found below
                values = gguf.quants.dequantize(raw[chunk].numpy(), gguf.GGMLQuantizationType[type_name])
        except (NotImplementedError, KeyError):
            raise BadTensor(
                f"{where}: {type_name} is no type for a matrix that is multiplied with. "
                f"Quantise the model to one of {', '.join(BLOCK_LAYOUTS)}."
            ) from None
        out[chunk] = torch.from_numpy(values)
    if not bool(out.isfinite().all()):
        raise BadTensor(f"{where}: the values of this {type_name} tensor are not finite in float16.")
    return out


@cache
def _warn_unpacked(type_name: str) -> None:
    """Warn once for each type that it is unpacked."""
    log.warning(
        "GGUF %s tensors have no kernel here: they are unpacked to float16, which takes more memory.", type_name
    )
