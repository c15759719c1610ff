"""How much a request may ask for, and how many may be under way. Numbers and counting; no HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .problems import busy


@dataclass(frozen=True)
class Bounds:
    """What the operator allows; anything above is refused with a status that says so."""

    body: int = 4 << 20
    """Bytes of a request's body."""
    headers: int = 32 << 10
    """Bytes of a request's headers."""
    body_seconds: float = 30.0
    """How long a client may take to send its body."""
    choices: int = 16
    """Texts in one request: prompts times `n`."""
    tokens: int | None = None
    """The largest `max_tokens`; None is what the model's context has."""
    answer: int = 2048
    """`max_tokens` of a request that names none, if the context has that much left."""
    requests: int = 512
    """Requests under way, waiting ones included."""
    grammar: int = 64 << 10
    """Characters of a JSON schema, regular expression or grammar."""
    grammars: int = 16
    """Grammars being compiled or waiting for it."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampler settings of requests that do not choose their own."""


class Gate:
    """Lets so many in at a time, and tells the others to come back."""

    def __init__(self, most: int, what: str) -> None:
        """`what` is who is counted, in the words of a refusal."""
        self.most, self.what = most, what
        self.inside = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, or refused at once."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Count one more, or refuse it."""
        if self.inside >= self.most:
            raise busy(f"{self.inside} {self.what} are under way, as many as the server takes: try again.")
        self.inside += 1

    def leave(self) -> None:
        """Count one less."""
        self.inside -= 1
