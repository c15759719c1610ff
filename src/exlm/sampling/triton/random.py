"""The random number that belongs to a seed and a position, as `random.py` defines it."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import random
from .order import LOW

FIRST, SECOND = (tl.constexpr(number) for number in random.MULTIPLIERS)
KEY_FIRST, KEY_SECOND = (tl.constexpr(number) for number in random.KEY_STEPS)
ROUNDS = tl.constexpr(random.ROUNDS)


@triton.jit
def uniform(seed, position, branch):
    """A float64 in [0, 1) for three int64. The products wrap around; their masked halves are right."""
    a, b, c, d = position & LOW, (position >> 32) & LOW, branch & LOW, branch & 0
    low, high = seed & LOW, (seed >> 32) & LOW
    for _ in range(ROUNDS):
        left, right = a * FIRST, c * SECOND
        a, b = ((right >> 32) & LOW) ^ b ^ low, right & LOW
        c, d = ((left >> 32) & LOW) ^ d ^ high, left & LOW
        low, high = (low + KEY_FIRST) & LOW, (high + KEY_SECOND) & LOW
    return ((a << 21) | (b >> 11)).to(tl.float64) * 2.0**-53
