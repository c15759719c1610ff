"""Token sets as packed bits: bit i % 32 of word i // 32 says whether token i is in the set.

Masks are computed, intersected and copied to the device in this form. It needs numpy only.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bitmask: TypeAlias = NDArray[np.int32]
"""A token set, 32 tokens a word; bits beyond the vocabulary are zero."""

BITS_PER_WORD = 32
MAX_IDS_SET_SINGLY = 1000  # up to this many ids, setting bits is faster than packing bools of a vocabulary


def num_words(width: int) -> int:
    """The words of a bitmask for `width` tokens."""
    return -(-width // BITS_PER_WORD)


def from_bools(is_member: NDArray[np.bool_]) -> Bitmask:
    """The set of the indices that are true."""
    padded = np.zeros(num_words(len(is_member)) * BITS_PER_WORD, np.bool_)
    padded[: len(is_member)] = is_member
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32, copy=False)


def from_ids(token_ids: NDArray[np.int64], width: int) -> Bitmask:
    """The set of these tokens, each below `width`."""
    if len(token_ids) > MAX_IDS_SET_SINGLY:
        is_member = np.zeros(width, np.bool_)
        is_member[token_ids] = True
        return from_bools(is_member)
    words = np.zeros(num_words(width), np.uint32)
    np.bitwise_or.at(
        words, token_ids // BITS_PER_WORD, np.uint32(1) << (token_ids % BITS_PER_WORD).astype(np.uint32)
    )
    return words.view(np.int32)


def from_id(token_id: int, width: int) -> Bitmask:
    """The set of one token."""
    words = np.zeros(num_words(width), np.uint32)
    words[token_id // BITS_PER_WORD] = 1 << (token_id % BITS_PER_WORD)
    return words.view(np.int32)


def to_ids(words: Bitmask) -> NDArray[np.int64]:
    """The tokens of a set, ascending."""
    bits = np.unpackbits(words.astype("<i4", copy=False).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def count_ids(words: Bitmask) -> int:
    """The number of tokens in a set."""
    return int(np.bitwise_count(words.view(np.uint32)).sum())


def contains(words: Bitmask, token_id: int) -> bool:
    """Whether a token is in the set."""
    word = token_id // BITS_PER_WORD
    return 0 <= word < len(words) and bool(int(words[word]) >> (token_id % BITS_PER_WORD) & 1)


def resize_to(words: Bitmask, width: int) -> Bitmask:
    """The set for a vocabulary of `width` tokens, without the tokens beyond it."""
    size = num_words(width)
    if len(words) != size:
        resized = np.zeros(size, np.int32)
        common = min(size, len(words))
        resized[:common] = words[:common]
        words = resized
    if (used_bits := width % BITS_PER_WORD) and int(words[-1]) >> used_bits:
        words = words.copy()
        words[-1] &= (1 << used_bits) - 1
    return words
