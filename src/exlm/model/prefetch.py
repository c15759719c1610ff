"""Weights that other threads make ready before they are asked for, so that no core waits for another.

It knows the order in which weights will be wanted, how to make one and how large it is; what they are made
into is the builder's business.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import TracebackType
from typing import Generic, Self, TypeVar

from ..memory import has_address_space

T = TypeVar("T")

MAX_IN_FLIGHT = 6
"""Weights in flight beside the one that is asked for; as many may be in memory that nobody has taken yet."""

IN_FLIGHT_DIVISOR = 48
"""Part of the model's bytes that weights in flight may take, where fewer than `AHEAD` of them fit."""

READERS = min(6, max(2, (os.cpu_count() or 1) // 2))
"""Threads that read ahead: one waits for the disk, another rearranges. More would wait for each other."""

FOR_READER = 256 << 20
"""Bytes one of them may come to take: its stack, an arena of the C library, OpenMP threads of its own."""


class WeightPrefetcher(Generic[T]):
    """A queue of weights, a few of them always on their way: of the `total` bytes at most a `SHARE`th.

    Without threads each weight is made when it is asked for, by who asks.
    """

    def __init__(
        self, load: Callable[[str], T], size: Callable[[str], int], roles: Iterable[str], total_bytes: int
    ) -> None:
        self._load = load
        self._size = cache(size)
        self._queue = deque(roles)
        self._max_bytes = total_bytes // IN_FLIGHT_DIVISOR
        self._in_flight: dict[str, Future[T]] = {}
        self._in_flight_bytes: dict[str, int] = {}  # of those that come
        threads = readers(total_bytes)
        self._executor = ThreadPoolExecutor(threads, "exlm-read") if threads else None

    def __enter__(self) -> Self:
        try:
            self._submit_more()
        except BaseException:  # a thread that could not be started: `__exit__` is not called
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def take(self, role: str) -> T:
        """The weight of a role, or the error that making it led to; each role once."""
        if self._executor is None:
            return self._load(role)
        while self._queue and role not in self._in_flight:
            self._submit(self._queue.popleft())
        if role not in self._in_flight:
            self._submit(role)
        self._submit_more()
        del self._in_flight_bytes[role]
        return self._in_flight.pop(role).result()

    def _close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._in_flight.clear()
        self._in_flight_bytes.clear()

    def _submit_more(self) -> None:
        while self._executor is not None and self._queue and self._may_submit(self._queue[0]):
            self._submit(self._queue.popleft())

    def _may_submit(self, role: str) -> bool:
        """Whether another weight may come."""
        return (
            len(self._in_flight) <= MAX_IN_FLIGHT
            and sum(self._in_flight_bytes.values()) + self._size(role) <= self._max_bytes
        )

    def _submit(self, role: str) -> None:
        assert self._executor is not None
        self._in_flight[role] = self._executor.submit(self._load, role)
        self._in_flight_bytes[role] = self._size(role)


def readers(total: int) -> int:
    """How many threads may read a model of `total` bytes: none where that much may not fit beside them."""
    return READERS if has_address_space(2 * total + READERS * FOR_READER) else 0
