"""Sets of tokens as packed bits: bit i % 32 of word i // 32 says whether token i is in the set.

This is the form in which masks are computed, intersected and sent to the device. Only numpy, no torch, and
nothing about what a token means.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]
"""The set, 32 tokens a word; bits above the vocabulary are zero."""

WORD = 32
FEW = 1000  # up to here it is quicker to set bits than to pack a whole vocabulary


def words_for(width: int) -> int:
    """How many words hold this many tokens."""
    return -(-width // WORD)


def pack(members: NDArray[np.bool_]) -> Words:
    """The set of the places that are true."""
    padded = np.zeros(words_for(len(members)) * WORD, np.bool_)
    padded[: len(members)] = members
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32, copy=False)


def of(numbers: NDArray[np.int64], width: int) -> Words:
    """The set of some tokens."""
    if len(numbers) > FEW:
        places = np.zeros(width, np.bool_)
        places[numbers] = True
        return pack(places)
    words = np.zeros(words_for(width), np.uint32)
    np.bitwise_or.at(words, numbers // WORD, np.uint32(1) << (numbers % WORD).astype(np.uint32))
    return words.view(np.int32)


def only(number: int, width: int) -> Words:
    """The set of one token."""
    words = np.zeros(words_for(width), np.uint32)
    words[number // WORD] = 1 << (number % WORD)
    return words.view(np.int32)


def members(words: Words) -> NDArray[np.int64]:
    """The tokens of a set, ascending."""
    bits = np.unpackbits(words.astype("<i4", copy=False).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def count(words: Words) -> int:
    """How many tokens a set has."""
    return int(np.bitwise_count(words.view(np.uint32)).sum())


def contains(words: Words, number: int) -> bool:
    """Whether a token is in the set."""
    place = number // WORD
    return 0 <= place < len(words) and bool(int(words[place]) >> (number % WORD) & 1)


def fit(words: Words, width: int) -> Words:
    """The same set in a vocabulary of another size, without the tokens that are not in it."""
    size = words_for(width)
    if len(words) != size:
        resized = np.zeros(size, np.int32)
        shared = min(size, len(words))
        resized[:shared] = words[:shared]
        words = resized
    if (used := width % WORD) and int(words[-1]) >> used:
        words = words.copy()
        words[-1] &= (1 << used) - 1
    return words
