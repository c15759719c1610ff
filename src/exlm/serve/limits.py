"""How much a request may ask for, and how many may be under way. Numbers and counting; no HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .errors import too_many_requests


@dataclass(frozen=True)
class Limits:
    """What the operator allows; anything above is refused with a status that says so."""

    body: int = 4 << 20
    """Bytes of a request's body."""
    bodies: int = 64 << 20
    """Bytes of all bodies that are being received and parsed; four of the largest size fit in any case."""
    headers: int = 32 << 10
    """Bytes of a request's headers."""
    header_seconds: float = 10.0
    """How long a client may take to send its headers."""
    body_seconds: float = 30.0
    """How long a client may take to send its body."""
    read_seconds: float = 60.0
    """How long a client may read nothing of what waits for it."""
    choices: int = 16
    """Texts in one request: prompts times `n`."""
    tokens: int | None = None
    """The largest `max_tokens`; None is what the model's context has."""
    answer: int = 2048
    """`max_tokens` of a request that names none, if the context has that much left."""
    requests: int = 512
    """Requests under way, waiting ones included; of several keys none can take all of them."""
    grammar: int = 64 << 10
    """Characters of a JSON schema, regular expression or grammar."""
    grammars: int = 16
    """Grammars being compiled or waiting for it."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampler settings of requests that do not choose their own."""


class ConcurrencyLimiter:
    """Lets so many in at a time, and tells the others to come back.

    Where it is shared, a caller may have as many inside as there are places left: one alone gets half of
    them, two a third each, and whoever comes for the first time finds one.
    """

    def __init__(self, limit: int, what: str, shared: bool = False) -> None:
        """`what` is who is counted, in the words of a refusal."""
        self.limit, self.what, self.shared = limit, what, shared
        self.in_flight = 0
        self._by_caller: Counter[str] = Counter()

    @contextmanager
    def slot(self, who: str = "") -> Iterator[None]:
        """Inside, or refused at once."""
        left = self.limit - self.in_flight
        if left < 1:
            raise too_many_requests(
                f"{self.in_flight} {self.what} are under way, as many as the server takes: try again."
            )
        if self.shared and self._by_caller[who] >= left:
            raise too_many_requests(
                f"{self._by_caller[who]} {self.what} of this key are under way, and {left} places are left "
                "for all: a key may not have more than that. Try again.",
                code="key_queue_full",
            )
        self.in_flight += 1
        self._by_caller[who] += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._by_caller[who] -= 1
            self._by_caller += Counter()  # keeps only those who are inside
