"""Weights that other threads make ready before they are asked for, so that no core waits for another.

It knows the order in which weights will be wanted, how to make one and how large it is; what they are made
into is the builder's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import TracebackType
from typing import Generic, Self, TypeVar

from .address_space import readers

T = TypeVar("T")

AHEAD = 6
"""Weights in flight beside the one that is asked for; as many may be in memory that nobody has taken yet."""

SHARE = 48
"""Part of the model's bytes that weights in flight may take, where fewer than `AHEAD` of them fit."""


class ReadAhead(Generic[T]):
    """A queue of weights, a few of them always on their way: of the `total` bytes at most a `SHARE`th.

    Without threads each weight is made when it is asked for, by who asks.
    """

    def __init__(
        self, make: Callable[[str], T], size: Callable[[str], int], roles: Iterable[str], total: int
    ) -> None:
        self._make = make
        self._size = cache(size)
        self._later = deque(roles)
        self._most = total // SHARE
        self._coming: dict[str, Future[T]] = {}
        self._bytes: dict[str, int] = {}  # of those that come
        threads = readers(total)
        self._threads = ThreadPoolExecutor(threads, "exlm-read") if threads else None

    def __enter__(self) -> Self:
        try:
            self._fill()
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
        if self._threads is None:
            return self._make(role)
        while self._later and role not in self._coming:
            self._submit(self._later.popleft())
        if role not in self._coming:
            self._submit(role)
        self._fill()
        del self._bytes[role]
        return self._coming.pop(role).result()

    def _close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._coming.clear()
        self._bytes.clear()

    def _fill(self) -> None:
        while self._threads is not None and self._later and self._has_room(self._later[0]):
            self._submit(self._later.popleft())

    def _has_room(self, role: str) -> bool:
        """Whether another weight may come."""
        return len(self._coming) <= AHEAD and sum(self._bytes.values()) + self._size(role) <= self._most

    def _submit(self, role: str) -> None:
        assert self._threads is not None
        self._coming[role] = self._threads.submit(self._make, role)
        self._bytes[role] = self._size(role)
