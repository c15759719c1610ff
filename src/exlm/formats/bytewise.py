"""Work on every byte of a tensor, eight bytes at a time: a processor does that as fast as one at a time.

Bytes are moved within 64-bit numbers, and what comes over from the next byte is masked away. Runs of bytes
are copied by numpy, to which a run is one thing, however odd its length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ONES = 0x0101010101010101
_DIAGONAL = 0x8040201008040201  # bit j of byte j


def _number(bits: int) -> int:
    """A 64-bit pattern as torch takes it, with its sign."""
    return bits - (1 << 64) if bits >> 63 else bits


def taken(blocks: Tensor, at: int, count: int) -> Tensor:
    """(…, size) → (…, count): those bytes of every block, side by side."""
    size = blocks.shape[-1]
    run = np.dtype({"names": ["run"], "formats": [f"V{count}"], "offsets": [at], "itemsize": size})
    runs = blocks.contiguous().numpy().view(run)["run"].copy()
    return torch.from_numpy(runs.view(np.uint8).reshape(*blocks.shape[:-1], count))


def shifted(packed: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """(…, n) → (shifts, …, n): every byte moved down by each shift, its lowest bits kept; n is eights."""
    lanes = packed.view(torch.int64)
    out = lanes.new_empty(len(shifts), *lanes.shape)
    for own, shift in zip(out, shifts, strict=True):
        torch.bitwise_right_shift(lanes, shift, out=own)
    return out.bitwise_and_(_number(mask * _ONES)).view(torch.uint8)


def joined(low: Tensor, high: Tensor, up: int) -> Tensor:
    """Every byte of `low` with that of `high` above it, from bit `up` on; both are spoilt."""
    low.view(torch.int64).bitwise_or_(high.view(torch.int64).bitwise_left_shift_(up))
    return low


def single_bits(packed: Tensor) -> Tensor:
    """(…, n) → (…, 8 · n): single bits, the lowest of each byte first."""
    lanes = packed.to(torch.int64).mul_(_ONES).bitwise_and_(_number(_DIAGONAL))
    lanes = lanes.add_(0x7F * _ONES).bitwise_right_shift_(7).bitwise_and_(_ONES)
    return lanes.view(torch.uint8).view(*packed.shape[:-1], -1)


def squeeze(codes: Tensor, bits: int) -> Tensor:
    """(…, n) uint8 → (…, words) int32: the bit stream of `bits`; n is eights that fill words.

    Eight codes are one 64-bit number whose parts move together in three steps.
    """
    lanes = codes.contiguous().view(torch.int64)
    for lane in (8, 16, 32) if bits < 8 else ():
        used = bits * lane // 8
        even = sum(((1 << used) - 1) << at for at in range(0, 64, 2 * lane))
        moved = (lanes >> (lane - used)).bitwise_and_(_number(even << used))
        lanes = (lanes & _number(even)).bitwise_or_(moved)
    if bits in (4, 8):
        words = lanes.view(torch.int32) if bits == 8 else lanes.to(torch.int32)
    else:
        words = taken(lanes.view(torch.uint8).view(*lanes.shape, 8), 0, bits).flatten(-2).view(torch.int32)
    return words
