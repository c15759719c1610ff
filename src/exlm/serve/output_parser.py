"""From a model's text to response events, while the text is being generated: reasoning, content, tool calls.

Reasoning is a `<think>` block at the beginning. Tool calls are written in the model's `ToolFormat`; text that
only looks like a call is content. The parser takes one character at a time, so its events do not depend on
how the text was cut into deltas. It is a set of coroutines (generators): it reads like a recursive-descent
parser of a complete text, yet can wait for the next character anywhere.

`pydantic_core.from_json(..., allow_partial=True)` cannot replace the parser of calls. That gives values, but
clients get a call's arguments as the model wrote them, character by character; it parses all text so far anew
for each delta; it does not say where an object ends and other text follows; and what turns out not to be a
call must come back as text.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from .tool_formats import ToolFormat

T = TypeVar("T")
CharCoroutine: TypeAlias = Generator[None, str, T]
"""A coroutine that is sent one character at a time, and "" at the end of the text, until it returns a T."""

REASONING_START, REASONING_END = "<think>", "</think>"
END_OF_TEXT = ""
NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_.-")
JSON_CHARS = frozenset(string.digits + string.whitespace + "{}[],:+-.eEtrufalsn")
ARGUMENTS_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool call begins."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArgsDelta:
    """More of a tool call's arguments, as JSON text."""

    index: int
    text: str


ResponseEvent: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArgsDelta


class NotAToolCall(Exception):
    """The text is not a tool call, or a malformed one."""


class CharSource:
    """The characters of a text, with push-back, and a record of those read since it was cleared, for backtracking."""

    def __init__(self) -> None:
        self._back: list[str] = []
        self.record: list[str] = []

    def read(self) -> CharCoroutine[str]:
        char = self._back.pop() if self._back else (yield)
        self.record.append(char)
        return char

    def put_back(self, chars: str) -> None:
        """Push back the characters that were read last; the end of the text if `chars` is empty."""
        pushed = list(chars) or [END_OF_TEXT]
        self._back += reversed(pushed)
        del self.record[len(self.record) - len(pushed) :]

    def peek(self) -> CharCoroutine[str]:
        char = yield from self.read()
        self.put_back(char)
        return char

    def skip_whitespace(self) -> CharCoroutine[str]:
        """Read whitespace; returns the character after it without reading that."""
        while (char := (yield from self.read())).isspace():
            pass
        self.put_back(char)
        return char

    def expect(self, text: str) -> CharCoroutine[None]:
        """Read exactly this text, else raise NotAToolCall."""
        for wanted in text:
            char = yield from self.read()
            if char != wanted:
                self.put_back(char)
                raise NotAToolCall


