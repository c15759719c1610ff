"""PrefixFilter: the answer starts with one of some texts. What follows them is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import InputError
from .byte_dfa import ByteDfa, DfaState
from .filter import FilterMask, HealingPrefix, MaskFilter, prefix_text
from .token_trie import token_trie_of


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
        self._dfa = ByteDfa(token_trie_of(self.codec), self.prefix_strings, open_ended=True)
        self._state: DfaState | None = self._dfa.root

    def begin(self, prefix_str: HealingPrefix = "") -> None:
        """Start at the beginning of the texts."""
        self._state = self._dfa.start_state(prefix_text(prefix_str))

    def feed(self, token: Any) -> None:
        """Go on to where the token leads."""
        self._state = self._dfa.advance(self._state, int(token))

    def answer(self) -> FilterMask:
        """The tokens along the texts, or no limit once one of them is complete."""
        if self._state is None:
            return FilterMask(self._dfa.bitmask([]))
        if self._state.accepting:
            return FilterMask(None)
        return FilterMask(self._dfa.bitmask(self._dfa.token_transitions(self._state)))


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
