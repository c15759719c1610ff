"""The stop-string buffer: sampled tokens whose text is not emitted yet, searched for stop and banned strings.

It finds both, counts the tokens that can no longer be part of one, and can rewind to before any token that it
holds. Offsets count from the first character in the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..tokenizer.detokenizer import Detokenizer
from ..tokenizer.vocab import REPLACEMENT


class _ScanState(NamedTuple):
    """The state of the search between two tokens; a cursor's `length` is read only relative to another state's."""

    at_char_boundary: bool  # no character is incomplete
    visible: MatcherCursor  # search for stop strings in the visible text
    with_special: MatcherCursor  # the same with the text of hidden special tokens
    casefolded: MatcherCursor  # search for banned strings in the casefolded visible text
    num_releasable: int = 0  # tokens, counted from the first ever held, that no match can include any more


class _HeldToken(NamedTuple):
    """A token whose text is not emitted yet."""

    token_id: int
    text: str  # its visible text, including a character that earlier tokens began
    special_text: str  # the text of a special token that the detokenizer hides
    state_before: _ScanState
    detokenizer_before: Detokenizer | None  # None if there are no banned strings to rewind for


class StringMatches(NamedTuple):
    """Strings that the newest token completes: stop strings without and with hidden text, a banned string."""

    visible: Match | None
    with_special: Match | None
    banned: Match | None


class StopMatch(NamedTuple):
    """Where a stop string begins in the held text, the string, and the text from there on."""

    offset: int
    string: str
    tail: str


class RewoundTokens(NamedTuple):
    """Tokens that were removed, and their text."""

    tokens: tuple[int, ...]
    text: str


class StopStringBuffer:
    """Tokens that are neither emitted nor rewound, oldest first; the detokenizer has read all of them."""

    def __init__(self, detokenizer: Detokenizer, stop_strings: StringMatcher, banned_strings: StringMatcher) -> None:
        """`banned_strings` are casefolded; without them no checkpoints are kept."""
        self.detokenizer = detokenizer
        self.can_rewind = bool(banned_strings)
        self._stop_strings = stop_strings
        self._banned_strings = banned_strings
        self._has_strings = bool(stop_strings) or self.can_rewind
        self._tokens: list[_HeldToken] = []
        self._num_released = 0
        self._state = _ScanState(True, MatcherCursor(), MatcherCursor(), MatcherCursor())
        self._detokenizer_checkpoint = detokenizer.copy() if self.can_rewind else None  # before the next token

    def __len__(self) -> int:
        """How many tokens are held."""
        return len(self._tokens)

    @property
    def text(self) -> str:
        """The visible text of all held tokens, without an incomplete character."""
        return "".join([token.text for token in self._tokens])

    def with_stop_strings(self, stop_strings: StringMatcher) -> StopStringBuffer:
        """A buffer with other stop strings; only while no token is held."""
        return StopStringBuffer(self.detokenizer, stop_strings, self._banned_strings)

    def can_emit_now(self, text: str) -> bool:
        """Whether the token that the detokenizer has just decoded as `text` can be emitted immediately."""
        if self._tokens or self.detokenizer.pending:
            return False
        if self._has_strings:
            if self._stop_strings.may_start_in(text) or (
                self.can_rewind and self._banned_strings.may_start_in(text.casefold())
            ):
                return False
            if self.can_rewind:
                self._detokenizer_checkpoint = self.detokenizer.copy()
        return True

    def append(self, token_id: int, text: str, special_text: str = "") -> StringMatches:
        """Hold the token that the detokenizer has just decoded as `text`; the strings that it completes."""
        state = self._state
        visible, visible_match = self._stop_strings.scan(state.visible, text)
        if special_text or state.with_special.state != state.visible.state:
            with_special, special_match = self._stop_strings.scan(state.with_special, special_text + text)
        else:  # equal states and equal texts have equal successors
            with_special, special_match = MatcherCursor(state.with_special.length + len(text), visible.state), None
        casefolded, banned = state.casefolded, None
        self._tokens.append(_HeldToken(token_id, text, special_text, state, self._detokenizer_checkpoint))
        if self.can_rewind:
            casefolded, banned = self._banned_strings.scan(state.casefolded, text.casefold())
            self._detokenizer_checkpoint = self.detokenizer.copy()
        self._state = _ScanState(not self.detokenizer.pending, visible, with_special, casefolded)
        return StringMatches(visible_match, special_match, banned)

    def first_stop(self, matches: StringMatches) -> StopMatch | None:
        """The stop string that begins first; of two that begin together, the one found with hidden text."""
        stops = []
        if matches.with_special is not None:
            full_text = "".join([token.special_text + token.text for token in self._tokens])
            start = matches.with_special.start - self._tokens[0].state_before.with_special.length
            string = full_text[start : start + matches.with_special.length]
            stops.append(StopMatch(self._visible_offset(matches.with_special.start), string, full_text[start:]))
        if matches.visible is not None:
            visible_text = self.text
            start = matches.visible.start - self._tokens[0].state_before.visible.length
            stops.append(StopMatch(start, visible_text[start : start + matches.visible.length], visible_text[start:]))
        return min(stops, key=lambda stop: stop.offset, default=None)

    def offset_of_banned(self, banned: Match) -> int:
        """Where a banned string starts in the visible text."""
        token = self._tokens[self._token_index_at(banned.start)]
        inside = banned.start - token.state_before.casefolded.length
        characters = 0
        while (inside := inside - len(token.text[characters].casefold())) >= 0:  # folding may lengthen
            characters += 1
        return token.state_before.visible.length - self._tokens[0].state_before.visible.length + characters

    def rewind(self, banned: Match) -> RewoundTokens:
        """Remove the token in which a banned string begins, and all tokens after it."""
        index = self._token_index_at(banned.start)
        first = self._tokens[index]
        if banned.start < first.state_before.casefolded.length + len(first.text[0].casefold()):
            while not self._tokens[index].state_before.at_char_boundary:
                index -= 1
        dropped = self._tokens[index:]
        del self._tokens[index:]
        text = "".join([token.text for token in dropped]) + self.detokenizer.flush()
        self._state, self._detokenizer_checkpoint = dropped[0].state_before, dropped[0].detokenizer_before
        if self._detokenizer_checkpoint is not None:
            self.detokenizer = self._detokenizer_checkpoint.copy()
        return RewoundTokens(tuple([token.token_id for token in dropped]), text)

    def release(self) -> tuple[str, int]:
        """Remove the tokens that no unfinished match or character includes; their text and number."""
        self._flush_incomplete_char()
        self._state = self._with_num_releasable(len(self._tokens), self._state)
        count = self._state.num_releasable - self._num_released
        text = "".join([token.text for token in self._tokens[:count]])
        del self._tokens[:count]
        self._num_released += count
        return text, count

    def _with_num_releasable(self, index: int, state: _ScanState) -> _ScanState:
        """`state`, the search before the token at `index`, with its `num_releasable`.

        After a rewind, matches are possible again that the removed tokens had ruled out. So the number is that of the
        earliest position to which a rewind may go back: every match that is still open here is open there as well.
        """
        visible = self._stop_strings.num_final(state.visible)
        with_special = self._stop_strings.num_final(state.with_special)
        casefolded = self._banned_strings.num_final(state.casefolded)
        count, before = index, state
        while self.can_rewind and not (before.at_char_boundary and before.casefolded.length <= casefolded):
            count -= 1
            before = self._tokens[count].state_before
        if count < index:
            return state._replace(num_releasable=before.num_releasable)
        while not (
            before.at_char_boundary and before.visible.length <= visible and before.with_special.length <= with_special
        ):
            count -= 1
            before = self._tokens[count].state_before
        return state._replace(num_releasable=self._num_released + count)

    def _flush_incomplete_char(self) -> None:
        """Give the U+FFFD of a character that was not completed to the token before the newest."""
        newest = self._tokens[-1]
        if newest.state_before.at_char_boundary or not newest.text.startswith(REPLACEMENT):
            return
        _, visible, with_special, casefolded, _ = newest.state_before
        visible, _ = self._stop_strings.scan(visible, REPLACEMENT)
        with_special, _ = self._stop_strings.scan(with_special, REPLACEMENT)
        if newest.detokenizer_before is not None:
            newest.detokenizer_before.flush()
            casefolded, _ = self._banned_strings.scan(casefolded, REPLACEMENT)
        before = self._with_num_releasable(len(self._tokens) - 1, _ScanState(True, visible, with_special, casefolded))
        self._tokens[-2] = self._tokens[-2]._replace(text=self._tokens[-2].text + REPLACEMENT)
        self._tokens[-1] = newest._replace(text=newest.text[1:], state_before=before)

    def _token_index_at(self, casefolded_offset: int) -> int:
        """The index of the token that added a character of the casefolded text."""
        index = len(self._tokens) - 1
        while self._tokens[index].state_before.casefolded.length > casefolded_offset:
            index -= 1
        return index

    def _visible_offset(self, special_offset: int) -> int:
        """The offset in the visible text of a character of the text with special tokens.

        A hidden character is where the next visible one is.
        """
        token_at = next(
            token for token in reversed(self._tokens) if token.state_before.with_special.length <= special_offset
        )
        inside = max(special_offset - token_at.state_before.with_special.length - len(token_at.special_text), 0)
        return token_at.state_before.visible.length - self._tokens[0].state_before.visible.length + inside


class MatcherCursor(NamedTuple):
    """Where a scan of a text stands: how many characters were read, and the automaton's state."""

    length: int = 0
    state: int = 0


