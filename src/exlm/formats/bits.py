"""Codes of 2 to 8 bits in 32-bit words: a plain little-endian bit stream down each column.

Value i of width b takes bits i·b to (i+1)·b of its column's words, lowest bit first, and may cross a word
border. Every packed format is brought into this layout; kernels repack it for themselves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InputError

WORD_BITS = 32


def num_words(length: int, bits: int) -> int:
    """Words that `length` values need in each column."""
    return -(-length * bits // WORD_BITS)


def unpack(words: Tensor, bits: int, length: int) -> Tensor:
    """(words, columns) int32 → (rows, columns) uint8."""
    _check_words(words, bits, length)
    span, each = _repeat_period(bits)
    mask = (1 << bits) - 1
    out = torch.empty(length, words.shape[1], dtype=torch.uint8, device=words.device)
    for i in range(min(each, length)):
        target = out[i::each]
        word, shift = divmod(i * bits, WORD_BITS)
        value = words[word::span][: len(target)] >> shift
        if shift + bits > WORD_BITS:
            # The shift is arithmetic: mask the copies of the sign bit.
            value &= (1 << (WORD_BITS - shift)) - 1
            value |= words[word + 1 :: span][: len(target)] << (WORD_BITS - shift)
        target.copy_(value.bitwise_and_(mask))
    return out


def pack(values: Tensor, bits: int) -> Tensor:
    """(rows, columns) of whole numbers below 2^bits → (words, columns) int32; the last word ends in zeros."""
    rows, columns = values.shape
    if values.numel():
        low, high = (int(edge) for edge in values.aminmax())
        if low < 0 or high >> bits:
            raise InputError(f"{high if low >= 0 else low} does not fit {bits} bits.")
    span, each = _repeat_period(bits)
    out = torch.zeros(num_words(rows, bits), columns, dtype=torch.int32, device=values.device)
    for i in range(min(each, rows)):
        source = values[i::each].to(torch.int32)
        word, shift = divmod(i * bits, WORD_BITS)
        out[word::span][: len(source)] |= source << shift
        if shift + bits > WORD_BITS:
            out[word + 1 :: span][: len(source)] |= source >> (WORD_BITS - shift)
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
    span = bits // math.gcd(bits, WORD_BITS)
    return span, span * WORD_BITS // bits
