"""Output processing: which sampled tokens may be emitted as text, and when a job ends or must rewind.

`OutputProcessor.push` takes each token as it is sampled and returns an action: `Emit`, `Hold`, `Stop` or
`Rewind`. A token is held back only while its text may still become part of a stop string, of a banned string
or of a multi-byte character; tokens are released in order. The engine applies the action before it pushes the
next token, and keeps the tokens' probabilities and logits: an action says by `num_tokens` how many of the
oldest tokens it releases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError
from ..tokenizer.detokenizer import Detokenizer
from .stop_strings import Match, StopStringBuffer, StringMatcher, StringMatches

MAX_BANNED_RETRIES = 8
"""How often a token may be rejected at one position: it is sampled there again only if all others are excluded."""

StopReason = Literal["stop_token", "stop_string", "max_new_tokens", "end_filter"]
"""Why a job ends by itself."""


@dataclass(slots=True)
class Emit:
    """Emit `text`, perhaps empty, of the `num_tokens` oldest held tokens, at least one.

    Unlike the rarer actions it is not frozen, which would make it three times as slow to create.
    """

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Emit nothing yet."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the job: emit `text` and the `num_tokens` oldest held tokens.

    The remaining `num_held_tokens` tokens and `held_text` are not emitted. The tokens of a stop string are
    emitted but its text is not; of a stop token neither is. `trigger` is the stop token or stop string.
    """

    reason: StopReason
    text: str
    num_tokens: int
    held_text: str = ""
    num_held_tokens: int = 0
    trigger: int | str | None = None


@dataclass(frozen=True, slots=True)
class Rewind:
    """Rewind the `num_tokens` newest tokens, none of which was emitted, and sample again without `blocked`.

    `blocked` are all tokens that have led to a banned string from there. Held tokens before them stay held.
    """

    num_tokens: int
    blocked: tuple[int, ...]
    suppressed_text: str
    suppressed_tokens: tuple[int, ...]


OutputAction = Emit | Hold | Stop | Rewind

HOLD = Hold()
NO_TOKENS: frozenset[int] = frozenset()