class ToolCallParser:
    """Parses calls and emits their events.

    `marked`: a marker precedes the call, or the prompt forces one. Otherwise the text only is a call if its
    name is in `names`.
    """

    def __init__(
        self,
        source: CharSource,
        tool_format: ToolFormat,
        names: frozenset[str],
        max_calls: int | None,
        emit: Callable[[ResponseEvent], None],
    ) -> None:
        """Calls after the first `max_calls` are parsed but not emitted."""
        self.source, self.tool_format, self.names = source, tool_format, names
        self.max_calls, self.emit = max_calls, emit
        self.count = 0
        self.committed = False
        """Whether the start of the current call was emitted, so that it cannot become text any more."""

    def calls(self, marked: bool) -> CharCoroutine[None]:
        self.committed = False
        first = yield from self.source.skip_whitespace()
        if first == "[" and (self.tool_format.is_list or self.tool_format.bare_json):
            yield from self.call_list(marked)
        elif first != "{" and self.tool_format.is_list:
            yield from self.mistral_call()
        else:
            yield from self.call_object(marked)

    def call_list(self, marked: bool) -> CharCoroutine[None]:
        """Parse `[{…}, {…}]`."""
        yield from self.source.expect("[")
        while True:
            yield from self.call_object(marked)
            after = yield from self.source.skip_whitespace()
            if after != ",":
                break
            yield from self.source.read()
        yield from self.source.expect("]")

    def mistral_call(self) -> CharCoroutine[None]:
        """Parse Mistral's `name[ARGS]{…}`."""
        name = ""
        while (char := (yield from self.source.read())) in NAME_CHARS and char:
            name += char
        self.source.put_back(char)
        if not name:
            raise NotAToolCall
        if char == "[":
            yield from self.source.expect("[ARGS]")
        if (yield from self.source.skip_whitespace()) != "{":
            raise NotAToolCall
        yield from self.arguments(self.start_call(name, marked=True))

    def call_object(self, marked: bool) -> CharCoroutine[None]:
        """Parse `{"name": …, "arguments": …}`, in either order; other fields are skipped."""
        name: str | None = None
        early: list[str] = []  # arguments that come before the name
        index = -1
        yield from self.source.skip_whitespace()
        yield from self.source.expect("{")
        while True:
            yield from self.source.skip_whitespace()
            key = decode_json_string((yield from self.json_string()))
            yield from self.source.skip_whitespace()
            yield from self.source.expect(":")
            value = yield from self.source.skip_whitespace()
            if key == "name" and name is None and value == '"':
                name = decode_json_string((yield from self.json_string()))
                self.check_name(name, marked)
            elif key in ARGUMENTS_KEYS and index < 0 and not early:
                if name is None:
                    yield from self.argument_text(early.append)
                else:
                    index = self.start_call(name, marked)
                    yield from self.arguments(index)
            else:
                yield from self.value(lambda _: None)
            after = yield from self.source.skip_whitespace()
            if after == "}":
                break
            yield from self.source.expect(",")
        if index < 0:
            if name is None:
                raise NotAToolCall
            self.emit_args(self.start_call(name, marked), "".join(early) or "{}")
        yield from self.source.expect("}")

    def check_name(self, name: str, marked: bool) -> None:
        """Raise NotAToolCall unless this can be the name of a call."""
        if not name or (not marked and name not in self.names):
            raise NotAToolCall

    def start_call(self, name: str, marked: bool) -> int:
        """Emit the start of a call; returns its index."""
        self.check_name(name, marked)
        self.committed = True
        self.count += 1
        if self.max_calls is None or self.count <= self.max_calls:
            self.emit(ToolCallStart(self.count - 1, name))
        return self.count - 1

    def emit_args(self, index: int, text: str) -> None:
        if text and (self.max_calls is None or index < self.max_calls):
            self.emit(ToolCallArgsDelta(index, text))

    def arguments(self, index: int) -> CharCoroutine[None]:
        yield from self.argument_text(lambda text: self.emit_args(index, text))

    def argument_text(self, emit: Callable[[str], None]) -> CharCoroutine[None]:
        """Parse arguments: an object, a string that contains one, or null for none."""
        first = yield from self.source.skip_whitespace()
        if first == '"':
            emit(decode_json_string((yield from self.json_string())))
        elif first == "n":
            yield from self.source.expect("null")
            emit("{}")
        else:
            yield from self.value(emit)

    def value(self, emit: Callable[[str], None]) -> CharCoroutine[None]:
        """Parse any JSON value by counting brackets; characters that JSON has only in strings end it."""
        depth = 0
        while True:
            char = yield from self.source.peek()
            if char == '"':
                emit((yield from self.json_string()))
            elif depth == 0 and (char in ",}]" or char.isspace()):
                return  # the end of a number or a word
            elif char not in JSON_CHARS or char == END_OF_TEXT:
                raise NotAToolCall
            else:
                yield from self.source.read()
                emit(char)
                depth += (char in "{[") - (char in "}]")
                if depth == 0 and char not in "{[}]":
                    continue
            if depth == 0:
                return

    def json_string(self) -> CharCoroutine[str]:
        """Parse a JSON string; returns it as written, quotes included."""
        yield from self.source.expect('"')
        raw = '"'
        while True:
            char = yield from self.source.read()
            if char == END_OF_TEXT:
                self.source.put_back(END_OF_TEXT)
                raise NotAToolCall
            raw += char
            if char == "\\":
                raw += yield from self.source.read()
            elif char == '"':
                return raw


