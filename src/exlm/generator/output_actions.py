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
    """Emit this text, that of the `num_tokens` oldest held tokens. It may be empty; `num_tokens` is not 0."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Emit nothing yet."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the job: emit `text` with the `num_tokens` oldest held tokens, and nothing else.

    What is not emitted is `num_held_tokens` tokens and `held_text`. Of a stop string the text is held and the
    tokens are emitted; of a stop token both are held. `trigger` is the stop token or the stop string.
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
