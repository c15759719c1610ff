"""PrefixFilter: the answer starts with one of some texts. What follows them is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import InputError
from .filter import Answer, MaskFilter, Prefix, prefix_text
from .lexicon import lexicon_of
from .paths import Node, Paths


class PrefixFilter(MaskFilter):
    """Makes an answer start with one of the given texts; after that everything passes.

    Tokens pass that go along one of the texts, or to its end and beyond. Of two texts, one the start of the
    other, the shorter suffices.
    """

    def __init__(self, model: Any, tokenizer: Any, prefix_strings: str | Sequence[str]) -> None:
        """`prefix_strings` is one text or several; `model` is not used and may be None."""
        super().__init__(model, tokenizer)
        several = [prefix_strings] if isinstance(prefix_strings, str) else prefix_strings
        self.prefix_strings = checked_texts(several, "PrefixFilter")
        self._paths = Paths(lexicon_of(self.codec), self.prefix_strings, open_ended=True)
        self._place: Node | None = self._paths.root

    def begin(self, prefix_str: Prefix = "") -> None:
        """Start at the beginning of the texts."""
        self._place = self._paths.start(prefix_text(prefix_str))

    def feed(self, token: Any) -> None:
        """Go on to where the token leads."""
        self._place = self._paths.follow(self._place, int(token))

    def answer(self) -> Answer:
        """The tokens along the texts, or no limit once one of them is complete."""
        if self._place is None:
            return Answer(self._paths.mask([]))
        if self._place.final:
            return Answer(None)
        return Answer(self._paths.mask(self._paths.steps(self._place)))


def checked_texts(texts: Any, name: str) -> list[str]:
    """The texts as a list; refuses none at all, and anything among them that is not text."""
    if not isinstance(texts, Iterable):
        raise InputError(f"{name} takes a list of texts, found {type(texts).__name__}.")
    found = list(texts)
    if not found:
        raise InputError(f"{name} needs at least one text.")
    for text in found:
        if not isinstance(text, str):
            raise InputError(f"{name} takes texts, found {type(text).__name__}: {str(text)[:80]}.")
    return found
