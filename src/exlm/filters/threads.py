"""Threads in which filters think while the device works."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

COUNT = 4


class Threads(Executor):
    """A few of them, made when first needed; a fork, which has none of its parent's, makes its own."""

    def __init__(self) -> None:
        self._renew()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have one of them call a function."""
        if self._process != os.getpid():
            self._renew()
        return self._threads.submit(fn, *args, **kwargs)

    def _renew(self) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(COUNT, "exlm-filter")
