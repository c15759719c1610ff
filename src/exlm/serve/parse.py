"""From a model's text to the parts of a message: thoughts, what is said, calls. As it comes, or all at once.

`Parser` takes one character after the other, so the parts do not depend on how a text was cut. A thought is
a `<think>` block at the beginning; calls are written in the model's `Style`. What only looks like a call is
text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from .calls import END, Argued, Called, CallReader, Malformed, Reading, Source
from .styles import Style

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class Said:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """More of the thoughts before the answer."""

    text: str


Part: TypeAlias = Said | Thought | Called | Argued


class Parser:
    """Text in, parts out.

    `thinking`: the prompt ended inside a `<think>` block. `forced`: the prompt ended where a call begins.
    `most` is how many calls are told of; None is all.
    """

    def __init__(
        self,
        style: Style | None = None,
        names: frozenset[str] = frozenset(),
        *,
        thinking: bool = False,
        forced: bool = False,
        most: int | None = None,
    ) -> None:
        self.style = style
        self._told: list[Part] = []
        self._source = Source()
        self._blank = ""  # whitespace of which it is not known whether anything follows
        self._fresh = False  # whether whitespace is dropped until something else is said
        self._calls = CallReader(self._source, style or Style("generic"), names, most, self._tell)
        self._machine = self._run(thinking, forced)
        next(self._machine)

    @property
    def calls(self) -> int:
        """How many calls there were so far."""
        return self._calls.count

    def feed(self, text: str) -> list[Part]:
        """What more text amounts to."""
        for letter in text:
            self._machine.send(letter)
        return self._taken()

    def end(self) -> list[Part]:
        """What is left when no more text comes."""
        try:
            while True:
                self._machine.send(END)
        except StopIteration:
            return self._taken()

    def _taken(self) -> list[Part]:
        told, self._told = self._told, []
        joined: list[Part] = []
        for part in told:
            last = joined[-1] if joined else None
            match last, part:
                case (Said(before), Said(text)):
                    joined[-1] = Said(before + text)
                case (Thought(before), Thought(text)):
                    joined[-1] = Thought(before + text)
                case (Argued(index, before), Argued(same, text)) if index == same:
                    joined[-1] = Argued(index, before + text)
                case _:
                    joined.append(part)
        return joined

    def _tell(self, part: Part) -> None:
        self._told.append(part)

    def _run(self, thinking: bool, forced: bool) -> Reading[None]:
        if thinking or (yield from self._opens_with(THINK)):
            self._fresh = True
            yield from self._until(THOUGHT, lambda letter: self._put(Thought, letter))
            self._blank, self._fresh = "", True
        if self.style is not None:
            if forced or self.style.bare:
                yield from self._at_once(self.style, forced)
            if self.style.opens:
                while (yield from self._until(self.style.opens, self._say)):
                    yield from self._block(self.style, self.style.opens, announced=True)
                    self._source.record.clear()
        yield from self._until("", self._say)
        if self._blank and not self._fresh:
            self._tell(Said(self._blank))

    def _at_once(self, style: Style, forced: bool) -> Reading[None]:
        """Calls at the very beginning; one is there in any case if the prompt saw to that."""
        self._source.record.clear()
        first = yield from self._source.blanks()
        while forced or first in ("{", "["):
            yield from self._block(style, "", announced=forced)
            if style.name != "llama3" or forced or not self._calls.committed:
                return
            first = yield from self._source.blanks()
            if first == ";":
                yield from self._source.read()
                first = yield from self._source.blanks()
            self._source.record.clear()
        self._spill("")

    def _block(self, style: Style, opened: str, announced: bool) -> Reading[None]:
        """Calls after `opened`; text after all if they are none."""
        if opened:
            self._source.record.clear()
        calls, before = self._calls, self._calls.count
        try:
            yield from calls.calls(announced)
            if style.closes and (yield from self._source.blanks()) == style.closes[0]:
                yield from self._source.expect(style.closes)
        except Malformed:
            if not calls.committed and calls.count == before:
                self._spill(opened)
                return
            if style.closes:
                yield from self._until(style.closes, lambda letter: None)
        self._source.record.clear()
        self._blank, self._fresh = "", True

    def _spill(self, opened: str) -> None:
        """Say what was read for nothing."""
        for letter in opened + "".join(self._source.record):
            self._say(letter)
        self._source.record.clear()

    def _opens_with(self, marker: str) -> Reading[bool]:
        """Whether the text begins with a marker, which is then read, and the whitespace before it dropped."""
        yield from self._source.blanks()
        try:
            yield from self._source.expect(marker)
        except Malformed:
            read = "".join(self._source.record)
            if read:
                self._source.put_back(read)
            return False
        self._source.record.clear()
        return True

    def _until(self, marker: str, emit: Callable[[str], None]) -> Reading[bool]:
        """Hand on characters up to a marker, which is read; whether it came before the end."""
        held = ""
        while (letter := (yield from self._source.read())) != END:
            self._source.record.clear()
            held += letter
            while held and not marker.startswith(held):
                emit(held[0])
                held = held[1:]
            if held and held == marker:
                return True
        for rest in held:
            emit(rest)
        self._source.put_back(END)
        return False

    def _say(self, letter: str) -> None:
        self._put(Said, letter)

    def _put(self, kind: type[Said] | type[Thought], letter: str) -> None:
        if letter.isspace():
            self._blank += letter
            return
        self._tell(kind(letter if self._fresh else self._blank + letter))
        self._blank, self._fresh = "", False
