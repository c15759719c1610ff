"""Output actions: what the engine is to do with a job's tokens, one action for each token pushed.

An action is a value; nothing has been emitted, stopped or rewound when it exists. `num_tokens` counts the
oldest unreleased tokens that it releases, so the engine takes the probabilities and logits of that many
tokens from the front of its queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StopReason = Literal["stop_token", "stop_string", "max_new_tokens", "end_filter"]
"""Why a job ends by itself."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Show this text; it is that of the `tokens` oldest held tokens. It may be empty, `tokens` is not 0."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Show nothing yet."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The end: show `text` with the `tokens` oldest held tokens; the rest is never shown.

    The rest is `held_tokens` tokens and the text `held_text`. A stop string's text is held and its tokens are
    shown; a stop token is held altogether. `trigger` is the stop token or the stop string.
    """

    reason: StopReason
    text: str
    num_tokens: int
    held_text: str = ""
    num_held_tokens: int = 0
    trigger: int | str | None = None


@dataclass(frozen=True, slots=True)
class Rewind:
    """Take back the `count` newest tokens, none of which was shown, and sample again without `blocked`.

    `blocked` are all tokens that have led to a banned string from there. The tokens before stay held.
    """

    num_tokens: int
    blocked: tuple[int, ...]
    suppressed_text: str
    suppressed_tokens: tuple[int, ...]


OutputAction = Emit | Hold | Stop | Rewind
