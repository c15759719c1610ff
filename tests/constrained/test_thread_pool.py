"""Threads that filters think in."""

from __future__ import annotations

import os
import threading

import pytest

from exlm.constrained.thread_pool import FilterThreadPool


def test_submitted_functions_are_called() -> None:
    threads = FilterThreadPool()
    assert threads.submit(pow, 2, 5).result(60) == 32
    assert threads.submit(lambda: threading.current_thread().name).result(60).startswith("exlm-filter")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_process_creates_its_own_pool() -> None:
    """A model that was used before `multiprocessing` forks must not wait for threads that are not there."""
    threads = FilterThreadPool()
    assert threads.submit(pow, 2, 5).result(60) == 32
    child = os.fork()
    if child == 0:
        try:
            os._exit(threads.submit(pow, 2, 5).result(20))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 32
    assert threads.submit(pow, 2, 6).result(60) == 64
