"""The operator's limits: of one request, of its JSON, of concurrent requests, and of the memory for their bodies.

A request that exceeds one is refused with an `APIError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .errors import APIError, too_many_requests

RawJson: TypeAlias = bytes | bytearray

MIN_JSON_LIMIT = 1 << 16
"""The least that `JsonLimits.for_body` allows, however small the largest body may be."""
WINDOW_BYTES = 1 << 18
"""Bytes of JSON scanned at a time; no other thread can run meanwhile."""
LONG_NUMBER = b"0" * 400
"""Numbers of this many digits are refused: the time to parse an integer grows with their square."""
DIGITS = bytes.maketrans(b"123456789", b"000000000")


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


class FairLimiter:
    """Counts what is in use, up to `limit`, and refuses more with 429.

    If it is shared by several callers, one caller may have at most as much as is free: a single caller gets half of
    the limit, two get a third each, and a caller that has nothing can always acquire one.
    """

    def __init__(self, limit: int, what: str, shared: bool = False) -> None:
        """`what` names the things counted, for the error message."""
        self.limit, self.what, self.shared = limit, what, shared
        self.in_use = 0
        self._by_caller: Counter[str] = Counter()

    def acquire(self, caller: str = "", count: int = 1) -> None:
        """Reserve `count` for a caller, or raise 429 at once."""
        free, held = self.limit - self.in_use, self._by_caller[caller]
        if count > free:
            raise too_many_requests(f"{self.in_use} {self.what} are under way, as many as the server takes: try again.")
        if self.shared and held + count > free:
            raise too_many_requests(
                f"{held} {self.what} of this key are under way, and {free} places are left for all: a key may not "
                "have more than that. Try again.",
                code="key_queue_full",
            )
        self.in_use += count
        self._by_caller[caller] += count

    def release(self, caller: str = "", count: int = 1) -> None:
        self.in_use -= count
        self._by_caller[caller] -= count
        self._by_caller += Counter()  # drops callers whose count is zero

    @contextmanager
    def slot(self, caller: str = "") -> Iterator[None]:
        """Reserve one for the length of the block, or raise 429 at once."""
        self.acquire(caller)
        try:
            yield
        finally:
            self.release(caller)


@dataclass(frozen=True)
class JsonLimits:
    """How many values a JSON text may have, counted before it is parsed.

    A body of 4 MiB can contain `[],` 1.4 million times. As Python objects that takes a hundred megabytes, and parsing
    it blocks every other thread for a quarter of a second. Counting the structural characters takes a tenth of that.
    """

    values: int
    """One more than the commas outside of strings."""
    nodes: int
    """Lists, objects, and fields of objects."""

    @classmethod
    def for_body(cls, size: int) -> JsonLimits:
        """Limits for bodies of `size` bytes: a token id takes 7 or 8 of them, a message 50 or more."""
        return cls(max(size // 16, MIN_JSON_LIMIT), max(size // 64, MIN_JSON_LIMIT))

    def check(self, *texts: RawJson, what: str = "The body") -> None:
        """Raise 413 if the texts together exceed the limits; `what` names them in the message."""
        if (
            sum(text.count(b",") for text in texts) < self.values
            and sum(map(_count_nodes, texts)) <= self.nodes
            and not any(map(_has_long_number, texts))
        ):
            return  # these counts include what is inside strings, so they are upper bounds
        values, nodes = 1, 0
        for text in texts:
            for outside in _outside_strings(text):
                values += outside.count(b",")
                nodes += _count_nodes(outside)
                if nodes > self.nodes:
                    raise body_too_large(f"{what} has more than {self.nodes:,} lists, objects and fields.")
                if values > self.values:
                    raise body_too_large(f"{what} has more than {self.values:,} values.")
                if _has_long_number(outside):
                    digits = len(LONG_NUMBER)
                    raise APIError(400, f"{what} has a number of {digits} digits or more.", code="invalid_json")


def body_too_large(message: str) -> APIError:
    return APIError(413, message, code="body_too_large")


def _count_nodes(text: RawJson) -> int:
    return sum(map(text.count, (b"[", b"{", b":")))


def _has_long_number(text: RawJson) -> bool:
    return LONG_NUMBER in text.translate(DIGITS)


def _outside_strings(text: RawJson) -> Iterator[RawJson]:
    """The parts of a JSON text outside of its strings, window by window."""
    if b"\\" in text:  # without escapes, every remaining quote begins or ends a string
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    inside = 0
    for start in range(0, len(text), WINDOW_BYTES):
        parts = text[start : start + WINDOW_BYTES].split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2
