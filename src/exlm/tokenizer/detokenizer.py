"""Ids to text, all at once or as they arrive, whole characters only.

Most vocabularies are sums of bytes: decoding adds the bytes up and reads them as UTF-8, and a stream holds
back only bytes that may still become a character. A byte that cannot, shows as U+FFFD at once, so a stray one
never delays what follows. For the few tokenizers that are not sums of bytes, their library decodes a short
window of recent ids. Which ids are shown at all is decided by the caller's tables, not here.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from .vocab import REPLACEMENT


class Detokenizer(Protocol):
    """Text from ids as they arrive: everything `push` and `flush` return, joined, is the decoded text."""

    @property
    def pending(self) -> bool:
        """Whether bytes are held back that may still become a character."""

    def push(self, number: int) -> str:
        """Take one id; returns the text that is now certain, often none or more than that id's own."""

    def feed(self, ids: Iterable[int]) -> str:
        """Take several ids."""

    def flush(self) -> str:
        """The text still held back, as it stands; afterwards the stream goes on in the middle of a text."""

    def copy(self) -> Detokenizer:
        """A stream in the same state, for going back to."""


class TokenDecoder(Protocol):
    """How the ids of one vocabulary become text; `continues` says the text goes on after something else."""

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of all these ids."""

    def detokenizer(self, continues: bool = False) -> Detokenizer:
        """The same text, as the ids arrive."""


class ByteTokenDecoder:
    """Decoding by adding up bytes; ids outside the table, and those with no bytes, show nothing."""

    def __init__(self, table: Sequence[bytes], strips_leading_space: bool) -> None:
        """The bytes by id; `strips_space` drops one leading space from a text that starts here."""
        self.table = table
        self.strips_leading_space = strips_leading_space

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of all these ids."""
        table, size = self.table, len(self.table)
        text = b"".join([table[token_id] for token_id in ids if 0 <= token_id < size]).decode(
            "utf-8", "replace"
        )
        return text.removeprefix(" ") if self.strips_leading_space and not continues else text

    def detokenizer(self, continues: bool = False) -> Detokenizer:
        """The same text, as the ids arrive."""
        return _ByteDetokenizer(self.table, self.strips_leading_space and not continues)


class _ByteDetokenizer:
    def __init__(self, table: Sequence[bytes], strip_next_space: bool) -> None:
        self._table = table
        self._strip_next_space = strip_next_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, number: int) -> str:
        if not 0 <= number < len(self._table):
            return ""
        return self._strip_first_space(self._decode(self._table[number]))

    def feed(self, ids: Iterable[int]) -> str:
        return "".join([self.push(token_id) for token_id in ids])

    def flush(self) -> str:
        text = self._strip_first_space(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._strip_next_space = False
        return text

    def copy(self) -> Detokenizer:
        copied = _ByteDetokenizer(self._table, self._strip_next_space)
        copied._utf8.setstate(self._utf8.getstate())
        return copied

    def _decode(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        if data and data[-1] >= 0xA0:
            held = self._utf8.getstate()[0]
            if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
                # CPython's decoder waits for the third byte of a surrogate, which UTF-8 does not allow.
                text += self._utf8.decode(b"", final=True)
        return text

    def _strip_first_space(self, text: str) -> str:
        if self._strip_next_space and text:
            self._strip_next_space = False
            return text.removeprefix(" ")
        return text


class LibraryTokenDecoder:
    """Decoding by a library's own function, for vocabularies that are not sums of bytes.

    `before` are ids to put in front so that a text does not count as starting.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_shown: Callable[[int], bool],
        context_ids: Sequence[int],
    ) -> None:
        """`shown` says which ids may be decoded at all."""
        self._decode = decode
        self._is_shown = is_shown
        self._context_ids = list(context_ids)

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of all these ids."""
        shown_ids = [token_id for token_id in ids if self._is_shown(token_id)]
        if not continues:
            return self._decode(shown_ids)
        return self._decode(self._context_ids + shown_ids)[len(self._decode(self._context_ids)) :]

    def detokenizer(self, continues: bool = False) -> Detokenizer:
        """The same text, as the ids arrive."""
        return _WindowDetokenizer(self._decode, self._is_shown, self._context_ids if continues else [])


class _WindowDetokenizer:
    """Decodes a window: ids whose text is out, kept so that the next are not first, then the new ones."""

    MAX_TOKENS_PER_CHARACTER = 4  # in bytes, and so in tokens
    WINDOW = 8

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_shown: Callable[[int], bool], window: Sequence[int]
    ) -> None:
        self._decode = decode
        self._is_shown = is_shown
        self._window = list(window)
        self._emitted = decode(self._window) if self._window else ""
        self._cut_points = [len(self._window)]  # where the window may be cut: ends of whole characters
        self._num_pending = 0

    @property
    def pending(self) -> bool:
        return self._num_pending > 0

    def push(self, number: int) -> str:
        if not self._is_shown(number):
            return ""
        self._window.append(number)
        self._num_pending += 1
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._num_pending < self.MAX_TOKENS_PER_CHARACTER:
            return ""
        return self._emit(text)

    def feed(self, ids: Iterable[int]) -> str:
        return "".join([self.push(token_id) for token_id in ids])

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
