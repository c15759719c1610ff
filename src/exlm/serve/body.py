"""A request's body: received within limits, parsed once and validated once, in a thread where it is large.

The event loop does this itself for small bodies. Large ones share one thread, so that however many come at a
time, other requests wait for a single parser at most.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from .errors import APIError, too_many_requests, validation_error
from .json_size import JsonLimits
from .limits import Limits

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

LARGE_BODY_BYTES = 32 << 10
"""From so many bytes on a body is parsed in a thread: below, it takes a few milliseconds."""


class LargeBodyThread:
    """The thread for requests with large bodies; it is started with the first of them."""

    def __init__(self) -> None:
        """No thread yet."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exlm-large-body")

    async def run(self, work: Callable[[], T]) -> T:
        """What some work gives, once it is its turn."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Let the thread go; work that has not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class BodyMemoryLimiter:
    """How many bytes of bodies are held at the moment, of all requests together.

    Where there are several callers, each may hold as much as is left for all, so that one who holds nothing
    always finds room.
    """

    def __init__(self, bounds: Limits, shared: bool = False) -> None:
        """`shared` is whether there are several callers to be fair to."""
        self.max_bytes, self.shared = max(bounds.bodies, 4 * bounds.body), shared
        self.held = 0
        self._of: Counter[str] = Counter()

    def acquire(self, count: int, who: str = "") -> None:
        """Hold more for a caller, or refuse the request that brings it."""
        left = self.max_bytes - self.held
        if count > left or (self.shared and self._of[who] + count > left):
            raise too_many_requests(
                f"Bodies of {self.held} bytes are being read, and no more may be now: try again."
            )
        self.held += count
        self._of[who] += count

    def release(self, count: int, who: str = "") -> None:
        """Hold less."""
        self.held -= count
        self._of[who] -= count
        self._of += Counter()  # keeps only those who hold something


class RequestBody:
    """A parsed body, to be validated once. `large` tells whether work on it belongs in the thread."""

    def __init__(self, value: Any, threads: LargeBodyThread | None) -> None:
        """`threads` is given where the body is large."""
        self._value, self._threads = value, threads

    @property
    def large(self) -> bool:
        """Whether it takes long to work on."""
        return self._threads is not None

    @classmethod
    async def parsed(cls, raw: bytearray, bounds: Limits, threads: LargeBodyThread) -> RequestBody:
        """Parse what was received; a Problem says what is wrong with it."""
        limits = JsonLimits.for_body(bounds.body)
        if len(raw) < LARGE_BODY_BYTES:
            return cls(_parsed(raw, limits), None)
        return cls(await threads.run(lambda: _parsed(raw, limits)), threads)

    async def validated(self, kind: type[M]) -> M:
        """The request that the body is; it is let go of."""
        value, self._value = self._value, None
        if self._threads is None:
            return _validated(kind, value)
        return await self._threads.run(lambda: _validated(kind, value))


def parsed_body(kind: type[M]) -> Callable[[Request], Awaitable[M]]:
    """A dependency of a route: its request, of this kind."""

    async def validated(request: Request) -> M:
        body: RequestBody = request.state.body
        return await body.validated(kind)

    return validated


def _parsed(raw: bytearray, limits: JsonLimits) -> Any:
    """What JSON text says; nothing for no text. It may not nest deeper than the library goes."""
    if not raw:
        return None
    limits.check(raw)
    try:
        return from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise APIError(400, f"The body is not JSON: {error}.", code="invalid_json") from None


def _validated(kind: type[M], value: Any) -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise validation_error(
            error.errors(include_url=False, include_context=False, include_input=False)
        ) from None
