"""Decodes ids to text, all at once or incrementally, in whole characters.

In most vocabularies every token stands for bytes, and a text's bytes are those of its tokens joined. Then an
incremental decoder buffers only bytes that may still become a character; a byte that cannot is decoded to
U+FFFD at once, so that it does not delay the text behind it. For other vocabularies the tokenizer's library
decodes a short window of the latest ids. The caller's tables decide which ids are left out.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from .vocab import REPLACEMENT


class Detokenizer(Protocol):
    """Decodes ids incrementally: what `push` and `flush` return, joined, is the text of all ids."""

    @property
    def pending(self) -> bool:
        """Whether bytes are buffered that may still become a character."""

    def push(self, token_id: int) -> str:
        """Decode one id; returns the characters that it completes, which may begin in earlier ids; "" if none."""

    def feed(self, ids: Iterable[int]) -> str:
        """`push` several ids."""
        return "".join([self.push(token_id) for token_id in ids])

    def flush(self) -> str:
        """Return the buffered text, U+FFFD for an incomplete character; later ids are a continuation."""

    def copy(self) -> Detokenizer:
        """A detokenizer in the same state, to go back to."""


class TokenDecoder(Protocol):
    """Decodes the ids of one vocabulary; `continues` says that they are a continuation of other text."""

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of all these ids."""

    def detokenizer(self, continues: bool = False) -> Detokenizer:
        """A detokenizer that gives the same text incrementally."""


class ByteTokenDecoder(TokenDecoder):
    """Decodes by joining the bytes of tokens; an id outside the table has none."""

    def __init__(self, table: Sequence[bytes], strips_leading_space: bool) -> None:
        """`table` has the bytes by id. `strips_leading_space` drops one unless the text is a continuation."""
        self.table = table
        self.strips_leading_space = strips_leading_space

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        table, size = self.table, len(self.table)
        text = b"".join([table[token_id] for token_id in ids if 0 <= token_id < size]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space and not continues else text

    def detokenizer(self, continues: bool = False) -> Detokenizer:
        return _ByteDetokenizer(self.table, self.strips_leading_space and not continues)


class _ByteDetokenizer(Detokenizer):
    def __init__(self, table: Sequence[bytes], strip_next_space: bool) -> None:
        self._table = table
        self._strip_next_space = strip_next_space
        self._buffered = b""  # the start of a character

    @property
    def pending(self) -> bool:
        return bool(self._buffered)

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._table):
            return ""
        data = self._buffered + self._table[token_id]
        text, num_decoded = utf_8_decode(data, "replace")
        self._buffered = data[num_decoded:]
        if len(self._buffered) == 2 and self._buffered[0] == 0xED and self._buffered[1] >= 0xA0:
            # CPython's decoder waits for the third byte of a surrogate, which UTF-8 does not allow.
            text += self._decode_buffered()
        if self._strip_next_space and text:
            self._strip_next_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        self._strip_next_space = False
        return self._decode_buffered()

    def copy(self) -> Detokenizer:
        copied = _ByteDetokenizer(self._table, self._strip_next_space)
        copied._buffered = self._buffered
        return copied

    def _decode_buffered(self) -> str:
        """Decode an incomplete character, to U+FFFD."""
        text, self._buffered = self._buffered.decode("utf-8", "replace"), b""
        return text


class LibraryTokenDecoder(TokenDecoder):
    """Decodes with the tokenizer's library, for vocabularies whose tokens are not just bytes."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_shown: Callable[[int], bool], context_ids: Sequence[int]
    ) -> None:
        """Ids for which `is_shown` is false are left out; `context_ids` are decoded before a continuation."""
        self._decode = decode
        self._is_shown = is_shown
        self._context_ids = list(context_ids)

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        shown_ids = [token_id for token_id in ids if self._is_shown(token_id)]
        if not continues:
            return self._decode(shown_ids)
        return self._decode(self._context_ids + shown_ids)[len(self._decode(self._context_ids)) :]

    def detokenizer(self, continues: bool = False) -> Detokenizer:
        return _WindowDetokenizer(self._decode, self._is_shown, self._context_ids if continues else [])


class _WindowDetokenizer(Detokenizer):
    """Decodes a window of ids: some whose text was returned, as context for the others, then the new ones."""

    MAX_TOKENS_PER_CHARACTER = 4  # UTF-8 has at most 4 bytes, and a token at least one
    WINDOW = 8

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_shown: Callable[[int], bool], window: Sequence[int]
    ) -> None:
        self._decode = decode
        self._is_shown = is_shown
        self._window = list(window)
        self._emitted = decode(self._window) if self._window else ""
        self._cut_points = [len(self._window)]  # the window may be cut there: a character ends
        self._num_pending = 0

    @property
    def pending(self) -> bool:
        return self._num_pending > 0

    def push(self, token_id: int) -> str:
        if not self._is_shown(token_id):
            return ""
        self._window.append(token_id)
        self._num_pending += 1
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._num_pending < self.MAX_TOKENS_PER_CHARACTER:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window)) if self._num_pending else ""

    def copy(self) -> Detokenizer:
        copied = _WindowDetokenizer(self._decode, self._is_shown, [])
        copied._window, copied._emitted = list(self._window), self._emitted
        copied._cut_points, copied._num_pending = list(self._cut_points), self._num_pending
        return copied

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        self._emitted, self._num_pending = text, 0
        self._cut_points.append(len(self._window))
        if len(self._window) > 2 * self.WINDOW:
            cut = max(point for point in self._cut_points if point <= len(self._window) - self.WINDOW)
            self._window = self._window[cut:]
            self._cut_points = [point - cut for point in self._cut_points if point >= cut]
            self._emitted = self._decode(self._window)
        return new
