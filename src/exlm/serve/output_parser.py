"""From a model's text to response events: reasoning, content and tool calls, while the text is being
generated.

Reasoning is a `<think>` block at the beginning. Tool calls are written in the model's `ToolFormat`; text that
only looks like a call is content. The parser takes one character at a time, so its events do not depend on
how the text was cut into deltas.
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
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


ResponseEvent: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArgsDelta


class OutputParser:
    """Takes a model's text and gives response events.

    `in_reasoning`: the prompt ended inside a `<think>` block. `forced_call`: the prompt ended where a call
    begins. At most `max_calls` calls are reported; None reports all.
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
        self._pending_whitespace = ""  # held until it is known whether anything follows
        self._skip_whitespace = False  # whether whitespace is dropped until other text comes
        self._calls = ToolCallParser(
            self._source, tool_format or ToolFormat("generic"), tool_names, max_calls, self._emit
        )
        self._machine = self._run(in_reasoning, forced_call)
        next(self._machine)

    @property
    def calls(self) -> int:
        """The number of tool calls so far."""
        return self._calls.count

    def feed(self, text: str) -> list[ResponseEvent]:
        """The events of more text."""
        for char in text:
            self._machine.send(char)
        return self._take_events()

    def end(self) -> list[ResponseEvent]:
        """The remaining events, when no more text comes."""
        try:
            while True:
                self._machine.send(END_OF_TEXT)
        except StopIteration:
            return self._take_events()

    def _take_events(self) -> list[ResponseEvent]:
        events, self._events = self._events, []
        joined: list[ResponseEvent] = []
        for event in events:
            last = joined[-1] if joined else None
            match last, event:
                case (ContentDelta(before), ContentDelta(text)):
                    joined[-1] = ContentDelta(before + text)
                case (ReasoningDelta(before), ReasoningDelta(text)):
                    joined[-1] = ReasoningDelta(before + text)
                case (ToolCallArgsDelta(index, before), ToolCallArgsDelta(same, text)) if index == same:
                    joined[-1] = ToolCallArgsDelta(index, before + text)
                case _:
                    joined.append(event)
        return joined

    def _emit(self, event: ResponseEvent) -> None:
        self._events.append(event)

    def _run(self, in_reasoning: bool, forced_call: bool) -> Parsing[None]:
        if in_reasoning or (yield from self._starts_with(REASONING_START)):
            self._skip_whitespace = True
            yield from self._until(REASONING_END, lambda char: self._emit_text(ReasoningDelta, char))
            self._pending_whitespace, self._skip_whitespace = "", True
        if self.tool_format is not None:
            if forced_call or self.tool_format.bare_json:
                yield from self._leading_calls(self.tool_format, forced_call)
            if self.tool_format.start_marker:
                while (yield from self._until(self.tool_format.start_marker, self._emit_content)):
                    yield from self._call_block(
                        self.tool_format, self.tool_format.start_marker, announced=True
                    )
                    self._source.record.clear()
        yield from self._until("", self._emit_content)
        if self._pending_whitespace and not self._skip_whitespace:
            self._emit(ContentDelta(self._pending_whitespace))

    def _leading_calls(self, tool_format: ToolFormat, forced: bool) -> Parsing[None]:
        """Parse calls at the very beginning of the text; if forced, there is one."""
        self._source.record.clear()
        first = yield from self._source.skip_whitespace()
        while forced or first in ("{", "["):
            yield from self._call_block(tool_format, "", announced=forced)
            if tool_format.name != "llama3" or forced or not self._calls.committed:
                return
            first = yield from self._source.skip_whitespace()
            if first == ";":
                yield from self._source.read()
                first = yield from self._source.skip_whitespace()
            self._source.record.clear()
        self._emit_record("")

    def _call_block(self, tool_format: ToolFormat, start_marker: str, announced: bool) -> Parsing[None]:
        """Parse calls after `start_marker`; what is not a call becomes content."""
        if start_marker:
            self._source.record.clear()
        calls, before = self._calls, self._calls.count
        try:
            yield from calls.calls(announced)
            end = tool_format.end_marker
            if end and (yield from self._source.skip_whitespace()) == end[0]:
                yield from self._source.expect(end)
        except NotAToolCall:
            if not calls.committed and calls.count == before:
                self._emit_record(start_marker)
                return
            if tool_format.end_marker:
                yield from self._until(tool_format.end_marker, lambda char: None)
        self._source.record.clear()
        self._pending_whitespace, self._skip_whitespace = "", True

    def _emit_record(self, start_marker: str) -> None:
        """Emit the recorded characters as content: they are not a call."""
        for char in start_marker + "".join(self._source.record):
            self._emit_content(char)
        self._source.record.clear()

    def _starts_with(self, marker: str) -> Parsing[bool]:
        """Whether the text begins with a marker; if so, reads it and drops the whitespace before it."""
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
        """Emit characters up to a marker and read that; returns whether it came before the text ended."""
        held = ""
        while (char := (yield from self._source.read())) != END_OF_TEXT:
            self._source.record.clear()
            held += char
            while held and not marker.startswith(held):
                emit(held[0])
                held = held[1:]
            if held and held == marker:
                return True
        for rest in held:
            emit(rest)
        self._source.put_back(END_OF_TEXT)
        return False

    def _emit_content(self, char: str) -> None:
        self._emit_text(ContentDelta, char)

    def _emit_text(self, kind: type[ContentDelta] | type[ReasoningDelta], char: str) -> None:
        if char.isspace():
            self._pending_whitespace += char
            return
        self._emit(kind(char if self._skip_whitespace else self._pending_whitespace + char))
        self._pending_whitespace, self._skip_whitespace = "", False
