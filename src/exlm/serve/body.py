"""Request bodies: received within limits, parsed once and validated once, off the event loop if large.

A body of 4 MiB can contain `[],` 1.4 million times. As Python objects that takes a hundred megabytes, and
parsing it blocks every other thread for a quarter of a second. So `JsonLimits` first counts the structural
characters, which takes a tenth of that time. Small bodies are handled on the event loop. All large ones share
one thread, so that other requests wait for at most one parser however many large bodies arrive together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Receive

from .errors import APIError, validation_error
from .limits import BodyMemoryLimiter, Limits

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
RawJson: TypeAlias = bytes | bytearray

LARGE_BODY_BYTES = 32 << 10
"""Bodies from this size on are parsed in the thread; smaller ones take at most a few milliseconds."""
MIN_JSON_LIMIT = 1 << 16
"""The least that `JsonLimits.for_body` allows, however small the largest body may be."""
WINDOW_BYTES = 1 << 18
"""Bytes scanned at a time; no other thread can run meanwhile."""
LONG_NUMBER = b"0" * 400
"""Numbers of this many digits are refused: the time to parse an integer grows with their square."""
DIGITS = bytes.maketrans(b"123456789", b"000000000")


@dataclass(frozen=True)
class JsonLimits:
    """How many values a JSON text may have, and how many lists, objects and fields among them."""

    values: int
    nodes: int

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
                    raise _too_large(f"{what} has more than {self.nodes:,} lists, objects and fields.")
                if values > self.values:
                    raise _too_large(f"{what} has more than {self.values:,} values.")
                if _has_long_number(outside):
                    digits = len(LONG_NUMBER)
                    raise APIError(400, f"{what} has a number of {digits} digits or more.", code="invalid_json")


class LargeBodyThread:
    """The one thread that works on requests with large bodies; it starts with the first of them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exlm-large-body")

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """End the thread; work that has not started is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class RequestBody:
    """The body of one request: received within limits, then parsed once, which frees its bytes."""

    def __init__(self, receive: Receive, memory: BodyMemoryLimiter, limits: Limits, thread: LargeBodyThread) -> None:
        self.caller = ""
        """The client whose share of the memory for bodies this body takes."""
        self.raw = bytearray()
        self._receive, self._memory, self._limits, self._thread = receive, memory, limits, thread
        self._size, self._more = 0, True

    @property
    def large(self) -> bool:
        """Whether work on this request belongs in the thread for large bodies."""
        return self._size >= LARGE_BODY_BYTES

    async def receive_all(self, headers: Mapping[bytes, bytes]) -> bool:
        """Receive the body; False if the client disconnected. Raises 413, 408 or 429."""
        limit = self._limits.body
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            raise _too_large(f"The body may have {limit} bytes.")
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while self._more:
                    message = await self._receive()
                    part: bytes = message.get("body", b"")
                    self._more = message.get("more_body", False)
                    self._memory.acquire(len(part), self.caller)
                    self.raw += part
                    if message["type"] != "http.request":
                        return False
                    if len(self.raw) > limit:
                        raise _too_large(f"The body may have {limit} bytes.")
        except TimeoutError:
            raise APIError(
                408,  # the connection is closed, so that the rest need not be read
                f"The body took longer than {self._limits.body_seconds} s.",
                headers={"Connection": "close"},
            ) from None
        self._size = len(self.raw)
        return True

    async def discard_rest(self) -> None:
        """Let the client finish sending, within the time limit, and keep nothing of it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.body_seconds):
                while self._more:
                    self._more = (await self._receive()).get("more_body", False)

    async def parse(self, kind: type[M]) -> M:
        """Parse and validate as a request of this kind, and free the bytes."""
        raw, limits = self.raw, JsonLimits.for_body(self._limits.body)
        try:
            return await self._run(lambda: _validate(kind, _parse_json(raw, limits)))
        finally:
            self.release()

    async def inspect_json(self, function: Callable[[Any], T]) -> T:
        """Parse without validating and return `function` of the value; keeps the bytes."""
        raw, limits = self.raw, JsonLimits.for_body(self._limits.body)
        return await self._run(lambda: function(_parse_json(raw, limits)))

    def release(self) -> None:
        """Free the bytes and give their memory back to the limiter."""
        self._memory.release(len(self.raw), self.caller)
        self.raw = bytearray()

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._thread.run(work) if self.large else work()


def _parse_json(raw: RawJson, limits: JsonLimits) -> Any:
    """Parse JSON; an empty body is None. pydantic_core bounds the nesting depth."""
    if not raw:
        return None
    limits.check(raw)
    try:
        return from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise APIError(400, f"The body is not JSON: {error}.", code="invalid_json") from None


def _validate(kind: type[M], value: Any) -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise validation_error(details) from None


def _too_large(message: str) -> APIError:
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
