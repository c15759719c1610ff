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

from .styles import Style

T = TypeVar("T")
Reading: TypeAlias = Generator[None, str, T]
"""Takes characters, "" at the end of the text, until it knows."""

END = ""
NAME = frozenset(string.ascii_letters + string.digits + "_.-")
OUTSIDE_STRINGS = frozenset(string.digits + string.whitespace + "{}[],:+-.eEtrufalsn")
ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Called:
    """A call begins."""

    index: int
    name: str


@dataclass(frozen=True)
class Argued:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


class Malformed(Exception):
    """This is no call."""


class Source:
    """The characters: read, put back, and recorded while it is not known what they are."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._back: list[str] = []
        self.record: list[str] = []

    def read(self) -> Reading[str]:
        """The next character."""
        letter = self._back.pop() if self._back else (yield)
        self.record.append(letter)
        return letter

    def put_back(self, letters: str) -> None:
        """Let the last characters that were read be read again; the end, if there are none."""
        given = list(letters) or [END]
        self._back += reversed(given)
        del self.record[len(self.record) - len(given) :]

    def look(self) -> Reading[str]:
        """The next character, which stays."""
        letter = yield from self.read()
        self.put_back(letter)
        return letter

    def blanks(self) -> Reading[str]:
        """Whitespace, and the first character after it, which stays."""
        while (letter := (yield from self.read())).isspace():
            pass
        self.put_back(letter)
        return letter

    def expect(self, text: str) -> Reading[None]:
        """Exactly this text."""
        for wanted in text:
            letter = yield from self.read()
            if letter != wanted:
                self.put_back(letter)
                raise Malformed


class CallReader:
    """Reads calls and tells of them; `names` are those that count where nothing announces a call."""

    def __init__(
        self,
        source: Source,
        style: Style,
        names: frozenset[str],
        most: int | None,
        tell: Callable[[Any], None],
    ) -> None:
        """No more than `most` calls are told."""
        self.source, self.style, self.names, self.most, self.tell = source, style, names, most, tell
        self.count = 0
        self.committed = False
        """Whether the call being read has been told of, so that it can no longer be taken for text."""

    def calls(self, announced: bool) -> Reading[None]:
        """One call, or a list of them, from where they begin."""
        self.committed = False
        first = yield from self.source.blanks()
        if first == "[" and (self.style.listed or self.style.bare):
            yield from self.listed(announced)
        elif first != "{" and self.style.listed:
            yield from self.named()
        else:
            yield from self.object(announced)

    def listed(self, announced: bool) -> Reading[None]:
        """`[{…}, {…}]`."""
        yield from self.source.expect("[")
        while True:
            yield from self.object(announced)
            after = yield from self.source.blanks()
            if after != ",":
                break
            yield from self.source.read()
        yield from self.source.expect("]")

    def named(self) -> Reading[None]:
        """`name[ARGS]{…}`."""
        name = ""
        while (letter := (yield from self.source.read())) in NAME and letter:
            name += letter
        self.source.put_back(letter)
        if not name:
            raise Malformed
        if letter == "[":
            yield from self.source.expect("[ARGS]")
        if (yield from self.source.blanks()) != "{":
            raise Malformed
        yield from self.arguments(self.commit(name, announced=True))

    def object(self, announced: bool) -> Reading[None]:
        """`{"name": …, "arguments": …}`, in either order and perhaps with more."""
        name: str | None = None
        early: list[str] = []  # arguments that came before the name
        index = -1
        yield from self.source.blanks()
        yield from self.source.expect("{")
        while True:
            yield from self.source.blanks()
            key = decoded((yield from self.quoted()))
            yield from self.source.blanks()
            yield from self.source.expect(":")
            value = yield from self.source.blanks()
            if key == "name" and name is None and value == '"':
                name = decoded((yield from self.quoted()))
                self.check(name, announced)
            elif key in ARGUMENTS and index < 0 and not early:
                if name is None:
                    yield from self.argument_text(early.append)
                else:
                    index = self.commit(name, announced)
                    yield from self.arguments(index)
            else:
                yield from self.value(lambda _: None)
            after = yield from self.source.blanks()
            if after == "}":
                break
            yield from self.source.expect(",")
        if index < 0:
            if name is None:
                raise Malformed
            self.argue(self.commit(name, announced), "".join(early) or "{}")
        yield from self.source.expect("}")

    def check(self, name: str, announced: bool) -> None:
        """Refuse what cannot be the name of a call."""
        if not name or (not announced and name not in self.names):
            raise Malformed

    def commit(self, name: str, announced: bool) -> int:
        """From here on it is a call."""
        self.check(name, announced)
        self.committed = True
        self.count += 1
        if self.most is None or self.count <= self.most:
            self.tell(Called(self.count - 1, name))
        return self.count - 1

    def argue(self, index: int, text: str) -> None:
        """Tell more of the arguments."""
        if text and (self.most is None or index < self.most):
            self.tell(Argued(index, text))

    def arguments(self, index: int) -> Reading[None]:
        """The arguments of a call that was told of, as they come."""
        yield from self.argument_text(lambda text: self.argue(index, text))

    def argument_text(self, emit: Callable[[str], None]) -> Reading[None]:
        """Arguments: an object; a text that holds one; or null, which stands for none."""
        first = yield from self.source.blanks()
        if first == '"':
            emit(decoded((yield from self.quoted())))
        elif first == "n":
            yield from self.source.expect("null")
            emit("{}")
        else:
            yield from self.value(emit)

    def value(self, emit: Callable[[str], None]) -> Reading[None]:
        """Any JSON value; brackets are counted, and what no JSON text has outside of strings is refused."""
        depth = 0
        while True:
            letter = yield from self.source.look()
            if letter == '"':
                emit((yield from self.quoted()))
            elif depth == 0 and (letter in ",}]" or letter.isspace()):
                return  # the end of a number or a word
            elif letter not in OUTSIDE_STRINGS or letter == END:
                raise Malformed
            else:
                yield from self.source.read()
                emit(letter)
                depth += (letter in "{[") - (letter in "}]")
                if depth == 0 and letter not in "{[}]":
                    continue
            if depth == 0:
                return

    def quoted(self) -> Reading[str]:
        """A JSON string as it is written."""
        yield from self.source.expect('"')
        raw = '"'
        while True:
            letter = yield from self.source.read()
            if letter == END:
                self.source.put_back(END)
                raise Malformed
            raw += letter
            if letter == "\\":
                raw += yield from self.source.read()
            elif letter == '"':
                return raw


def decoded(raw: str) -> str:
    """What a JSON string stands for, as text that UTF-8 can hold."""
    try:
        text: str = json.loads(raw, strict=False)
    except ValueError:
        raise Malformed from None
    return text.encode("utf-8", "replace").decode()
