"""SWAR (SIMD within a register): bit operations on eight bytes at a time, on tensors of int64.

Bytes are shifted within 64-bit numbers, and bits that come over from the next byte are masked. Runs of bytes
are copied by numpy, for which a run of any length is one element.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_LOW_BITS = 0x0101010101010101
_DIAGONAL = 0x8040201008040201  # bit j of byte j


def _as_int64(bits: int) -> int:
    """An unsigned 64-bit pattern as the signed number that torch takes."""
    return bits - (1 << 64) if bits >> 63 else bits


def take_bytes(blocks: Tensor, at: int, count: int) -> Tensor:
    """(…, size) → (…, count): bytes `at` to `at + count` of every block."""
    size = blocks.shape[-1]
    run = np.dtype({"names": ["run"], "formats": [f"V{count}"], "offsets": [at], "itemsize": size})
    runs = blocks.contiguous().numpy().view(run)["run"].copy()
    return torch.from_numpy(runs.view(np.uint8).reshape(*blocks.shape[:-1], count))


def shift_right(packed: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """(…, n) → (shifts, …, n): (byte >> shift) & mask for each shift; n is a multiple of eight."""
    lanes = packed.view(torch.int64)
    out = lanes.new_empty(len(shifts), *lanes.shape)
    for own, shift in zip(out, shifts, strict=True):
        torch.bitwise_right_shift(lanes, shift, out=own)
    return out.bitwise_and_(_as_int64(mask * _LOW_BITS)).view(torch.uint8)


def merge_high_bits(low: Tensor, high: Tensor, up: int) -> Tensor:
    """`low | (high << up)` for every byte; overwrites both tensors."""
    low.view(torch.int64).bitwise_or_(high.view(torch.int64).bitwise_left_shift_(up))
    return low


def expand_bits(packed: Tensor) -> Tensor:
    """(…, n) → (…, 8 · n): one byte for each bit, the lowest of each byte first."""
    lanes = packed.to(torch.int64).mul_(_LOW_BITS).bitwise_and_(_as_int64(_DIAGONAL))
    lanes = lanes.add_(0x7F * _LOW_BITS).bitwise_right_shift_(7).bitwise_and_(_LOW_BITS)
    return lanes.view(torch.uint8).view(*packed.shape[:-1], -1)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """(…, n) uint8 → (…, words) int32: codes as a bit stream of `bits` each, as in `bits.py`.

    n is a multiple of eight, and the stream fills whole words. Eight codes are one 64-bit number, whose
    parts move together in three steps.
    """
    lanes = codes.contiguous().view(torch.int64)
    for lane in (8, 16, 32) if bits < 8 else ():
        used = bits * lane // 8
        even = sum(((1 << used) - 1) << at for at in range(0, 64, 2 * lane))
        moved = (lanes >> (lane - used)).bitwise_and_(_as_int64(even << used))
        lanes = (lanes & _as_int64(even)).bitwise_or_(moved)
    if bits in (4, 8):
        words = lanes.view(torch.int32) if bits == 8 else lanes.to(torch.int32)
    else:
        words = (
            take_bytes(lanes.view(torch.uint8).view(*lanes.shape, 8), 0, bits).flatten(-2).view(torch.int32)
        )
    return words
