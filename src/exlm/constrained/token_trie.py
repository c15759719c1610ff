"""The tokens of a vocabulary by the bytes they add to a text, in an order that finds them by their beginning.

Tokens that show nothing (special ones, padding, EOS, ids without a token) have no bytes here, and so does one
whose bytes are unknown because its vocabulary shows it only as part of a character. Nothing here knows what
a filter wants.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..tokenizer import Codec
from ..tokenizer.vocab import REPLACEMENT, UNDEFINED


class TokenTrie:
    """Token bytes by id, and the ids sorted by those bytes.

    `keys` are the different byte strings, ascending; the tokens of `keys[low:high]` are
    `ids[starts[low]:starts[high]]`.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`table` holds the bytes by id, none where a token shows nothing."""
        self.token_bytes = token_bytes
        order = sorted(
            (number for number, raw in enumerate(token_bytes) if raw), key=lambda number: token_bytes[number]
        )
        self.ids: NDArray[np.int64] = np.array(order, np.int64)
        self.keys: list[bytes] = []
        starts = []
        for place, number in enumerate(order):
            if not self.keys or self.keys[-1] != token_bytes[number]:
                self.keys.append(token_bytes[number])
                starts.append(place)
        self.key_starts = [*starts, len(order)]

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return len(self.token_bytes)

    @cached_property
    def single_bytes(self) -> frozenset[int]:
        """The bytes that have a token of their own."""
        return frozenset(key[0] for key in self.keys if len(key) == 1)

    def prefix_range(self, prefix: bytes, low: int, high: int) -> tuple[int, int]:
        """Where in `keys[low:high]` those lie that start with a text of UTF-8 bytes."""
        first = bisect_left(self.keys, prefix, low, high)
        if first == high or not self.keys[first].startswith(prefix):
            return first, first
        next_prefix = prefix[:-1] + bytes((prefix[-1] + 1,))  # UTF-8 has no byte 255
        return first, bisect_left(self.keys, next_prefix, first, high)

    def ids_in_range(self, low: int, high: int) -> NDArray[np.int64]:
        """The ids of `keys[low:high]`."""
        return self.ids[self.key_starts[low] : self.key_starts[high]]


class _TokenTrieCache:
    """One lexicon for each vocabulary in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._built: WeakKeyDictionary[Codec, TokenTrie] = WeakKeyDictionary()

    def get(self, codec: Codec) -> TokenTrie:
        with self._lock:
            found = self._built.get(codec)
            if found is None:
                found = self._built[codec] = TokenTrie(visible_token_bytes(codec))
            return found


_TRIES = _TokenTrieCache()


def token_trie_of(codec: Codec) -> TokenTrie:
    """The lexicon of a vocabulary, built at the first call."""
    return _TRIES.get(codec)


def visible_token_bytes(codec: Codec) -> list[bytes]:
    """By id, the bytes a token adds in the middle of a text."""
    pieces = codec.vocab.pieces()
    known = codec.backend.token_bytes()
    if known is None:
        table = [b"" if REPLACEMENT in piece else piece.encode() for piece in pieces]
    else:
        table = [raw if piece else b"" for piece, raw in zip(pieces, known.table, strict=True)]
    hidden = {number for number, piece in enumerate(pieces) if piece == UNDEFINED}
    for number in hidden | {codec.pad_id, *codec.eos_ids}:
        if 0 <= number < len(table):
            table[number] = b""
    return table


def codec_of(tokenizer: Any) -> Codec:
    """The vocabulary behind a tokenizer."""
    codec = getattr(tokenizer, "codec", tokenizer)
    if not all(hasattr(codec, name) for name in ("backend", "eos_ids", "size", "vocab")):
        raise InputError(
            f"A filter needs the model's exlm.Tokenizer to know its tokens, found {type(tokenizer).__name__}."
        )
    found: Codec = codec
    return found
