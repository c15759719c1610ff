"""Weights read by other threads before they are asked for, so that building waits for the disk and not twice.

It knows the order in which weights will be wanted and how to read one; what they become is the builder's
business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ..formats import Weight

READERS = 3
"""Threads: while one waits for the disk, another unpacks scales."""

AHEAD = 6
"""Weights in flight; as many may be in memory that nobody has taken yet."""


class ReadAhead:
    """A queue of weights, a few of them always on their way."""

    def __init__(self, read: Callable[[str], Weight], roles: Iterable[str]) -> None:
        self._read = read
        self._later = deque(roles)
        self._coming: dict[str, Future[Weight]] = {}
        self._threads = ThreadPoolExecutor(READERS, "exlm-read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._coming.clear()

    def take(self, role: str) -> Weight:
        """The weight of a role, or the error that reading it led to; each role once."""
        while self._later and (role not in self._coming or len(self._coming) <= AHEAD):
            self._submit(self._later.popleft())
        if role not in self._coming:
            self._submit(role)
        return self._coming.pop(role).result()

    def _submit(self, role: str) -> None:
        self._coming[role] = self._threads.submit(self._read, role)
