"""The random number that belongs to a seed and a position, as `random.py` defines it."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import rng as random
from .topk import MASK32

MULTIPLIER_FIRST, MULTIPLIER_SECOND = (tl.constexpr(number) for number in random.MULTIPLIERS)
KEY_FIRST, KEY_SECOND = (tl.constexpr(number) for number in random.KEY_INCREMENTS)
ROUNDS = tl.constexpr(random.ROUNDS)


@triton.jit
def uniform(seed, position, rewind_count):
    """A float64 in [0, 1) for three int64. The products wrap around; their masked halves are right."""
    a, b, c, d = position & MASK32, (position >> 32) & MASK32, rewind_count & MASK32, rewind_count & 0
    low, high = seed & MASK32, (seed >> 32) & MASK32
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIER_FIRST, c * MULTIPLIER_SECOND
        a, b = ((right >> 32) & MASK32) ^ b ^ low, right & MASK32
        c, d = ((left >> 32) & MASK32) ^ d ^ high, left & MASK32
        low, high = (low + KEY_FIRST) & MASK32, (high + KEY_SECOND) & MASK32
    return ((a << 21) | (b >> 11)).to(tl.float64) * 2.0**-53
