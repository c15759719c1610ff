"""Threads that filters think in."""

from __future__ import annotations

import os
import threading

import pytest

from exlm.filters.threads import Threads


def test_they_call_what_they_are_given() -> None:
    threads = Threads()
    assert threads.submit(pow, 2, 5).result(60) == 32
    assert threads.submit(lambda: threading.current_thread().name).result(60).startswith("exlm-filter")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_fork_has_its_own() -> None:
    """A model that was used before `multiprocessing` forks must not wait for threads that are not there."""
    threads = Threads()
    assert threads.submit(pow, 2, 5).result(60) == 32
    child = os.fork()
    if child == 0:
        try:
            os._exit(threads.submit(pow, 2, 5).result(20))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 32
    assert threads.submit(pow, 2, 6).result(60) == 64
