"""Files that appear complete or not at all, and locks that end with their process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exlm import atomic
from exlm.atomic import atomic_file, lock_dir, lock_handle

needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="folders are not locked there")


def test_a_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with atomic_file(target) as temp:
        temp.write_text("new")
        assert target.read_text() == "old"
        assert temp == tmp_path / "file.partial"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("failing", ["block", "os.fsync", "os.replace"])
def test_a_failure_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write() -> None:
        with atomic_file(target, sync_folder=True) as temp:
            temp.write_text("new")
            if failing == "block":
                fail()

    target = tmp_path / "file"
    target.write_text("old")
    if failing != "block":
        monkeypatch.setattr(failing, fail)
    with pytest.raises(OSError, match="No space left"):
        write()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_content_is_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(handle: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def recorded_replace(source: object, target: object) -> None:
        events.append("rename")
        replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr("os.fsync", recorded_fsync)
    monkeypatch.setattr("os.replace", recorded_replace)
    with atomic_file(tmp_path / "file", tmp_path / "other", sync_folder=True) as temp:
        temp.write_text("text")
    assert [event for event in events if event != "folder"] == ["file", "rename"]
    if sys.platform == "linux":
        assert events == ["file", "rename", "folder"]


@needs_locks
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = "import sys, exlm.atomic as a; from pathlib import Path\n"
    code += "a.lock_dir(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    environment = {**os.environ, "PYTHONPATH": str(Path(atomic.__file__).parents[1])}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"locked\n"
    with pytest.raises(BlockingIOError):
        lock_dir(tmp_path)
    child.communicate()
    handle = lock_dir(tmp_path)
    assert handle is not None
    os.close(handle)


@needs_locks
def test_a_file_system_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(code: int) -> None:
        def flock(handle: int, how: int) -> None:
            raise OSError(code, "not here")

        monkeypatch.setattr("fcntl.flock", flock)

    handle = os.open(tmp_path, os.O_RDONLY)
    for code in (errno.ENOLCK, errno.EOPNOTSUPP):
        answer(code)
        assert not lock_handle(handle)
        assert lock_dir(tmp_path) is None
    answer(errno.EIO)
    with pytest.raises(OSError, match="not here"):
        lock_handle(handle)
    os.close(handle)
