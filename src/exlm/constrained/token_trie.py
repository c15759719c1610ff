"""The bytes of every token of a vocabulary, indexed by prefix.

Tokens without visible text (special tokens, padding, EOS, unused ids) have no bytes here, nor has a token
whose vocabulary shows it only as a replacement character, so that its bytes are unknown.
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
    """Token bytes by id, and the trie of all tokens, stored as a sorted array.

    `keys` are the distinct byte strings, ascending, so all tokens with a common prefix are one range of them.
    The tokens of `keys[low:high]` are `ids[key_starts[low]:key_starts[high]]`.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes` holds the bytes by id, empty for tokens without visible text."""
        self.token_bytes = token_bytes
        order = sorted(
            (token_id for token_id, raw in enumerate(token_bytes) if raw),
            key=lambda token_id: token_bytes[token_id],
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


class _TokenTrieCache:
    """One trie for each vocabulary in use."""

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
    """The trie of a vocabulary, built at the first call."""
    return _TRIES.get(codec)


def visible_token_bytes(codec: Codec) -> list[bytes]:
    """By id, the bytes that a token adds in the middle of a text."""
    pieces = codec.vocab.pieces()
    known = codec.backend.token_bytes()
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