def decode_json_string(raw: str) -> str:
    """The value of a JSON string; lone surrogates, which UTF-8 cannot encode, become `?`."""
    try:
        text: str = json.loads(raw, strict=False)
    except ValueError:
        raise NotAToolCall from None
    return text.encode("utf-8", "replace").decode()


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
        self._pending_whitespace = ""  # emitted only if other text follows
        self._skip_whitespace = False  # whitespace is dropped until other text comes
        self._calls = ToolCallParser(
            self._source, tool_format or ToolFormat("generic"), tool_names, max_calls, self._emit
        )
        self._coroutine = self._run(in_reasoning, forced_call)
        next(self._coroutine)

    @property
    def calls(self) -> int:
        return self._calls.count

    def feed(self, text: str) -> list[ResponseEvent]:
        for char in text:
            self._coroutine.send(char)
        return self._take_events()

    def end(self) -> list[ResponseEvent]:
        """The remaining events, when no more text comes."""
        try:
            while True:
                self._coroutine.send(END_OF_TEXT)
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

    def _run(self, in_reasoning: bool, forced_call: bool) -> CharCoroutine[None]:
        if in_reasoning or (yield from self._starts_with(REASONING_START)):
            self._skip_whitespace = True
            yield from self._until(REASONING_END, lambda char: self._emit_text(ReasoningDelta, char))
            self._pending_whitespace, self._skip_whitespace = "", True
        if self.tool_format is not None:
            if forced_call or self.tool_format.bare_json:
                yield from self._leading_calls(self.tool_format, forced_call)
            if self.tool_format.start_marker:
                while (yield from self._until(self.tool_format.start_marker, self._emit_content)):
                    yield from self._call_block(self.tool_format, self.tool_format.start_marker, marked=True)
                    self._source.record.clear()
        yield from self._until("", self._emit_content)
        if self._pending_whitespace and not self._skip_whitespace:
            self._emit(ContentDelta(self._pending_whitespace))

    def _leading_calls(self, tool_format: ToolFormat, forced: bool) -> CharCoroutine[None]:
        """Parse calls at the very beginning of the text; if forced, there is one."""
        self._source.record.clear()
        first = yield from self._source.skip_whitespace()
        while forced or first in ("{", "["):
            yield from self._call_block(tool_format, "", marked=forced)
            if tool_format.name != "llama3" or forced or not self._calls.committed:
                return
            first = yield from self._source.skip_whitespace()
            if first == ";":
                yield from self._source.read()
                first = yield from self._source.skip_whitespace()
            self._source.record.clear()
        self._emit_record("")

    def _call_block(self, tool_format: ToolFormat, start_marker: str, marked: bool) -> CharCoroutine[None]:
        """Parse calls after `start_marker`; what is not a call becomes content."""
        if start_marker:
            self._source.record.clear()
        calls, before = self._calls, self._calls.count
        try:
            yield from calls.calls(marked)
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

    def _starts_with(self, marker: str) -> CharCoroutine[bool]:
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

    def _until(self, marker: str, emit: Callable[[str], None]) -> CharCoroutine[bool]:
        """Emit characters up to a marker and read that; returns whether it came before the text ended."""
        matched = ""  # a prefix of the marker
        while (char := (yield from self._source.read())) != END_OF_TEXT:
            self._source.record.clear()
            matched += char
            while matched and not marker.startswith(matched):
                emit(matched[0])
                matched = matched[1:]
            if matched and matched == marker:
                return True
        for rest in matched:
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
