"""Output: which of a job's tokens may be seen as text, and when the job ends or must go back.

Tokens are pushed as they are sampled and answered with a verdict each. A token is held back only while its
text may still become a stop string, a banned string or a whole character, and tokens are released in order,
whole. This part decides and does not act: it samples nothing, keeps no probabilities, and moves no sequence;
whoever pushes carries out the verdict, above all `Rewind`, before the next token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..errors import InputError
from ..text.detokenize import Detokenizer
from ..text.matching import Match, Strings
from .held import Found, Held
from .verdicts import Emit, Hold, Reason, Rewind, Stop, Verdict

HOLD = Hold()
NOTHING: frozenset[int] = frozenset()
PATIENCE = 8
"""How often a token is refused at one place; it is sampled again only if all others are excluded."""


class Output:
    """One job's way from tokens to text."""

    def __init__(
        self,
        stream: Detokenizer,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        stop_tokens: Collection[int] = (),
        stop_strings: Iterable[str] = (),
        banned_strings: Iterable[str] = (),
        special: Mapping[int, str] | None = None,
        healed: int | None = None,
    ) -> None:
        """`stream` reads the job's tokens and nothing else; it continues the prompt's text.

        `special` is what special tokens stand for: stop strings match it even where the stream hides it.
        `healed` is the prompt's last token if it was removed to be sampled anew: the first token pushed takes
        its place, shows only the text beyond it and counts as part of the prompt. Banned strings ignore case.
        """
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = max(min_new_tokens, 0)
        self.stop_tokens = frozenset(stop_tokens)
        self._special = special or {}
        self._healed = healed
        self._held = Held(stream, Strings(stop_strings), Strings(text.casefold() for text in banned_strings))
        self._count = 0 if healed is None else -1
        self._released = 0
        self._tried: dict[int, list[int]] = {}  # by position: tokens that led to a banned string

    @property
    def new_tokens(self) -> int:
        """How many tokens stand and count: not those taken back, not the healed one, but a stop token."""
        return max(self._count, 0)

    @property
    def healing(self) -> bool:
        """Whether the next token takes the place of the removed one; true again after going back to it."""
        return self._count < 0

    @property
    def blocked_stops(self) -> bool:
        """Whether stop tokens may not end the job yet."""
        return self._count < self.min_new_tokens

    @property
    def held(self) -> int:
        """How many of the newest tokens have no fate yet."""
        return len(self._held)

    @property
    def held_text(self) -> str:
        """Their text, without a character that is under way."""
        return self._held.text

    @property
    def revocable(self) -> int:
        """How many of the newest tokens a `Rewind` may still take back."""
        return len(self._held) if self._held.returns else 0

    def forbidden(self) -> frozenset[int]:
        """The tokens that must not be sampled next: stop tokens too early, and those already refused here.

        The removed token may always be sampled in its own place.
        """
        stops = self.stop_tokens if self.blocked_stops else NOTHING
        if stops and self.healing:
            stops -= {self._healed}
        tried = self._refused()
        return stops.union(tried) if tried else stops

    def check(self, token: int) -> None:
        """Raise InputError for a token that was refused here time and again, because nothing else is left."""
        tried = self._refused()
        if tried and tried.count(token) >= PATIENCE:
            raise InputError(
                f"Whatever may come next leads to a banned string: after {self.new_tokens} new tokens "
                f"{len({*tried})} were tried in vain. Ban less, or exclude fewer others (token_bias, hooks)."
            )

    def set_stops(self, tokens: Collection[int], strings: Iterable[str]) -> None:
        """Other stop conditions from the next token on; only while nothing is held."""
        self.stop_tokens = frozenset(tokens)
        self._held = self._held.looking_for(Strings(strings))

    def push(self, token: int, ends: bool = False) -> Verdict:
        """Decide about one more token; `ends` says that a filter lets nothing follow it.

        A stop token that comes while stop tokens are blocked is like any other.
        """
        if token in self.stop_tokens and not self.blocked_stops:
            return self._stop_on(token)
        held, hidden = self._held, ""
        if self._count < 0:
            text = self._heal(token)
        else:
            text = held.stream.push(token)
            if not text:
                hidden = self._special.get(token, "")
        self._count += 1
        reason: Reason | None = None
        if self._count >= self.max_new_tokens:
            reason = "max_new_tokens"
        elif ends:
            reason = "end_filter"
        elif not hidden and held.passes(text):
            return self._emit(text, 1)
        if reason:
            text += held.stream.flush()
        verdict = self._judge(held.take(token, text, hidden))
        if verdict is not None:
            return verdict
        if reason:
            return Stop(reason, held.text, len(held))
        text, count = held.release()
        return self._emit(text, count) if count else HOLD

    def _refused(self) -> Sequence[int]:
        """Tokens that led to a banned string from here."""
        return self._tried.get(self._released + len(self._held), ()) if self._tried else ()

    def _heal(self, token: int) -> str:
        """The text that a token adds to that of the removed one, both read from the same state."""
        known = "" if self._healed is None else self._held.stream.copy().push(self._healed)
        return self._held.stream.push(token).removeprefix(known)

    def _stop_on(self, token: int) -> Verdict:
        held = self._held
        self._count += 1
        tokens = len(held)
        tail = held.stream.flush()
        if tail:  # half a character stays half, and may be all that a string lacked
            verdict = self._judge(held.take(token, tail))
            if verdict is not None:
                return verdict
        text = held.stream.push(token) + held.stream.flush()
        return Stop("stop_token", held.text, tokens, text, 1, token)

    def _judge(self, found: Found) -> Stop | Rewind | None:
        """What a completed string means; of a stop string and a banned one, the first hides the other."""
        held = self._held
        cut = held.cut(found)
        if found.banned is not None and (cut is None or held.place(found.banned) <= cut.place):
            return self._rewind(found.banned)
        if cut is None:
            return None
        rest = cut.rest + held.stream.flush()
        return Stop("stop_string", held.text[: cut.place], len(held), rest, 0, cut.string)

    def _rewind(self, banned: Match) -> Rewind:
        tokens, text = self._held.go_back(banned)
        self._count -= len(tokens)
        position = self._released + len(self._held)
        self._tried = {place: tried for place, tried in self._tried.items() if place <= position}
        tried = self._tried.setdefault(position, [])
        tried.append(tokens[0])
        return Rewind(len(tokens), tuple(tried), text, tokens)

    def _emit(self, text: str, count: int) -> Emit:
        self._released += count
        if self._tried:
            self._tried = {place: tried for place, tried in self._tried.items() if place >= self._released}
        return Emit(text, count)
