"""Random numbers that are a function of (seed, position): Philox 4x32-10, in plain integers and in numpy.

A counter-based generator has no state: the number for a position does not depend on the rest of the batch, on
the device, or on how often a step is run again. One uniform number is drawn for each token.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..kernels.sampling_layout import PHILOX_KEY_INCREMENTS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS

MASK32 = 0xFFFFFFFF
POSITIONS_PER_BLOCK = 64
DRAWS_BEFORE_BLOCKS = 4  # the first numbers of a stream are computed one by one

PhiloxWords = tuple[int, int, int, int]
Counters = NDArray[np.uint64]


def philox(counter: PhiloxWords, key: tuple[int, int]) -> PhiloxWords:
    """Four random 32-bit words for a 128-bit counter and a 64-bit key."""
    a, b, c, d = counter
    low, high = key
    for _ in range(PHILOX_ROUNDS):
        left, right = PHILOX_MULTIPLIERS[0] * a, PHILOX_MULTIPLIERS[1] * c
        a, b, c, d = (right >> 32) ^ b ^ low, right & MASK32, (left >> 32) ^ d ^ high, left & MASK32
        low, high = (low + PHILOX_KEY_INCREMENTS[0]) & MASK32, (high + PHILOX_KEY_INCREMENTS[1]) & MASK32
    return a, b, c, d


def philox_array(counters: Counters, key: tuple[int, int]) -> Counters:
    """`philox` for many counters (4, n) at once; uint64 holding 32-bit words."""
    a, b, c, d = counters
    low, high = key
    for _ in range(PHILOX_ROUNDS):
        left, right = a * PHILOX_MULTIPLIERS[0], c * PHILOX_MULTIPLIERS[1]
        a, b, c, d = (right >> 32) ^ b ^ low, right & MASK32, (left >> 32) ^ d ^ high, left & MASK32
        low, high = (low + PHILOX_KEY_INCREMENTS[0]) & MASK32, (high + PHILOX_KEY_INCREMENTS[1]) & MASK32
    return np.stack((a, b, c, d))


def uniform(seed: int, position: int, rewind_count: int = 0) -> float:
    """The number in [0, 1) that belongs to a position; 53 bits of it are random."""
    high, low, _, _ = philox((position & MASK32, position >> 32 & MASK32, rewind_count & MASK32, 0), key_of(seed))
    return _to_unit_interval(high, low)


def key_of(seed: int) -> tuple[int, int]:
    """A seed as a key: its low 64 bits, so negative seeds are valid."""
    return seed & MASK32, seed >> 32 & MASK32


def check_seed(seed: int | None) -> int:
    """A seed as an integer; None is a fresh one."""
    if seed is None:
        return secrets.randbits(64)
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise InputError(f"seed must be an integer or None, found {seed!r} ({type(seed).__name__}).")
    return seed.__index__()


def _to_unit_interval(high: int, low: int) -> float:
    return (high << 21 | low >> 11) * 2.0**-53


class PhiloxStream:
    """The numbers of one seed, by position: the first ones one by one, then in blocks, which is faster."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._single_draws_left = DRAWS_BEFORE_BLOCKS
        self._cached_block = (-1, -1)
        self._cached_numbers: list[float] = []

    def at(self, position: int, rewind_count: int = 0) -> float:
        """The number for a position; each rewind count has its own numbers."""
        block = (position // POSITIONS_PER_BLOCK, rewind_count)
        if block == self._cached_block:
            return self._cached_numbers[position % POSITIONS_PER_BLOCK]
        if self._single_draws_left:
            self._single_draws_left -= 1
            return uniform(self.seed, position, rewind_count)
        self._cached_numbers = self._compute_block(*block)
        self._cached_block = block
        return self._cached_numbers[position % POSITIONS_PER_BLOCK]

    def _compute_block(self, block: int, rewind_count: int) -> list[float]:
        positions = np.arange(block * POSITIONS_PER_BLOCK, (block + 1) * POSITIONS_PER_BLOCK, dtype=np.uint64)
        zeros = np.zeros(POSITIONS_PER_BLOCK, np.uint64)
        counters = np.stack((positions & MASK32, positions >> 32, zeros + (rewind_count & MASK32), zeros))
        high, low, _, _ = philox_array(counters, key_of(self.seed))
        numbers: list[float] = ((high << 21 | low >> 11).astype(np.float64) * 2.0**-53).tolist()
        return numbers
