"""The operator's limits: of one request, of concurrent requests, and of the memory for their bodies.

A request that exceeds one is refused with an `APIError`; nothing here knows HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .errors import too_many_requests


@dataclass(frozen=True)
class Limits:
    """Limits of a server. The field names are also the keys of a Ray Serve configuration."""

    body: int = 4 << 20
    """Bytes of a request's body."""
    bodies: int = 64 << 20
    """Bytes of all bodies being received or parsed; at least four bodies of the largest size always fit."""
    headers: int = 32 << 10
    """Bytes of a request's headers."""
    header_seconds: float = 10.0
    """Time a client has to send its headers."""
    body_seconds: float = 30.0
    """Time a client has to send its body."""
    read_seconds: float = 60.0
    """Time for which a client may read nothing while a response is waiting for it."""
    choices: int = 16
    """Texts generated for one request: the number of prompts times `n`."""
    tokens: int | None = None
    """Largest `max_tokens`; None allows what the model's context has."""
    answer: int = 2048
    """`max_tokens` of a request that sets none, if the context has that much left."""
    requests: int = 512
    """Requests in flight, queued ones included. With several API keys, no key can take all of them."""
    grammar: int = 64 << 10
    """Characters of a JSON schema, regular expression or grammar."""
    grammars: int = 16
    """Grammars being compiled or waiting to be compiled."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Default sampler settings, for requests that do not set their own."""


class ConcurrencyLimiter:
    """Allows `limit` requests at a time and refuses the others with 429.

    If it is shared by several callers, one caller may hold at most as many slots as are free: a single caller
    gets half of them, two get a third each, and a caller without a request always finds a free slot.
    """

    def __init__(self, limit: int, what: str, shared: bool = False) -> None:
        """`what` names the things counted, for the error message."""
        self.limit, self.what, self.shared = limit, what, shared
        self.in_flight = 0
        self._by_caller: Counter[str] = Counter()

    @contextmanager
    def slot(self, caller: str = "") -> Iterator[None]:
        """Hold a slot for the length of the block, or raise 429 at once."""
        free = self.limit - self.in_flight
        if free < 1:
            raise too_many_requests(
                f"{self.in_flight} {self.what} are under way, as many as the server takes: try again."
            )
        if self.shared and self._by_caller[caller] >= free:
            raise too_many_requests(
                f"{self._by_caller[caller]} {self.what} of this key are under way, and {free} places are "
                "left for all: a key may not have more than that. Try again.",
                code="key_queue_full",
            )
        self.in_flight += 1
        self._by_caller[caller] += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._by_caller[caller] -= 1
            self._by_caller += Counter()  # drops callers whose count is zero


class BodyMemoryLimiter:
    """Bounds the bytes of all request bodies that are being received or parsed.

    If it is shared by several callers, one caller may hold at most as much as is free, so that a caller that
    holds nothing can always acquire some.
    """

    def __init__(self, limits: Limits, shared: bool = False) -> None:
        self.max_bytes, self.shared = max(limits.bodies, 4 * limits.body), shared
        self.reserved = 0
        self._by_caller: Counter[str] = Counter()

    def acquire(self, count: int, caller: str = "") -> None:
        """Reserve bytes for a caller, or raise 429."""
        free = self.max_bytes - self.reserved
        if count > free or (self.shared and self._by_caller[caller] + count > free):
            raise too_many_requests(
                f"Bodies of {self.reserved} bytes are being read, and no more may be now: try again."
            )
        self.reserved += count
        self._by_caller[caller] += count

    def release(self, count: int, caller: str = "") -> None:
        """Free bytes that `acquire` reserved."""
        self.reserved -= count
        self._by_caller[caller] -= count
        self._by_caller += Counter()  # drops callers whose count is zero
