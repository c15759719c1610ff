"""GGUF: its tensor types by number, where in a block codes, scales and minimums are, and weights made of them.

A stored row is one output, cut into blocks of 32 or 256 neighbouring inputs. Codes are repacked and never rounded
again: the common types, those in `BLOCK_LAYOUTS`, become a `PackedWeight` that dequantises to the same float32 bit for
bit; the rare ones, for which no kernel exists, are dequantised to float16. A type gets packed by an entry in
`BLOCK_LAYOUTS` and a function that unpacks its blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import BadTensor, MissingExtra
from .host_buffers import pooled_empty
from .packed import DenseWeight, KQuantScales, PackedWeight, PlainScales, Scales, Segment

log = logging.getLogger(__name__)

REPACK_CHUNK = 2**18
"""Values repacked at once: the intermediate tensors fit the processor's cache, whatever the matrix."""


# -- types -----------------------------------------------------------------------------------------


class GgufType(NamedTuple):
    """A tensor type of GGUF files."""

    name: str
    block_size: int  # values in a block
    block_bytes: int


GGUF_TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    9: GgufType("Q8_1", 32, 40),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    15: GgufType("Q8_K", 256, 292),
    16: GgufType("IQ2_XXS", 256, 66),
    17: GgufType("IQ2_XS", 256, 74),
    18: GgufType("IQ3_XXS", 256, 98),
    19: GgufType("IQ1_S", 256, 50),
    20: GgufType("IQ4_NL", 32, 18),
    21: GgufType("IQ3_S", 256, 110),
    22: GgufType("IQ2_S", 256, 82),
    23: GgufType("IQ4_XS", 256, 136),
    24: GgufType("I8", 1, 1),
    25: GgufType("I16", 1, 2),
    26: GgufType("I32", 1, 4),
    27: GgufType("I64", 1, 8),
    28: GgufType("F64", 1, 8),
    29: GgufType("IQ1_M", 256, 56),
    30: GgufType("BF16", 1, 2),
    34: GgufType("TQ1_0", 256, 54),
    35: GgufType("TQ2_0", 256, 66),
    39: GgufType("MXFP4", 32, 17),
    40: GgufType("NVFP4", 64, 36),
    41: GgufType("Q1_0", 128, 18),
}
"""Every type by its number in files."""

_TYPE_BY_NAME = {one.name: one for one in GGUF_TYPES.values()}

REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that llama.cpp has removed, by their numbers in older files."""

FLOAT_TYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The codebook of the IQ4 types: the value of each of the sixteen codes."""


class BlockParts(NamedTuple):
    """The parts of a stack of blocks (columns, blocks, bytes); `…` is (columns, blocks).

    `codes` is uint8 (shifts, columns, blocks, runs, run): each run of packed bytes holds one run of codes for
    each shift. The inputs of a block, in order, are run 0 at shift 0, 1, …, then run 1 at shift 0, 1, …
    """

    codes: Tensor
    scales: Tensor  # (…, 1) float16
    sub_scales: Tensor | None = None  # (…, groups) uint8 or int8, factors of `scales`
    minimum: Tensor | None = None  # (…, 1) float16
    sub_minimum: Tensor | None = None  # (…, groups) uint8, factors of `minimum`


@dataclass(frozen=True)
class BlockLayout:
    """The layout of a type's blocks; a value is (code - zero) · scale - minimum."""

    block_size: int  # inputs in a block
    block_bytes: int
    bits: int
    group_size: int  # inputs that share a scale
    unpack: Callable[[Tensor], BlockParts]
    zero: int = 0
    codebook: tuple[int, ...] = ()


# -- eight bytes at a time: bytes shifted inside int64 numbers (SWAR) --------------------------------

_LOW_BITS = 0x0101010101010101
_DIAGONAL = 0x8040201008040201  # bit j of byte j


def _as_int64(mask: int) -> int:
    """An unsigned 64-bit mask as the signed number that torch takes."""
    return mask - (1 << 64) if mask >> 63 else mask


def take_bytes(blocks: Tensor, at: int, count: int) -> Tensor:
    """(…, size) → (…, count): bytes `at` to `at + count` of every block."""
    size = blocks.shape[-1]
    run = np.dtype({"names": ["run"], "formats": [f"V{count}"], "offsets": [at], "itemsize": size})
    runs = blocks.contiguous().numpy().view(run)["run"].copy()
    return torch.from_numpy(runs.view(np.uint8).reshape(*blocks.shape[:-1], count))


