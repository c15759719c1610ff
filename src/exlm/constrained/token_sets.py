"""Sets of tokens: as packed bitmasks, and by the prefix of their bytes (`TokenTrie`).

Masks are computed, intersected and copied to the device as bitmasks: bit i % 32 of word i // 32 says whether
token i is in the set. The trie holds the bytes of the tokens of a vocabulary. Tokens without visible text
(special tokens, padding, EOS, unused ids) have no bytes in it, nor has a token that the vocabulary shows only
as a replacement character, so that its bytes are unknown.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..tokenizer import Codec
from ..tokenizer.vocab import REPLACEMENT, UNDEFINED

T = TypeVar("T")

Bitmask: TypeAlias = NDArray[np.int32]
"""A token set, 32 tokens a word; bits beyond the vocabulary are zero."""

BITS_PER_WORD = 32
MAX_IDS_SET_SINGLY = 1000  # up to this many ids, setting bits is faster than packing bools of a vocabulary


def num_bitmask_words(width: int) -> int:
    """The words of a bitmask for `width` tokens."""
    return -(-width // BITS_PER_WORD)


def bitmask_from_bools(is_member: NDArray[np.bool_]) -> Bitmask:
    """The set of the indices that are true."""
    padded = np.zeros(num_bitmask_words(len(is_member)) * BITS_PER_WORD, np.bool_)
    padded[: len(is_member)] = is_member
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32, copy=False)


def bitmask_from_ids(token_ids: NDArray[np.int64], width: int) -> Bitmask:
    """The set of these tokens, each below `width`."""
    if len(token_ids) > MAX_IDS_SET_SINGLY:
        is_member = np.zeros(width, np.bool_)
        is_member[token_ids] = True
        return bitmask_from_bools(is_member)
    words = np.zeros(num_bitmask_words(width), np.uint32)
    np.bitwise_or.at(words, token_ids // BITS_PER_WORD, np.uint32(1) << (token_ids % BITS_PER_WORD).astype(np.uint32))
    return words.view(np.int32)


def bitmask_ids(words: Bitmask) -> NDArray[np.int64]:
    """The tokens of a set, ascending."""
    bits = np.unpackbits(words.astype("<i4", copy=False).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def bitmask_count(words: Bitmask) -> int:
    """The number of tokens in a set."""
    return int(np.bitwise_count(words.view(np.uint32)).sum())


def bitmask_contains(words: Bitmask, token_id: int) -> bool:
    """Whether a token is in the set."""
    word = token_id // BITS_PER_WORD
    return 0 <= word < len(words) and bool(int(words[word]) >> (token_id % BITS_PER_WORD) & 1)


def resize_bitmask(words: Bitmask, width: int) -> Bitmask:
    """The set for a vocabulary of `width` tokens, without the tokens beyond it."""
    size = num_bitmask_words(width)
    if len(words) != size:
        resized = np.zeros(size, np.int32)
        common = min(size, len(words))
        resized[:common] = words[:common]
        words = resized
    if (used_bits := width % BITS_PER_WORD) and int(words[-1]) >> used_bits:
        words = words.copy()
        words[-1] &= (1 << used_bits) - 1
    return words


class TokenTrie:
    """Token bytes by id, and the trie of all tokens, stored as a sorted array.

    `keys` are the distinct byte strings, ascending, so all tokens with a common prefix are one range of them.
    The tokens of `keys[low:high]` are `ids[key_starts[low]:key_starts[high]]`.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes` holds the bytes by id, empty for tokens without visible text."""
        self.token_bytes = token_bytes
        order = sorted(
            (token_id for token_id, raw in enumerate(token_bytes) if raw), key=lambda token_id: token_bytes[token_id]
        )
        self.ids: NDArray[np.int64] = np.array(order, np.int64)
        self.keys: list[bytes] = []
        starts = []
        for position, token_id in enumerate(order):
            if not self.keys or self.keys[-1] != token_bytes[token_id]:
                self.keys.append(token_bytes[token_id])
                starts.append(position)
        self.key_starts = [*starts, len(order)]

    @property
    def size(self) -> int:
        """The number of ids: one more than the highest."""
        return len(self.token_bytes)

    @cached_property
    def single_bytes(self) -> frozenset[int]:
        """The bytes that are tokens by themselves."""
        return frozenset(key[0] for key in self.keys if len(key) == 1)

    def prefix_range(self, prefix: bytes, low: int, high: int) -> tuple[int, int]:
        """The range of `keys[low:high]` that starts with a prefix of UTF-8 bytes."""
        first = bisect_left(self.keys, prefix, low, high)
        if first == high or not self.keys[first].startswith(prefix):
            return first, first
        next_prefix = prefix[:-1] + bytes((prefix[-1] + 1,))  # UTF-8 has no byte 255
        return first, bisect_left(self.keys, next_prefix, first, high)

    def ids_in_range(self, low: int, high: int) -> NDArray[np.int64]:
        """The ids of the tokens whose bytes are in `keys[low:high]`."""
        return self.ids[self.key_starts[low] : self.key_starts[high]]


def cached_per_codec(build: Callable[[Codec], T]) -> Callable[[Codec], T]:
    """Make a function of a vocabulary keep its results, each as long as the vocabulary is in use."""
    lock = threading.Lock()
    built: WeakKeyDictionary[Codec, T] = WeakKeyDictionary()

    @wraps(build)
    def cached(codec: Codec) -> T:
        with lock:
            found = built.get(codec)
            if found is None:
                found = built[codec] = build(codec)
            return found

    return cached


@cached_per_codec
def token_trie_of(codec: Codec) -> TokenTrie:
    """The trie of a vocabulary, built at the first call."""
    return TokenTrie(visible_token_bytes(codec))


def visible_token_bytes(codec: Codec) -> list[bytes]:
    """By id, the bytes that a token adds in the middle of a text."""
    pieces = codec.vocab.pieces()
    known = codec.backend.token_bytes
    if known is None:
        table = [b"" if REPLACEMENT in piece else piece.encode() for piece in pieces]
    else:
        table = [raw if piece else b"" for piece, raw in zip(pieces, known.table, strict=True)]
    undefined = {token_id for token_id, piece in enumerate(pieces) if piece == UNDEFINED}
    for token_id in undefined | {codec.pad_id, *codec.eos_ids}:
        if 0 <= token_id < len(table):
            table[token_id] = b""
    return table


def codec_of(tokenizer: Any) -> Codec:
    """The codec of an `exlm.Tokenizer`, or the codec itself."""
    codec = getattr(tokenizer, "codec", tokenizer)
    if not all(hasattr(codec, name) for name in ("backend", "eos_ids", "size", "vocab")):
        raise InputError(
            f"A filter needs the model's exlm.Tokenizer to know its tokens, found {type(tokenizer).__name__}."
        )
    found: Codec = codec
    return found
