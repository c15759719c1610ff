"""Codes of 2 to 8 bits in 32-bit words: a plain little-endian bit stream down each column.

Value i of width b takes bits i·b to (i+1)·b of its column's words, lowest bit first, and may cross a word
border. Every packed format is brought into this layout; kernels repack it for themselves.

The second half handles eight bytes at a time (SWAR, SIMD within a register): bytes are shifted inside int64
numbers, and bits that come over from the next byte are masked. `gguf` takes blocks apart with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

WORD_BITS = 32

_LOW_BITS = 0x0101010101010101
_DIAGONAL = 0x8040201008040201  # bit j of byte j


def num_words(length: int, bits: int) -> int:
    """Words that `length` values need in each column."""
    return -(-length * bits // WORD_BITS)


def unpack(words: Tensor, bits: int, length: int) -> Tensor:
    """(words, columns) int32 → (rows, columns) uint8."""
    _check_words(words, bits, length)
    period_words, period_values = _repeat_period(bits)
    mask = (1 << bits) - 1
    out = torch.empty(length, words.shape[1], dtype=torch.uint8, device=words.device)
    for i in range(min(period_values, length)):
        target = out[i::period_values]
        word, shift = divmod(i * bits, WORD_BITS)
        value = words[word::period_words][: len(target)] >> shift
        if shift + bits > WORD_BITS:
            # The shift is arithmetic: mask the copies of the sign bit.
            value &= (1 << (WORD_BITS - shift)) - 1
            value |= words[word + 1 :: period_words][: len(target)] << (WORD_BITS - shift)
        target.copy_(value.bitwise_and_(mask))
    return out


def pack(values: Tensor, bits: int) -> Tensor:
    """(rows, columns) of whole numbers below 2^bits → (words, columns) int32; the last word ends in zeros."""
    rows, columns = values.shape
    if values.numel():
        low, high = (int(edge) for edge in values.aminmax())
        if low < 0 or high >> bits:
            raise InputError(f"{high if low >= 0 else low} does not fit {bits} bits.")
    period_words, period_values = _repeat_period(bits)
    out = torch.zeros(num_words(rows, bits), columns, dtype=torch.int32, device=values.device)
    for i in range(min(period_values, rows)):
        source = values[i::period_values].to(torch.int32)
        word, shift = divmod(i * bits, WORD_BITS)
        out[word::period_words][: len(source)] |= source << shift
        if shift + bits > WORD_BITS:
            out[word + 1 :: period_words][: len(source)] |= source >> (WORD_BITS - shift)
    return out


def unpack_rows(words: Tensor, bits: int, columns: int) -> Tensor:
    """(rows, words) int32 with a bit stream along each row → (rows, columns) uint8."""
    if 8 % bits:
        return unpack(words.T, bits, columns).T.contiguous()
    # No value crosses a byte: byte after byte is many times faster than column after column.
    _check_words(words.T, bits, columns)
    data, mask = words.reshape(-1).view(torch.uint8).view(len(words), -1), (1 << bits) - 1
    values = torch.stack([(data >> shift) & mask for shift in range(0, 8, bits)], 2)
    return values.view(len(words), -1)[:, :columns].contiguous()


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """(rows, columns) of whole numbers below 2^bits → (rows, words) int32, a bit stream along each row."""
    return pack(values.T, bits).T.contiguous()


def _check_words(words: Tensor, bits: int, length: int) -> None:
    if words.dtype is not torch.int32 or words.dim() != 2 or words.shape[0] != num_words(length, bits):
        raise InputError(
            f"{length} values of {bits} bits need ({num_words(length, bits)}, columns) words of int32, "
            f"found {words.dtype} of shape {tuple(words.shape)}."
        )


def _repeat_period(bits: int) -> tuple[int, int]:
    """After how many words the bit positions of values repeat, and how many values those words hold."""
    period_words = bits // math.gcd(bits, WORD_BITS)
    return period_words, period_words * WORD_BITS // bits


# -- eight bytes at a time -------------------------------------------------------------------------


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