def shift_right(packed: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """(…, n) → (shifts, …, n): (byte >> shift) & mask for each shift; n is a multiple of eight."""
    words64 = packed.view(torch.int64)
    out = words64.new_empty(len(shifts), *words64.shape)
    for own, shift in zip(out, shifts, strict=True):
        torch.bitwise_right_shift(words64, shift, out=own)
    return out.bitwise_and_(_as_int64(mask * _LOW_BITS)).view(torch.uint8)


def merge_high_bits(low: Tensor, high: Tensor, shift: int) -> Tensor:
    """`low | (high << shift)` for every byte; overwrites both tensors."""
    low.view(torch.int64).bitwise_or_(high.view(torch.int64).bitwise_left_shift_(shift))
    return low


def expand_bits(packed: Tensor) -> Tensor:
    """(…, n) → (…, 8 · n): one byte for each bit, the lowest of each byte first."""
    # Copy each byte eight times, keep bit j of copy j, and bring what is not zero to bit 0: 0x7F carries it to bit 7.
    words64 = packed.to(torch.int64).mul_(_LOW_BITS).bitwise_and_(_as_int64(_DIAGONAL))
    words64 = words64.add_(0x7F * _LOW_BITS).bitwise_right_shift_(7).bitwise_and_(_LOW_BITS)
    return words64.view(torch.uint8).view(*packed.shape[:-1], -1)


def pack_last_dim(codes: Tensor, bits: int) -> Tensor:
    """(…, n) uint8 → (…, words) int32: codes as a bit stream of `bits` each, as `pack_rows` packs them.

    n is a multiple of eight, and the stream fills whole words. Eight codes are one 64-bit number, whose
    parts move together in three steps, which is much faster than `pack_rows`.
    """
    words64 = codes.contiguous().view(torch.int64)
    for width in (8, 16, 32) if bits < 8 else ():
        used = bits * width // 8
        even = sum(((1 << used) - 1) << at for at in range(0, 64, 2 * width))
        moved = (words64 >> (width - used)).bitwise_and_(_as_int64(even << used))
        words64 = (words64 & _as_int64(even)).bitwise_or_(moved)
    if bits in (4, 8):
        return words64.view(torch.int32) if bits == 8 else words64.to(torch.int32)
    return take_bytes(words64.view(torch.uint8).view(*words64.shape, 8), 0, bits).flatten(-2).view(torch.int32)


# -- blocks ----------------------------------------------------------------------------------------


def split_runs(values: Tensor, run: int) -> Tensor:
    """(…, n) → (…, n / run, run), in the same memory."""
    return values.view(*values.shape[:-1], -1, run)


def _float16_at(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, (…, 1)."""
    return take_bytes(blocks, at, 2).view(torch.float16)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """(…, bytes) → (2, …, runs, run): the low halves of each run of bytes, and the high halves."""
    return shift_right(split_runs(packed, run), (0, 4), 15)


def _two_bit_codes(packed: Tensor) -> Tensor:
    """(…, bytes) → (4, …, runs, 32): bits 0-1 of each run of 32 bytes, bits 2-3, 4-5 and 6-7."""
    return shift_right(split_runs(packed, 32), (0, 2, 4, 6), 3)


def _bit_planes(packed: Tensor, shifts: int) -> Tensor:
    """(columns, blocks, 32) → (shifts, columns, blocks, 8 / shifts, 32): the high bits of codes.

    Bit 0 of the 32 bytes belongs to the codes of run 0 at shift 0, bit 1 to those at the next shift, and so
    on; then run 1 follows.
    """
    found = shift_right(packed, range(8), 1)
    return found.view(-1, shifts, *packed.shape).permute(1, 2, 3, 0, 4).contiguous()


def _flatten_runs(codes: Tensor) -> Tensor:
    """(shifts, columns, blocks, runs, run) → (columns, blocks, inputs)."""
    return codes.permute(1, 2, 3, 0, 4).flatten(2)


def _q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(take_bytes(blocks, 2, 16), 16), _float16_at(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(take_bytes(blocks, 4, 16), 16), _float16_at(blocks, 0), minimum=-_float16_at(blocks, 2))


def _five_bit_codes(blocks: Tensor, at: int) -> Tensor:
    """Codes of 5 bits in one run: four bytes of high bits, then the nibbles."""
    low = _flatten_runs(_nibbles(take_bytes(blocks, at + 4, 16), 16))
    return split_runs(merge_high_bits(low, expand_bits(take_bytes(blocks, at, 4)), 4), 32)[None]


def _q5_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_five_bit_codes(blocks, 2), _float16_at(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockParts:
    return BlockParts(_five_bit_codes(blocks, 4), _float16_at(blocks, 0), minimum=-_float16_at(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts(split_runs(take_bytes(blocks, 2, 32) ^ 128, 32)[None], _float16_at(blocks, 0))


def _q2_k(blocks: Tensor) -> BlockParts:
    low, high = shift_right(take_bytes(blocks, 0, 16), (0, 4), 15)
    return BlockParts(
        _two_bit_codes(take_bytes(blocks, 16, 64)), _float16_at(blocks, 80), low, _float16_at(blocks, 82), high
    )


def _q3_k(blocks: Tensor) -> BlockParts:
    codes = merge_high_bits(_two_bit_codes(take_bytes(blocks, 32, 64)), _bit_planes(take_bytes(blocks, 0, 32), 4), 2)
    low = _flatten_runs(_nibbles(take_bytes(blocks, 96, 8), 8))
    high = torch.stack([(take_bytes(blocks, 104, 4) >> shift) & 3 for shift in (0, 2, 4, 6)], -2).flatten(-2)
    return BlockParts(codes, _float16_at(blocks, 108), _signed_six_bits(low | (high << 4)))


def _q4_k(blocks: Tensor) -> BlockParts:
    scales, minimum = _six_bit_scales(blocks)
    return BlockParts(
        _nibbles(take_bytes(blocks, 16, 128), 32), _float16_at(blocks, 0), scales, _float16_at(blocks, 2), minimum
    )


def _q5_k(blocks: Tensor) -> BlockParts:
    scales, minimum = _six_bit_scales(blocks)
    codes = merge_high_bits(_nibbles(take_bytes(blocks, 48, 128), 32), _bit_planes(take_bytes(blocks, 16, 32), 2), 4)
    return BlockParts(codes, _float16_at(blocks, 0), scales, _float16_at(blocks, 2), minimum)


def _q6_k(blocks: Tensor) -> BlockParts:
    low = take_bytes(blocks, 0, 128).view(*blocks.shape[:2], 2, 2, 32).permute(3, 0, 1, 2, 4).contiguous()
    codes = merge_high_bits(shift_right(low, (0, 4), 15).flatten(0, 1), _two_bit_codes(take_bytes(blocks, 128, 64)), 4)
    return BlockParts(codes, _float16_at(blocks, 208), take_bytes(blocks, 192, 16).view(torch.int8))


def _iq4_xs(blocks: Tensor) -> BlockParts:
    both = take_bytes(blocks, 4, 4)
    low = torch.stack((both & 15, both >> 4), -1).flatten(-2)
    high = torch.stack([(take_bytes(blocks, 2, 2) >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    return BlockParts(
        _nibbles(take_bytes(blocks, 8, 128), 16), _float16_at(blocks, 0), _signed_six_bits(low | (high << 4))
    )


def _signed_six_bits(codes: Tensor) -> Tensor:
    """Codes of 6 bits as -32 to 31."""
    return codes.view(torch.int8) - 32


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of six bits from twelve bytes of Q4_K and Q5_K.

    The first four of each have a byte of their own, whose top two bits are the top bits of the last four.
    Four bytes are handled as one int32.
    """
    scales, minimum, rest = (take_bytes(blocks, at, 4).view(torch.int32) for at in (4, 8, 12))
    own, low, top = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
    return (
        torch.cat((scales & own, (rest & low) | ((scales >> 2) & top)), -1).view(torch.uint8),
        torch.cat((minimum & own, ((rest >> 4) & low) | ((minimum >> 2) & top)), -1).view(torch.uint8),
    )


BLOCK_LAYOUTS: dict[str, BlockLayout] = {
    "Q4_0": BlockLayout(32, 18, 4, 32, _q4_0, zero=8),
    "Q4_1": BlockLayout(32, 20, 4, 32, _q4_1),
    "Q5_0": BlockLayout(32, 22, 5, 32, _q5_0, zero=16),
    "Q5_1": BlockLayout(32, 24, 5, 32, _q5_1),
    "Q8_0": BlockLayout(32, 34, 8, 32, _q8_0, zero=128),
    "Q2_K": BlockLayout(256, 84, 2, 16, _q2_k),
    "Q3_K": BlockLayout(256, 110, 3, 16, _q3_k, zero=4),
    "Q4_K": BlockLayout(256, 144, 4, 32, _q4_k),
    "Q5_K": BlockLayout(256, 176, 5, 32, _q5_k),
    "Q6_K": BlockLayout(256, 210, 6, 16, _q6_k, zero=32),
    "IQ4_NL": BlockLayout(32, 18, 4, 32, _q4_0, codebook=IQ4_VALUES),
    "IQ4_XS": BlockLayout(256, 136, 4, 32, _iq4_xs, codebook=IQ4_VALUES),
}
"""The types that stay packed in memory, by name."""


# -- weights ---------------------------------------------------------------------------------------


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
        words = pack_last_dim(parts.codes, layout.bits).permute(2, 3, 0, 4, 1)
        codes.view(*words.shape[:-1], outputs)[..., chunk] = words
        if not tables:  # a table (numbers of one output, outputs) for each part but the codes
            tables = [
                None if part is None else pooled_empty((part[0].numel(), outputs), part.dtype) for part in parts[1:]
            ]
        for table, part in zip(tables, parts[1:], strict=True):
            if table is not None and part is not None:
                table[:, chunk] = part.flatten(1).T
    whole = BlockParts(codes, *tables)  # type: ignore[arg-type]  # at least one chunk: the scales are there
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
