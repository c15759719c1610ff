"""What may become of a job's tokens: the answers that `Output` gives, one for each token pushed.

A verdict is a value: nothing has been sent, stopped or taken back because it exists. Tokens are counted, not
listed: `tokens` is how many of the oldest tokens without a fate now have one, so whoever keeps probabilities
or logits for each token takes that many from the front of a queue.
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
