"""From a model's text to the parts of a message: thoughts, what is said, calls. As it comes, or all at once.

`Parser` takes one character after the other, so the parts do not depend on how a text was cut. A thought is
a `<think>` block at the beginning; calls are written in the model's `Style`. What only looks like a call is
text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from .tool_formats import ToolFormat
from .tool_parsers import (
    END_OF_TEXT,
    CharSource,
    NotAToolCall,
    Parsing,
    ToolCallArgsDelta,
    ToolCallParser,
    ToolCallStart,
)

REASONING_START, REASONING_END = "<think>", "</think>"


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the thoughts before the answer."""

    text: str


ResponseEvent: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArgsDelta


class OutputParser:
    """Text in, parts out.

    `thinking`: the prompt ended inside a `<think>` block. `forced`: the prompt ended where a call begins.
    `most` is how many calls are told of; None is all.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        tool_names: frozenset[str] = frozenset(),
        *,
        in_reasoning: bool = False,
        forced_call: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self.tool_format = tool_format
        self._events: list[ResponseEvent] = []
        self._source = CharSource()
        self._pending_whitespace = ""  # whitespace of which it is not known whether anything follows
        self._skip_whitespace = False  # whether whitespace is dropped until something else is said
        self._calls = ToolCallParser(
            self._source, tool_format or ToolFormat("generic"), tool_names, max_calls, self._emit
        )
        self._machine = self._run(in_reasoning, forced_call)
        next(self._machine)

    @property
    def calls(self) -> int:
        """How many calls there were so far."""
        return self._calls.count

    def feed(self, text: str) -> list[ResponseEvent]:
        """What more text amounts to."""
        for letter in text:
            self._machine.send(letter)
        return self._take_events()

    def end(self) -> list[ResponseEvent]:
        """What is left when no more text comes."""
        try:
            while True:
                self._machine.send(END_OF_TEXT)
        except StopIteration:
            return self._take_events()

    def _take_events(self) -> list[ResponseEvent]:
        told, self._events = self._events, []
        joined: list[ResponseEvent] = []
        for part in told:
            last = joined[-1] if joined else None
            match last, part:
                case (ContentDelta(before), ContentDelta(text)):
                    joined[-1] = ContentDelta(before + text)
                case (ReasoningDelta(before), ReasoningDelta(text)):
                    joined[-1] = ReasoningDelta(before + text)
                case (ToolCallArgsDelta(index, before), ToolCallArgsDelta(same, text)) if index == same:
                    joined[-1] = ToolCallArgsDelta(index, before + text)
                case _:
                    joined.append(part)
        return joined

    def _emit(self, part: ResponseEvent) -> None:
        self._events.append(part)

    def _run(self, thinking: bool, forced: bool) -> Parsing[None]:
        if thinking or (yield from self._starts_with(REASONING_START)):
            self._skip_whitespace = True
            yield from self._until(REASONING_END, lambda letter: self._emit_text(ReasoningDelta, letter))
            self._pending_whitespace, self._skip_whitespace = "", True
        if self.tool_format is not None:
            if forced or self.tool_format.bare_json:
                yield from self._leading_calls(self.tool_format, forced)
            if self.tool_format.start_marker:
                while (yield from self._until(self.tool_format.start_marker, self._emit_content)):
                    yield from self._call_block(
                        self.tool_format, self.tool_format.start_marker, announced=True
                    )
                    self._source.record.clear()
        yield from self._until("", self._emit_content)
        if self._pending_whitespace and not self._skip_whitespace:
            self._emit(ContentDelta(self._pending_whitespace))

    def _leading_calls(self, style: ToolFormat, forced: bool) -> Parsing[None]:
        """Calls at the very beginning; one is there in any case if the prompt saw to that."""
        self._source.record.clear()
        first = yield from self._source.skip_whitespace()
        while forced or first in ("{", "["):
            yield from self._call_block(style, "", announced=forced)
            if style.name != "llama3" or forced or not self._calls.committed:
                return
            first = yield from self._source.skip_whitespace()
            if first == ";":
                yield from self._source.read()
                first = yield from self._source.skip_whitespace()
            self._source.record.clear()
        self._emit_record("")

    def _call_block(self, style: ToolFormat, opened: str, announced: bool) -> Parsing[None]:
        """Calls after `opened`; text after all if they are none."""
        if opened:
            self._source.record.clear()
        calls, before = self._calls, self._calls.count
        try:
            yield from calls.calls(announced)
            if style.end_marker and (yield from self._source.skip_whitespace()) == style.end_marker[0]:
                yield from self._source.expect(style.end_marker)
        except NotAToolCall:
            if not calls.committed and calls.count == before:
                self._emit_record(opened)
                return
            if style.end_marker:
                yield from self._until(style.end_marker, lambda letter: None)
        self._source.record.clear()
        self._pending_whitespace, self._skip_whitespace = "", True

    def _emit_record(self, opened: str) -> None:
        """Say what was read for nothing."""
        for letter in opened + "".join(self._source.record):
            self._emit_content(letter)
        self._source.record.clear()

    def _starts_with(self, marker: str) -> Parsing[bool]:
        """Whether the text begins with a marker, which is then read, and the whitespace before it dropped."""
        yield from self._source.skip_whitespace()
        try:
            yield from self._source.expect(marker)
        except NotAToolCall:
            read = "".join(self._source.record)
            if read:
                self._source.put_back(read)
            return False
        self._source.record.clear()
        return True

    def _until(self, marker: str, emit: Callable[[str], None]) -> Parsing[bool]:
        """Hand on characters up to a marker, which is read; whether it came before the end."""
        held = ""
        while (letter := (yield from self._source.read())) != END_OF_TEXT:
            self._source.record.clear()
            held += letter
            while held and not marker.startswith(held):
                emit(held[0])
                held = held[1:]
            if held and held == marker:
                return True
        for rest in held:
            emit(rest)
        self._source.put_back(END_OF_TEXT)
        return False

    def _emit_content(self, letter: str) -> None:
        self._emit_text(ContentDelta, letter)

    def _emit_text(self, kind: type[ContentDelta] | type[ReasoningDelta], letter: str) -> None:
        if letter.isspace():
            self._pending_whitespace += letter
            return
        self._emit(kind(letter if self._skip_whitespace else self._pending_whitespace + letter))
        self._pending_whitespace, self._skip_whitespace = "", False
