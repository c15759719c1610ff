"""Finds any of several strings in a text that arrives in pieces: an Aho-Corasick automaton.

Each character is read once, whatever came before it. The automaton's state after some text is a
`MatcherCursor`; scanning again from an earlier cursor undoes what was read since. Characters are compared as
they are: to ignore case, the caller folds the strings and the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class MatcherCursor(NamedTuple):
    """Where a scan of a text stands: how many characters were read, and the automaton's state."""

    length: int = 0
    state: int = 0


class Match(NamedTuple):
    """A complete string: where in the whole text it starts, and its length."""

    start: int
    length: int


class StringMatcher:
    """A set of strings to search for, without empty ones. It is immutable: many texts may share it."""

    __slots__ = ("_children", "_depths", "_fallbacks", "_first_letters", "_match_lengths")

    def __init__(self, strings: Iterable[str]) -> None:
        """Build the automaton; time and memory are proportional to the strings' total length."""
        self._children: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._match_lengths = [0]  # by state: the length of the longest string that ends here
        for string in strings:
            self._add(string)
        self._fallbacks = self._build_fallbacks()
        self._first_letters = frozenset(self._children[0])

    def __bool__(self) -> bool:
        """Whether there are strings to search for."""
        return bool(self._first_letters)

    def may_start_in(self, text: str) -> bool:
        """Whether any character of the text may be the first of a match."""
        return not self._first_letters.isdisjoint(text)

    def scan(self, cursor: MatcherCursor, text: str) -> tuple[MatcherCursor, Match | None]:
        """Read the next piece; returns the string that ends in it, the first to start, then the longest."""
        length, state = cursor
        if not state and self._first_letters.isdisjoint(text):
            return MatcherCursor(length + len(text), 0), None
        children, fallbacks, match_lengths = self._children, self._fallbacks, self._match_lengths
        best: Match | None = None
        for letter in text:
            length += 1
            next_state = children[state].get(letter)
            while next_state is None and state:
                state = fallbacks[state]
                next_state = children[state].get(letter)
            state = next_state or 0
            if match_lengths[state]:
                start = length - match_lengths[state]
                if best is None or start <= best.start:  # on a tie the later one ends later and is longer
                    best = Match(start, match_lengths[state])
        return MatcherCursor(length, state), best

    def num_final(self, cursor: MatcherCursor) -> int:
        """How many characters from the start of the text cannot be part of a later match."""
        return cursor.length - self._depths[cursor.state]

    def _add(self, string: str) -> None:
        state = 0
        for depth, letter in enumerate(string, 1):
            next_state = self._children[state].get(letter)
            if next_state is None:
                next_state = self._children[state][letter] = len(self._children)
                self._children.append({})
                self._depths.append(depth)
                self._match_lengths.append(0)
            state = next_state
        self._match_lengths[state] = len(string)

    def _build_fallbacks(self) -> list[int]:
        """By state, the state of its longest proper suffix (Aho-Corasick's failure links)."""
        fallbacks = [0] * len(self._children)
        states = list(self._children[0].values())
        for state in states:  # breadth first: the loop appends to the list
            for letter, child in self._children[state].items():
                fallback = fallbacks[state]
                while fallback and letter not in self._children[fallback]:
                    fallback = fallbacks[fallback]
                fallbacks[child] = self._children[fallback].get(letter, 0)
                self._match_lengths[child] = (
                    self._match_lengths[child] or self._match_lengths[fallbacks[child]]
                )
                states.append(child)
        return fallbacks
