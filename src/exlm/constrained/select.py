"""SelectFilter: the answer is exactly one of some options, and ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from .byte_dfa import ByteDfa, DfaState
from .filter import FilterMask, HealingPrefix, MaskFilter, prefix_text
from .prefix import checked_texts
from .token_trie import token_trie_of


class SelectFilter(MaskFilter):
    """Makes an answer one of the given options; the token that completes an option ends the generation.

    Completing an option ends it even where a longer one goes on. An empty option is chosen by an EOS token.
    """

    def __init__(
        self, model: Any, tokenizer: Any, options: Sequence[str], case_insensitive: bool = False
    ) -> None:
        """`case_insensitive` leaves the case of every letter open; `model` is not used and may be None."""
        super().__init__(model, tokenizer)
        if isinstance(options, str):
            raise InputError(
                f"SelectFilter takes a list of options; for one option write [{options[:80]!r}]."
            )
        self.options = checked_texts(options, "SelectFilter")
        self.case_insensitive = case_insensitive
        self._dfa = ByteDfa(token_trie_of(self.codec), self.options, ignore_case=case_insensitive)
        self._state: DfaState | None = self._dfa.root

    def begin(self, prefix_str: HealingPrefix = "") -> None:
        """Start at the beginning of the options."""
        self._state = self._dfa.start_state(prefix_text(prefix_str))

    def feed(self, token: Any) -> None:
        """Go on to where the token leads."""
        self._state = self._dfa.advance(self._state, int(token))

    def answer(self) -> FilterMask:
        """The tokens along the options; those that complete one are the ends."""
        if self._state is None:
            return FilterMask(self._dfa.bitmask([]))
        transitions = self._dfa.token_transitions(self._state)
        eos_if_complete = self.codec.eos_ids if self._state.accepting else ()
        trie = self._dfa.trie
        completing_ids = (
            number
            for step in transitions
            if step.state.accepting
            for number in trie.ids_in_range(*step[:2]).tolist()
        )
        return FilterMask(
            self._dfa.bitmask(transitions, eos_if_complete), frozenset((*completing_ids, *eos_if_complete))
        )
