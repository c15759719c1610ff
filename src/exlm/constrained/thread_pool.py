"""Threads in which filters think while the device works."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 4


class FilterThreadPool(Executor):
    """A few of them, made when first needed; a fork, which has none of its parent's, makes its own."""

    def __init__(self) -> None:
        self._create_pool()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have one of them call a function."""
        if self._owner_pid != os.getpid():
            self._create_pool()
        return self._pool.submit(fn, *args, **kwargs)

    def _create_pool(self) -> None:
        self._owner_pid = os.getpid()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "exlm-filter")