class Match(NamedTuple):
    """A complete string: where in the whole text it starts, and its length."""

    start: int
    length: int


class StringMatcher:
    """Finds any of several strings in a text that arrives in pieces: an Aho-Corasick automaton.

    Each character is read once, whatever came before it. The automaton's state after some text is a
    `MatcherCursor`; scanning again from an earlier cursor undoes what was read since. Characters are compared
    as they are: to ignore case, the caller folds the strings and the text. The strings are not empty. A
    matcher is immutable: many texts may share it.
    """

    __slots__ = ("_children", "_depths", "_fallbacks", "_first_chars", "_match_lengths")

    def __init__(self, strings: Iterable[str]) -> None:
        """Build the automaton; time and memory are proportional to the strings' total length."""
        self._children: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._match_lengths = [0]  # by state: the length of the longest string that ends here
        for string in strings:
            self._add(string)
        self._fallbacks = self._build_fallbacks()
        self._first_chars = frozenset(self._children[0])

    def __bool__(self) -> bool:
        """Whether there are strings to search for."""
        return bool(self._first_chars)

    def may_start_in(self, text: str) -> bool:
        """Whether any character of the text may be the first of a match."""
        return not self._first_chars.isdisjoint(text)

    def scan(self, cursor: MatcherCursor, text: str) -> tuple[MatcherCursor, Match | None]:
        """Read the next piece; returns the string that ends in it, the first to start, then the longest."""
        length, state = cursor
        if not state and self._first_chars.isdisjoint(text):
            return MatcherCursor(length + len(text), 0), None
        children, fallbacks, match_lengths = self._children, self._fallbacks, self._match_lengths
        best: Match | None = None
        for char in text:
            length += 1
            next_state = children[state].get(char)
            while next_state is None and state:
                state = fallbacks[state]
                next_state = children[state].get(char)
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
        for depth, char in enumerate(string, 1):
            next_state = self._children[state].get(char)
            if next_state is None:
                next_state = self._children[state][char] = len(self._children)
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
            for char, child in self._children[state].items():
                fallback = fallbacks[state]
                while fallback and char not in self._children[fallback]:
                    fallback = fallbacks[fallback]
                fallbacks[child] = self._children[fallback].get(char, 0)
                self._match_lengths[child] = self._match_lengths[child] or self._match_lengths[fallbacks[child]]
                states.append(child)
        return fallbacks
