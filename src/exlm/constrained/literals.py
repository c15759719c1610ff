"""Filters for literal texts: a completion that starts with one of them, or that is exactly one of them.

The texts become one deterministic automaton (DFA) over UTF-8 bytes, so a character that the vocabulary splits
into several tokens needs no special case, and ignoring case adds transitions. A depth-first search in the
automaton and the trie of the vocabulary together finds the tokens that a state allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from .filter import FilterMask, HealingPrefix, MaskFilter, prefix_text
from .token_sets import Bitmask, TokenTrie, bitmask_from_ids, token_trie_of

MAX_CHARACTERS = 1 << 18


class DfaState:
    """A position within the texts: its transitions by byte, and whether a text ends here."""

    __slots__ = ("accepting", "is_dead_end", "transitions")

    def __init__(self) -> None:
        self.transitions: dict[int, DfaState] = {}
        self.accepting = False
        self.is_dead_end = False  # no tokens lead from here to the end of a text


class TokenTransition(NamedTuple):
    """The tokens of `trie.keys[low:high]` lead to `state`, or past the end of an open-ended text."""

    low: int
    high: int
    state: DfaState


class ByteDfa:
    """The automaton of some texts; anything may follow a text that is `open_ended`.

    States do not change after construction, so jobs share them.
    """

    def __init__(
        self, trie: TokenTrie, texts: Sequence[str], *, ignore_case: bool = False, open_ended: bool = False
    ) -> None:
        """Refuse texts that cannot be UTF-8, are too long in all, or that no tokens spell."""
        self.trie = trie
        self.open_ended = open_ended
        self.root = DfaState()
        if (total := sum(map(len, texts))) > MAX_CHARACTERS:
            raise InputError(f"The texts of a filter may have {MAX_CHARACTERS:,} characters in all, found {total:,}.")
        for text in texts:
            self._add_text(text, ignore_case)
        if not self._alphabet() <= trie.single_bytes:
            self._mark_dead_ends()
            self._check_reachable(texts)

    def start_state(self, prefix: str = "") -> DfaState:
        """The state before the texts, or before a prefix (of token healing) that precedes all of them."""
        state = self.root
        for byte in reversed(_to_utf8(prefix)):
            previous = DfaState()
            previous.transitions[byte] = state
            state = previous
        return state

    def advance(self, state: DfaState | None, token_id: int) -> DfaState | None:
        """The state after a token; None if no text continues with it."""
        for byte in self.trie.token_bytes[token_id] if 0 <= token_id < self.trie.size else b"":
            if state is None or (state.accepting and self.open_ended):
                return state
            state = state.transitions.get(byte)
        return state

    def token_transitions(self, state: DfaState) -> list[TokenTransition]:
        """Every transition by a whole token from this state."""
        found = []
        stack = [(state, b"", 0, len(self.trie.keys))]
        while stack:
            current, text, low, high = stack.pop()
            for byte, child in current.transitions.items():
                longer = text + bytes((byte,))
                first, stop = self.trie.prefix_range(longer, low, high)
                if first == stop:
                    continue
                if child.accepting and self.open_ended:
                    found.append(TokenTransition(first, stop, child))
                    continue
                if self.trie.keys[first] == longer:
                    if not child.is_dead_end:
                        found.append(TokenTransition(first, first + 1, child))
                    first += 1
                if first < stop:
                    stack.append((child, longer, first, stop))
        return found

    def bitmask(self, transitions: Sequence[TokenTransition], extra_ids: Sequence[int] = ()) -> Bitmask:
        """The tokens of these transitions and `extra_ids`, as a set."""
        size = self.trie.size
        valid_ids = np.array([token_id for token_id in extra_ids if 0 <= token_id < size], np.int64)
        return bitmask_from_ids(
            np.concatenate([valid_ids, *(self.trie.ids_in_range(low, high) for low, high, _ in transitions)]), size
        )

    def _add_text(self, text: str, ignore_case: bool) -> None:
        state = self.root
        _to_utf8(text)
        for character in text:
            state = _add_character(state, _case_variants(character) if ignore_case else [character])
        state.accepting = True

    def _states_in_order(self) -> list[DfaState]:
        """All states in topological order."""
        order: list[DfaState] = []
        seen = {self.root}
        path: list[tuple[DfaState, Iterator[DfaState]]] = [(self.root, iter(self.root.transitions.values()))]
        while path:
            state, rest = path[-1]
            child = next((child for child in rest if child not in seen), None)
            if child is None:
                order.append(state)
                path.pop()
            else:
                seen.add(child)
                path.append((child, iter(child.transitions.values())))
        return order[::-1]

    def _alphabet(self) -> set[int]:
        return {byte for state in self._states_in_order() for byte in state.transitions}

    def _mark_dead_ends(self) -> None:
        """Mark states from which no tokens reach the end of a text: not every vocabulary has every byte."""
        for state in reversed(self._states_in_order()):
            state.is_dead_end = not state.accepting and not self.token_transitions(state)

    def _check_reachable(self, texts: Sequence[str]) -> None:
        reached = {self.root}
        stack = [self.root]
        while stack:
            for _, _, state in self.token_transitions(stack.pop()):
                if state not in reached:
                    reached.add(state)
                    stack.append(state)
        for text in texts:
            if self._end_state(text) not in reached:
                raise InputError(f"The vocabulary has no tokens that spell {text!r}, so the model cannot write it.")

    def _end_state(self, text: str) -> DfaState:
        state = self.root
        for byte in text.encode():
            if state.accepting and self.open_ended:
                break
            state = state.transitions[byte]
        return state


def _to_utf8(text: str) -> bytes:
    """A text as UTF-8; InputError for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The text of a filter cannot be UTF-8: {error.reason} at character {error.start}: {text[:80]!r}."
        ) from None


