"""Tool calls as they are spelled: a reader of JSON objects that is given one character at a time.

It is written as coroutines, so that it reads like a parser of whole texts and yet can wait anywhere; how a
text is cut can therefore make no difference. What is around calls in an answer belongs to `parse`.
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
"""Takes characters, "" at the end of the text, until it knows."""

END_OF_TEXT = ""
NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_.-")
JSON_CHARS = frozenset(string.digits + string.whitespace + "{}[],:+-.eEtrufalsn")
ARGUMENTS_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArgsDelta:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


class NotAToolCall(Exception):
    """This is no call."""


class CharSource:
    """The characters: read, put back, and recorded while it is not known what they are."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._back: list[str] = []
        self.record: list[str] = []

    def read(self) -> Parsing[str]:
        """The next character."""
        letter = self._back.pop() if self._back else (yield)
        self.record.append(letter)
        return letter

    def put_back(self, letters: str) -> None:
        """Let the last characters that were read be read again; the end, if there are none."""
        given = list(letters) or [END_OF_TEXT]
        self._back += reversed(given)
        del self.record[len(self.record) - len(given) :]

    def peek(self) -> Parsing[str]:
        """The next character, which stays."""
        letter = yield from self.read()
        self.put_back(letter)
        return letter

    def skip_whitespace(self) -> Parsing[str]:
        """Whitespace, and the first character after it, which stays."""
        while (letter := (yield from self.read())).isspace():
            pass
        self.put_back(letter)
        return letter

    def expect(self, text: str) -> Parsing[None]:
        """Exactly this text."""
        for wanted in text:
            letter = yield from self.read()
            if letter != wanted:
                self.put_back(letter)
                raise NotAToolCall


class ToolCallParser:
    """Reads calls and tells of them; `names` are those that count where nothing announces a call."""

    def __init__(
        self,
        source: CharSource,
        style: ToolFormat,
        names: frozenset[str],
        max_calls: int | None,
        emit: Callable[[Any], None],
    ) -> None:
        """No more than `most` calls are told."""
        self.source, self.style, self.names, self.max_calls, self.emit = source, style, names, max_calls, emit
        self.count = 0
        self.committed = False
        """Whether the call being read has been told of, so that it can no longer be taken for text."""

    def calls(self, announced: bool) -> Parsing[None]:
        """One call, or a list of them, from where they begin."""
        self.committed = False
        first = yield from self.source.skip_whitespace()
        if first == "[" and (self.style.is_list or self.style.bare_json):
            yield from self.call_list(announced)
        elif first != "{" and self.style.is_list:
            yield from self.mistral_call()
        else:
            yield from self.call_object(announced)

    def call_list(self, announced: bool) -> Parsing[None]:
        """`[{…}, {…}]`."""
        yield from self.source.expect("[")
        while True:
            yield from self.call_object(announced)
            after = yield from self.source.skip_whitespace()
            if after != ",":
                break
            yield from self.source.read()
        yield from self.source.expect("]")

    def mistral_call(self) -> Parsing[None]:
        """`name[ARGS]{…}`."""
        name = ""
        while (letter := (yield from self.source.read())) in NAME_CHARS and letter:
            name += letter
        self.source.put_back(letter)
        if not name:
            raise NotAToolCall
        if letter == "[":
            yield from self.source.expect("[ARGS]")
        if (yield from self.source.skip_whitespace()) != "{":
            raise NotAToolCall
        yield from self.arguments(self.start_call(name, announced=True))

    def call_object(self, announced: bool) -> Parsing[None]:
        """`{"name": …, "arguments": …}`, in either order and perhaps with more."""
        name: str | None = None
        early: list[str] = []  # arguments that came before the name
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
        """Refuse what cannot be the name of a call."""
        if not name or (not announced and name not in self.names):
            raise NotAToolCall

    def start_call(self, name: str, announced: bool) -> int:
        """From here on it is a call."""
        self.check_name(name, announced)
        self.committed = True
        self.count += 1
        if self.max_calls is None or self.count <= self.max_calls:
            self.emit(ToolCallStart(self.count - 1, name))
        return self.count - 1

    def emit_args(self, index: int, text: str) -> None:
        """Tell more of the arguments."""
        if text and (self.max_calls is None or index < self.max_calls):
            self.emit(ToolCallArgsDelta(index, text))

    def arguments(self, index: int) -> Parsing[None]:
        """The arguments of a call that was told of, as they come."""
        yield from self.argument_text(lambda text: self.emit_args(index, text))

    def argument_text(self, emit: Callable[[str], None]) -> Parsing[None]:
        """Arguments: an object; a text that holds one; or null, which stands for none."""
        first = yield from self.source.skip_whitespace()
        if first == '"':
            emit(decode_json_string((yield from self.json_string())))
        elif first == "n":
            yield from self.source.expect("null")
            emit("{}")
        else:
            yield from self.value(emit)

    def value(self, emit: Callable[[str], None]) -> Parsing[None]:
        """Any JSON value; brackets are counted, and what no JSON text has outside of strings is refused."""
        depth = 0
        while True:
            letter = yield from self.source.peek()
            if letter == '"':
                emit((yield from self.json_string()))
            elif depth == 0 and (letter in ",}]" or letter.isspace()):
                return  # the end of a number or a word
            elif letter not in JSON_CHARS or letter == END_OF_TEXT:
                raise NotAToolCall
            else:
                yield from self.source.read()
                emit(letter)
                depth += (letter in "{[") - (letter in "}]")
                if depth == 0 and letter not in "{[}]":
                    continue
            if depth == 0:
                return

    def json_string(self) -> Parsing[str]:
        """A JSON string as it is written."""
        yield from self.source.expect('"')
        raw = '"'
        while True:
            letter = yield from self.source.read()
            if letter == END_OF_TEXT:
                self.source.put_back(END_OF_TEXT)
                raise NotAToolCall
            raw += letter
            if letter == "\\":
                raw += yield from self.source.read()
            elif letter == '"':
                return raw


def decode_json_string(raw: str) -> str:
    """What a JSON string stands for, as text that UTF-8 can hold."""
    try:
        text: str = json.loads(raw, strict=False)
    except ValueError:
        raise NotAToolCall from None
    return text.encode("utf-8", "replace").decode()