class OutputProcessor:
    """Turns one job's tokens into text and actions."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        stop_tokens: Collection[int] = (),
        stop_strings: Iterable[str] = (),
        banned_strings: Iterable[str] = (),
        special_texts: Mapping[int, str] | None = None,
        healed_token: int | None = None,
    ) -> None:
        """`detokenizer` reads the job's tokens and nothing else; it continues the prompt's text.

        `special_texts` are the texts of special tokens: stop strings match them even where the detokenizer
        hides them. `healed_token` is the prompt's last token if it was removed to be sampled again: the first
        token pushed takes its place, emits only the text beyond it and counts as part of the prompt. Banned
        strings ignore case.
        """
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = max(min_new_tokens, 0)
        self.stop_tokens = frozenset(stop_tokens)
        self._special_texts = special_texts or {}
        self._healed_token = healed_token
        self._buffer = StopStringBuffer(
            detokenizer, StringMatcher(stop_strings), StringMatcher(text.casefold() for text in banned_strings)
        )
        self._num_new = 0 if healed_token is None else -1
        self._num_released = 0
        self._rejected_tokens: dict[int, list[int]] = {}  # by position: tokens that led to a banned string

    @property
    def new_tokens(self) -> int:
        """How many tokens count as new: not rewound ones, not the healed one, but a stop token."""
        return max(self._num_new, 0)

    @property
    def healing(self) -> bool:
        """Whether the next token takes the place of the healed one; true again after a rewind to it."""
        return self._num_new < 0

    @property
    def below_min_tokens(self) -> bool:
        """Whether stop tokens may not end the job yet."""
        return self._num_new < self.min_new_tokens

    @property
    def num_held(self) -> int:
        """How many of the newest tokens are neither emitted nor rewound yet."""
        return len(self._buffer)

    @property
    def held_text(self) -> str:
        """Their text, without an incomplete character."""
        return self._buffer.text

    @property
    def num_revocable(self) -> int:
        """How many of the newest tokens a `Rewind` may still take back."""
        return len(self._buffer) if self._buffer.can_rewind else 0

    def blocked_tokens(self) -> frozenset[int]:
        """The tokens that must not be sampled next: stop tokens too early, and those rejected at this
        position.

        In place of a healed token that is a stop token, the same token may be sampled again.
        """
        stops = self.stop_tokens if self.below_min_tokens else NO_TOKENS
        if stops and self.healing:
            stops -= {self._healed_token}
        rejected = self._rejected_here()
        return stops.union(rejected) if rejected else stops

    def check_retries(self, token: int) -> None:
        """Raise InputError for a token that was rejected here too often: nothing else is left to sample."""
        rejected = self._rejected_here()
        if rejected and rejected.count(token) >= MAX_BANNED_RETRIES:
            raise InputError(
                f"Every allowed next token completes a banned string: after {self.new_tokens} new tokens "
                f"{len({*rejected})} were tried. Ban fewer strings, or exclude fewer other tokens "
                "(token_bias, hooks)."
            )

    def set_stop_conditions(self, tokens: Collection[int], strings: Iterable[str]) -> None:
        """Other stop conditions from the next token on; only while nothing is held."""
        self.stop_tokens = frozenset(tokens)
        self._buffer = self._buffer.with_stop_strings(StringMatcher(strings))

    def push(self, token: int, filter_done: bool = False) -> OutputAction:
        """The action for one more token; `filter_done` says that a filter allows nothing after it.

        A stop token that comes while stop tokens are blocked is like any other.
        """
        if token in self.stop_tokens and not self.below_min_tokens:
            return self._stop_at_token(token)
        buffer, special_text = self._buffer, ""
        if self._num_new < 0:
            text = self._healed_text(token)
        else:
            text = buffer.detokenizer.push(token)
            if not text:
                special_text = self._special_texts.get(token, "")
        self._num_new += 1
        reason: StopReason | None = None
        if self._num_new >= self.max_new_tokens:
            reason = "max_new_tokens"
        elif filter_done:
            reason = "end_filter"
        elif not special_text and buffer.can_emit_now(text):
            return self._emit(text, 1)
        if reason:
            text += buffer.detokenizer.flush()
        action = self._action_for_match(buffer.append(token, text, special_text))
        if action is not None:
            return action
        if reason:
            return Stop(reason, buffer.text, len(buffer))
        text, count = buffer.release()
        return self._emit(text, count) if count else HOLD

    def _rejected_here(self) -> Sequence[int]:
        """Tokens that led to a banned string from here."""
        return self._rejected_tokens.get(self._num_released + len(self._buffer), ()) if self._rejected_tokens else ()

    def _healed_text(self, token: int) -> str:
        """The text by which a token is longer than the healed one, both decoded from the same state."""
        healed_text = "" if self._healed_token is None else self._buffer.detokenizer.copy().push(self._healed_token)
        return self._buffer.detokenizer.push(token).removeprefix(healed_text)

    def _stop_at_token(self, token: int) -> OutputAction:
        buffer = self._buffer
        self._num_new += 1
        tokens = len(buffer)
        tail = buffer.detokenizer.flush()
        if tail:  # U+FFFD for an incomplete character, which may complete a stop string or a banned one
            action = self._action_for_match(buffer.append(token, tail))
            if action is not None:
                return action
        text = buffer.detokenizer.push(token) + buffer.detokenizer.flush()
        return Stop("stop_token", buffer.text, tokens, text, 1, token)

    def _action_for_match(self, found: StringMatches) -> Stop | Rewind | None:
        """What a completed string means; of a stop string and a banned one, only the first to start counts."""
        buffer = self._buffer
        stop = buffer.first_stop(found)
        if found.banned is not None and (stop is None or buffer.offset_of_banned(found.banned) <= stop.offset):
            return self._rewind(found.banned)
        if stop is None:
            return None
        rest = stop.tail + buffer.detokenizer.flush()
        return Stop("stop_string", buffer.text[: stop.offset], len(buffer), rest, 0, stop.string)

    def _rewind(self, banned: Match) -> Rewind:
        tokens, text = self._buffer.rewind(banned)
        self._num_new -= len(tokens)
        position = self._num_released + len(self._buffer)
        self._rejected_tokens = {
            kept_position: rejected
            for kept_position, rejected in self._rejected_tokens.items()
            if kept_position <= position
        }
        rejected = self._rejected_tokens.setdefault(position, [])
        rejected.append(tokens[0])
        return Rewind(len(tokens), tuple(rejected), text, tokens)

    def _emit(self, text: str, count: int) -> Emit:
        self._num_released += count
        if self._rejected_tokens:
            self._rejected_tokens = {
                kept_position: rejected
                for kept_position, rejected in self._rejected_tokens.items()
                if kept_position >= self._num_released
            }
        return Emit(text, count)