def _add_character(state: DfaState, variants: Sequence[str]) -> DfaState:
    """The state after a character in any of its cases; the first variant identifies it."""
    target = _add_bytes(state, variants[0].encode(), None)
    for variant in variants[1:]:
        _add_bytes(state, variant.encode(), target)
    return target


def _add_bytes(state: DfaState, raw: bytes, target: DfaState | None) -> DfaState:
    for byte in raw[:-1]:
        state = state.transitions.setdefault(byte, DfaState())
    return state.transitions.setdefault(raw[-1], target or DfaState())


def _case_variants(character: str) -> list[str]:
    """The character in every case; the first is the same for all of them."""
    key = _case_key(character)
    variants = dict.fromkeys([key, key.lower(), key.upper(), key.title(), character])
    return [variant for variant in variants if len(variant) == 1 and _case_key(variant) == key]


def _case_key(character: str) -> str:
    """What all cases of a character fold to, where that is a single character."""
    folded = (character.casefold(), character.lower(), character)
    return next(form for form in folded if len(form) == 1)


class _LiteralFilter(MaskFilter):
    """A filter whose state is one of an automaton."""

    _dfa: ByteDfa
    _state: DfaState | None

    def begin(self, prefix_str: HealingPrefix = "") -> None:
        """Start at the beginning of the texts."""
        self._state = self._dfa.start_state(prefix_text(prefix_str))

    def feed(self, token: Any) -> None:
        """Advance the automaton by the sampled token."""
        self._state = self._dfa.advance(self._state, int(token))


class PrefixFilter(_LiteralFilter):
    """Makes the completion start with one of the given texts; after that everything is allowed.

    A token may extend beyond the end of a text. Where one text is the start of another, the shorter suffices.
    """

    def __init__(self, model: Any, tokenizer: Any, prefix_strings: str | Sequence[str]) -> None:
        """`prefix_strings` is one text or several; `model` is not used and may be None."""
        super().__init__(model, tokenizer)
        several = [prefix_strings] if isinstance(prefix_strings, str) else prefix_strings
        self.prefix_strings = _checked_texts(several, "PrefixFilter")
        self._dfa = ByteDfa(token_trie_of(self.codec), self.prefix_strings, open_ended=True)
        self._state = self._dfa.root

    def next_mask(self) -> FilterMask:
        """The tokens that continue a text; all tokens once a text is complete."""
        if self._state is None:
            return FilterMask(self._dfa.bitmask([]))
        if self._state.accepting:
            return FilterMask(None)
        return FilterMask(self._dfa.bitmask(self._dfa.token_transitions(self._state)))


class SelectFilter(_LiteralFilter):
    """Makes the completion one of the given options; the token that completes an option ends the generation.

    That holds even where a longer option continues. EOS selects an empty option.
    """

    def __init__(self, model: Any, tokenizer: Any, options: Sequence[str], case_insensitive: bool = False) -> None:
        """`case_insensitive` allows every letter in any case; `model` is not used and may be None."""
        super().__init__(model, tokenizer)
        if isinstance(options, str):
            raise InputError(f"SelectFilter takes a list of options; for one option write [{options[:80]!r}].")
        self.options = _checked_texts(options, "SelectFilter")
        self.case_insensitive = case_insensitive
        self._dfa = ByteDfa(token_trie_of(self.codec), self.options, ignore_case=case_insensitive)
        self._state = self._dfa.root

    def next_mask(self) -> FilterMask:
        """The tokens that continue an option; those that complete one end the generation."""
        if self._state is None:
            return FilterMask(self._dfa.bitmask([]))
        transitions = self._dfa.token_transitions(self._state)
        eos_if_complete = self.codec.eos_ids if self._state.accepting else ()
        trie = self._dfa.trie
        completing_ids = (
            token_id
            for low, high, state in transitions
            if state.accepting
            for token_id in trie.ids_in_range(low, high).tolist()
        )
        return FilterMask(
            self._dfa.bitmask(transitions, eos_if_complete), frozenset((*completing_ids, *eos_if_complete))
        )


def _checked_texts(texts: Any, name: str) -> list[str]:
    """The texts as a list; InputError if there are none, or for anything that is not text."""
    if not isinstance(texts, Iterable):
        raise InputError(f"{name} takes a list of texts, found {type(texts).__name__}.")
    found = list(texts)
    if not found:
        raise InputError(f"{name} needs at least one text.")
    for text in found:
        if not isinstance(text, str):
            raise InputError(f"{name} takes texts, found {type(text).__name__}: {str(text)[:80]}.")
    return found
