"""Reader threads that prepare weights before the builder asks for them.

The prefetcher knows the order of the weights, how to load one and its size; the builder decides what loading
means (read, repack, bind).
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
"""Most weights that are prefetched ahead of the one requested."""

IN_FLIGHT_DIVISOR = 48
"""Weights in flight may take one IN_FLIGHT_DIVISORth of the model's bytes."""

READERS = min(6, max(2, (os.cpu_count() or 1) // 2))
"""Reader threads: while one waits for the disk, another repacks. More would wait for each other."""

FOR_READER = 256 << 20
"""Address space of one reader: its stack, a malloc arena, its OpenMP threads."""


class WeightPrefetcher(Generic[T]):
    """Loads a queue of weights in reader threads, a few ahead of the builder.

    Without threads, `take` loads the weight in the calling thread.
    """

    def __init__(
        self, load: Callable[[str], T], size: Callable[[str], int], roles: Iterable[str], total_bytes: int
    ) -> None:
        self._load = load
        self._size = cache(size)
        self._queue = deque(roles)
        self._max_bytes = total_bytes // IN_FLIGHT_DIVISOR
        self._in_flight: dict[str, Future[T]] = {}
        self._in_flight_bytes: dict[str, int] = {}  # of those not taken yet
        threads = readers(total_bytes)
        self._executor = ThreadPoolExecutor(threads, "exlm-read") if threads else None

    def __enter__(self) -> Self:
        try:
            self._submit_more()
        except BaseException:  # a thread could not start: `__exit__` is not called
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def take(self, role: str) -> T:
        """The weight of a role, or the error of loading it; each role once."""
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
        """Whether another weight may be in flight."""
        return (
            len(self._in_flight) <= MAX_IN_FLIGHT
            and sum(self._in_flight_bytes.values()) + self._size(role) <= self._max_bytes
        )

    def _submit(self, role: str) -> None:
        assert self._executor is not None
        self._in_flight[role] = self._executor.submit(self._load, role)
        self._in_flight_bytes[role] = self._size(role)


def readers(total: int) -> int:
    """Threads for a model of `total` bytes: none if the address space is too small for both."""
    return READERS if has_address_space(2 * total + READERS * FOR_READER) else 0
