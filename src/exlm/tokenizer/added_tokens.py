"""Finding whole tokens in text: the longest at the leftmost place, with the stripping they ask for.

Used where no library does it: for SentencePiece, which does not know added tokens, and for embedding aliases.
It only finds; what the tokens mean is the caller's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .tokenizer_files import AddedToken


class TokenMatch(NamedTuple):
    """A token's place in a text; stripped spaces around it are part of the place."""

    start: int
    end: int
    token: AddedToken


class AddedTokenMatcher:
    """Finds any of many tokens, in time that does not depend on how many there are."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        """Index the tokens by first letter and length; empty texts are never found."""
        self._tokens = {token.content: token for token in tokens if token.content}
        lengths: dict[str, set[int]] = {}
        for content in self._tokens:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {letter: sorted(sizes, reverse=True) for letter, sizes in lengths.items()}
        self._first_letters = re.compile("|".join(map(re.escape, sorted(lengths))) or r"(?!)")

    def find(self, text: str) -> Iterator[TokenMatch]:
        """Places from left to right; they do not overlap."""
        position = 0
        while (candidate := self._first_letters.search(text, position)) is not None:
            start = candidate.start()
            while (token := self._match_at(text, start)) is None:
                candidate = self._first_letters.search(text, start + 1)
                if candidate is None:
                    return
                start = candidate.start()
            end = start + len(token.content)
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip())
            if token.lstrip:
                start = position + len(text[position:start].rstrip())
            yield TokenMatch(start, end, token)
            position = end

    def _match_at(self, text: str, start: int) -> AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._tokens.get(text[start : start + length])
            if token is not None and not (token.single_word and _is_inside_word(text, start, start + length)):
                return token
        return None


def _is_inside_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start] if start else "", text[end : end + 1]
    return any(letter.isalnum() or letter == "_" for letter in before + after)
