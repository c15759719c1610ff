"""File locks: a living owner keeps the lock, a dead one loses it."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from exlm.hub import file_lock


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(file_lock, "STALE_SECONDS", 1.0)


def never() -> None:
    pytest.fail("the lock is free")


def test_threads_take_turns(tmp_path: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with file_lock.exclusive_lock(tmp_path / "lock", lambda: None):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.02)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_a_living_owner_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "held"
    waited = threading.Event()
    got: list[float] = []

    def second() -> None:
        with file_lock.heartbeat_lock(path, waited.set):
            got.append(time.monotonic())

    with file_lock.heartbeat_lock(path, never):
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(10)
        time.sleep(2 * file_lock.STALE_SECONDS)
        released = time.monotonic()
        assert got == []
    thread.join(10)
    assert got[0] >= released
    assert not path.exists()


def test_a_stale_lock_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "held"
    path.write_text("the mark of a dead owner")
    told: list[str] = []
    with file_lock.heartbeat_lock(path, lambda: told.append("waiting")):
        assert path.read_text() != "the mark of a dead owner"
    assert told == ["waiting"]
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_lost_the_lock_does_not_release_it(tmp_path: Path) -> None:
    path = tmp_path / "held"
    with file_lock.heartbeat_lock(path, never):
        path.write_text("the heir")
    assert path.read_text() == "the heir"


def test_the_heartbeat_lock_is_used_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unavailable(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unavailable)
    with file_lock.exclusive_lock(tmp_path / "lock", never):
        assert (tmp_path / "lock.held").exists()
    assert not (tmp_path / "lock.held").exists()


def test_other_errors_of_flock_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def failing(handle: int, how: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", failing)
    with pytest.raises(OSError, match="Input/output"), file_lock.exclusive_lock(tmp_path / "lock", never):
        pass
