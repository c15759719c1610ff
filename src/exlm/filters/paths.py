"""Texts as paths of bytes, and which tokens walk along them.

The texts become one graph of bytes, so that a character cut in two by the vocabulary is two steps like
any others. Ignoring case, the spellings of a letter are several ways to the same place. Which tokens fit at
a place is found by following the graph and the sorted tokens together; nothing is tried that no token starts
with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from .bits import Words, of
from .lexicon import Lexicon

MAX_CHARACTERS = 1 << 18


class Node:
    """A place in the texts: where each byte leads, and whether a text ends here."""

    __slots__ = ("dead", "edges", "final")

    def __init__(self) -> None:
        """A place that leads nowhere."""
        self.edges: dict[int, Node] = {}
        self.final = False
        self.dead = False


class Step(NamedTuple):
    """The tokens of `lexicon.keys[low:high]` lead to this place (or, past the end of a text, beyond it)."""

    low: int
    high: int
    node: Node


class Paths:
    """The places of some texts; `open_ended` texts may be followed by anything.

    A place is never changed after construction, so jobs share it freely.
    """

    def __init__(
        self, lexicon: Lexicon, texts: Sequence[str], *, ignore_case: bool = False, open_ended: bool = False
    ) -> None:
        """Refuses texts that cannot be UTF-8, are too long in all, or that no tokens spell."""
        self.lexicon = lexicon
        self.open_ended = open_ended
        self.root = Node()
        if (total := sum(map(len, texts))) > MAX_CHARACTERS:
            raise InputError(
                f"The texts of a filter may have {MAX_CHARACTERS:,} characters in all, found {total:,}."
            )
        for text in texts:
            self._add(text, ignore_case)
        if not self._alphabet() <= lexicon.single_bytes:
            self._close_dead_ends()
            self._check_spelling(texts)

    def start(self, prefix: str = "") -> Node:
        """The place before the texts, or before a prefix that stands in front of all of them."""
        node = self.root
        for byte in reversed(encoded(prefix)):
            before = Node()
            before.edges[byte] = node
            node = before
        return node

    def follow(self, node: Node | None, number: int) -> Node | None:
        """Where a token leads; None where it leaves every text."""
        for byte in self.lexicon.table[number] if 0 <= number < self.lexicon.size else b"":
            if node is None or (node.final and self.open_ended):
                return node
            node = node.edges.get(byte)
        return node

    def steps(self, node: Node) -> list[Step]:
        """Every step a token can take from here."""
        found = []
        open_places = [(node, b"", 0, len(self.lexicon.keys))]
        while open_places:
            place, text, low, high = open_places.pop()
            for byte, child in place.edges.items():
                longer = text + bytes((byte,))
                first, after = self.lexicon.starting(longer, low, high)
                if first == after:
                    continue
                if child.final and self.open_ended:
                    found.append(Step(first, after, child))
                    continue
                if self.lexicon.keys[first] == longer:
                    if not child.dead:
                        found.append(Step(first, first + 1, child))
                    first += 1
                if first < after:
                    open_places.append((child, longer, first, after))
        return found

    def mask(self, steps: Sequence[Step], more: Sequence[int] = ()) -> Words:
        """The tokens of some steps, and more tokens, as a set."""
        size = self.lexicon.size
        known = np.array([number for number in more if 0 <= number < size], np.int64)
        return of(np.concatenate([known, *(self.lexicon.tokens(low, high) for low, high, _ in steps)]), size)

    def _add(self, text: str, ignore_case: bool) -> None:
        node = self.root
        encoded(text)
        for letter in text:
            node = _link(node, _spellings(letter) if ignore_case else [letter])
        node.final = True

    def _nodes(self) -> list[Node]:
        """Every place, each before those it leads to."""
        order: list[Node] = []
        seen = {self.root}
        path: list[tuple[Node, Iterator[Node]]] = [(self.root, iter(self.root.edges.values()))]
        while path:
            node, rest = path[-1]
            child = next((child for child in rest if child not in seen), None)
            if child is None:
                order.append(node)
                path.pop()
            else:
                seen.add(child)
                path.append((child, iter(child.edges.values())))
        return order[::-1]

    def _alphabet(self) -> set[int]:
        return {byte for node in self._nodes() for byte in node.edges}

    def _close_dead_ends(self) -> None:
        """A vocabulary that cannot write every byte may lead to places with no way on: mark them."""
        for node in reversed(self._nodes()):
            node.dead = not node.final and not self.steps(node)

    def _check_spelling(self, texts: Sequence[str]) -> None:
        reached = {self.root}
        waiting = [self.root]
        while waiting:
            for step in self.steps(waiting.pop()):
                if step.node not in reached:
                    reached.add(step.node)
                    waiting.append(step.node)
        for text in texts:
            if self._end(text) not in reached:
                raise InputError(
                    f"The vocabulary has no tokens that spell {text!r}, so it cannot be asked for."
                )

    def _end(self, text: str) -> Node:
        node = self.root
        for byte in text.encode():
            if node.final and self.open_ended:
                break
            node = node.edges[byte]
        return node


def encoded(text: str) -> bytes:
    """UTF-8, or an error that says why not."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The text of a filter cannot be UTF-8: {error.reason} at character {error.start}: {text[:80]!r}."
        ) from None


def _link(node: Node, spellings: Sequence[str]) -> Node:
    """The place one letter further on, by any of its spellings; the first one names it."""
    target = _walk(node, spellings[0].encode(), None)
    for spelling in spellings[1:]:
        _walk(node, spelling.encode(), target)
    return target


def _walk(node: Node, raw: bytes, target: Node | None) -> Node:
    for byte in raw[:-1]:
        node = node.edges.setdefault(byte, Node())
    return node.edges.setdefault(raw[-1], target or Node())


def _spellings(letter: str) -> list[str]:
    """The letter in every case, always with the same one first."""
    key = _key(letter)
    others = dict.fromkeys([key, key.lower(), key.upper(), key.title(), letter])
    return [other for other in others if len(other) == 1 and _key(other) == key]


def _key(letter: str) -> str:
    """What all cases of a letter have in common, where that is one letter."""
    for form in (letter.casefold(), letter.lower()):
        if len(form) == 1:
            return form
    return letter
