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

REPLACEMENT = "\ufffd"
"""What UTF-8 decoders show for bytes that are not text."""


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


class Decoding(Protocol):
    """How the ids of one vocabulary become text; `continues` says the text goes on after something else."""

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of all these ids."""

    def stream(self, continues: bool = False) -> Detokenizer:
        """The same text, as the ids arrive."""


class ByteDecoding:
    """Decoding by adding up bytes; ids outside the table, and those with no bytes, show nothing."""

    def __init__(self, table: Sequence[bytes], strips_space: bool) -> None:
        """The bytes by id; `strips_space` drops one leading space from a text that starts here."""
        self.table = table
        self.strips_space = strips_space

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of all these ids."""
        table, size = self.table, len(self.table)
        text = b"".join([table[number] for number in ids if 0 <= number < size]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space and not continues else text

    def stream(self, continues: bool = False) -> Detokenizer:
        """The same text, as the ids arrive."""
        return _ByteStream(self.table, self.strips_space and not continues)


class _ByteStream:
    def __init__(self, table: Sequence[bytes], strip: bool) -> None:
        self._table = table
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, number: int) -> str:
        if not 0 <= number < len(self._table):
            return ""
        return self._first(self._utf8.decode(self._table[number]))

    def feed(self, ids: Iterable[int]) -> str:
        return "".join([self.push(number) for number in ids])

    def flush(self) -> str:
        text = self._first(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._strip = False
        return text

    def copy(self) -> Detokenizer:
        other = _ByteStream(self._table, self._strip)
        other._utf8.setstate(self._utf8.getstate())
        return other

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class LibraryDecoding:
    """Decoding by a library's own function, for vocabularies that are not sums of bytes.

    `before` are ids to put in front so that a text does not count as starting.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], shown: Callable[[int], bool], before: Sequence[int]
    ) -> None:
        """`shown` says which ids may be decoded at all."""
        self._decode = decode
        self._shown = shown
        self._before = list(before)

    def decode(self, ids: Iterable[int], continues: bool = False) -> str:
        """The text of all these ids."""
        kept = [number for number in ids if self._shown(number)]
        if not continues:
            return self._decode(kept)
        return self._decode(self._before + kept)[len(self._decode(self._before)) :]

    def stream(self, continues: bool = False) -> Detokenizer:
        """The same text, as the ids arrive."""
        return _LibraryStream(self._decode, self._shown, self._before if continues else [])


class _LibraryStream:
    """Decodes a window: ids whose text is out, kept so that the next are not first, then the new ones."""

    LONGEST_CHARACTER = 4  # in bytes, and so in tokens
    WINDOW = 8

    def __init__(
        self, decode: Callable[[Sequence[int]], str], shown: Callable[[int], bool], window: Sequence[int]
    ) -> None:
        self._decode = decode
        self._shown = shown
        self._window = list(window)
        self._out = decode(self._window) if self._window else ""
        self._clean = [len(self._window)]  # where the window may be cut: ends of whole characters
        self._held = 0

    @property
    def pending(self) -> bool:
        return self._held > 0

    def push(self, number: int) -> str:
        if not self._shown(number):
            return ""
        self._window.append(number)
        self._held += 1
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._held < self.LONGEST_CHARACTER:
            return ""
        return self._emit(text)

    def feed(self, ids: Iterable[int]) -> str:
        return "".join([self.push(number) for number in ids])

    def flush(self) -> str:
        return self._emit(self._decode(self._window)) if self._held else ""

    def copy(self) -> Detokenizer:
        other = _LibraryStream(self._decode, self._shown, [])
        other._window, other._out = list(self._window), self._out
        other._clean, other._held = list(self._clean), self._held
        return other

    def _emit(self, text: str) -> str:
        new = text[len(self._out) :]
        self._out, self._held = text, 0
        self._clean.append(len(self._window))
        if len(self._window) > 2 * self.WINDOW:
            cut = max(place for place in self._clean if place <= len(self._window) - self.WINDOW)
            self._window = self._window[cut:]
            self._clean = [place - cut for place in self._clean if place >= cut]
            self._out = self._decode(self._window)
        return new
