"""Tool calls written as JSON, parsed one character at a time; `output_parser` finds where they begin.

The parser is a set of coroutines (generators): it reads like a recursive-descent parser of a whole text, yet
can wait for the next character anywhere, so how a stream is cut into deltas makes no difference.
`pydantic_core.from_json(..., allow_partial=True)` cannot replace it. That gives values, but clients get a
call's arguments as the model wrote them, character by character; it parses all text so far anew for each
delta; it does not say where an object ends and other text follows; and what turns out not to be a call must
come back as text.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from .tool_formats import ToolFormat

T = TypeVar("T")
Parsing: TypeAlias = Generator[None, str, T]
"""A coroutine that is sent characters, and "" at the end of the text, until it returns a T."""

END_OF_TEXT = ""
NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_.-")
JSON_CHARS = frozenset(string.digits + string.whitespace + "{}[],:+-.eEtrufalsn")
ARGUMENTS_KEYS = ("arguments", "parameters")


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


class NotAToolCall(Exception):
    """The text is not a tool call, or a malformed one."""


class CharSource:
    """The characters of a text, with push-back, and a record of those read since it was last cleared."""

    def __init__(self) -> None:
        self._back: list[str] = []
        self.record: list[str] = []

    def read(self) -> Parsing[str]:
        """The next character."""
        char = self._back.pop() if self._back else (yield)
        self.record.append(char)
        return char

    def put_back(self, chars: str) -> None:
        """Make the last characters be read again; the end of the text, if `chars` is empty."""
        pushed = list(chars) or [END_OF_TEXT]
        self._back += reversed(pushed)
        del self.record[len(self.record) - len(pushed) :]

    def peek(self) -> Parsing[str]:
        """The next character, without reading it."""
        char = yield from self.read()
        self.put_back(char)
        return char

    def skip_whitespace(self) -> Parsing[str]:
        """Read whitespace; returns the character after it without reading that."""
        while (char := (yield from self.read())).isspace():
            pass
        self.put_back(char)
        return char

    def expect(self, text: str) -> Parsing[None]:
        """Read exactly this text, else raise NotAToolCall."""
        for wanted in text:
            char = yield from self.read()
            if char != wanted:
                self.put_back(char)
                raise NotAToolCall


class ToolCallParser:
    """Parses calls and emits their events. Where no marker announces a call, its name must be in `names`."""

    def __init__(
        self,
        source: CharSource,
        tool_format: ToolFormat,
        names: frozenset[str],
        max_calls: int | None,
        emit: Callable[[Any], None],
    ) -> None:
        """Calls after the first `max_calls` are parsed but not emitted."""
        self.source, self.tool_format, self.names = source, tool_format, names
        self.max_calls, self.emit = max_calls, emit
        self.count = 0
        self.committed = False
        """Whether the start of the current call was emitted: it can no longer become text."""

    def calls(self, announced: bool) -> Parsing[None]:
        """Parse one call, or a list of calls."""
        self.committed = False
        first = yield from self.source.skip_whitespace()
        if first == "[" and (self.tool_format.is_list or self.tool_format.bare_json):
            yield from self.call_list(announced)
        elif first != "{" and self.tool_format.is_list:
            yield from self.mistral_call()
        else:
            yield from self.call_object(announced)

    def call_list(self, announced: bool) -> Parsing[None]:
        """Parse `[{…}, {…}]`."""
        yield from self.source.expect("[")
        while True:
            yield from self.call_object(announced)
            after = yield from self.source.skip_whitespace()
            if after != ",":
                break
            yield from self.source.read()
        yield from self.source.expect("]")

    def mistral_call(self) -> Parsing[None]:
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
        yield from self.arguments(self.start_call(name, announced=True))

    def call_object(self, announced: bool) -> Parsing[None]:
        """Parse `{"name": …, "arguments": …}`, in either order; other fields are skipped."""
        name: str | None = None
        early: list[str] = []  # arguments before the name
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
                self.check_name(name, announced)
            elif key in ARGUMENTS_KEYS and index < 0 and not early:
                if name is None:
                    yield from self.argument_text(early.append)
                else:
                    index = self.start_call(name, announced)
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
            self.emit_args(self.start_call(name, announced), "".join(early) or "{}")
        yield from self.source.expect("}")

    def check_name(self, name: str, announced: bool) -> None:
        """Raise NotAToolCall unless this can be the name of a call."""
        if not name or (not announced and name not in self.names):
            raise NotAToolCall

    def start_call(self, name: str, announced: bool) -> int:
        """Emit the start of a call; returns its index."""
        self.check_name(name, announced)
        self.committed = True
        self.count += 1
        if self.max_calls is None or self.count <= self.max_calls:
            self.emit(ToolCallStart(self.count - 1, name))
        return self.count - 1

    def emit_args(self, index: int, text: str) -> None:
        """Emit more of a call's arguments."""
        if text and (self.max_calls is None or index < self.max_calls):
            self.emit(ToolCallArgsDelta(index, text))

    def arguments(self, index: int) -> Parsing[None]:
        """Parse and emit the arguments of a call that was started."""
        yield from self.argument_text(lambda text: self.emit_args(index, text))

    def argument_text(self, emit: Callable[[str], None]) -> Parsing[None]:
        """Parse arguments: an object, a string that contains one, or null for none."""
        first = yield from self.source.skip_whitespace()
        if first == '"':
            emit(decode_json_string((yield from self.json_string())))
        elif first == "n":
            yield from self.source.expect("null")
            emit("{}")
        else:
            yield from self.value(emit)

    def value(self, emit: Callable[[str], None]) -> Parsing[None]:
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

    def json_string(self) -> Parsing[str]:
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
