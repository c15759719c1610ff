"""The folder of packed matrices: files were written whole, by this user, for their key, and stay within bounds."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import pytest

from exlm.kernels import artifact_cache, packed_store
from exlm.kernels.packed_store import LOCK_SUFFIX, PARTIAL, SUFFIX, TRAILER, PackedStore, write_all

KEY, OTHER, THIRD = "0" * 32, "1" * 32, "2" * 32
DATA = bytes(range(256)) * 64
AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes and owners of files")


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact_cache.warn_once.cache_clear()
    monkeypatch.setattr(packed_store, "RESERVED_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return PackedStore(tmp_path / "a" / "packed", 1 << 30)


def put(store: PackedStore, key: str = KEY, data: bytes = DATA, model: str = "/models/a.gguf") -> bool:
    def fill(file: FileIO) -> object:
        write_all(file, memoryview(data))
        return {"numbers": [1, 2, 3]}

    return store.write(key, model, len(data), fill)


def content(store: PackedStore, key: str = KEY) -> bytes | None:
    found = store.find(key)
    return None if found is None else bytes(found.map[: found.header.data_bytes])


def path_of(store: PackedStore, key: str = KEY) -> Path:
    return store.folder / f"{key}{SUFFIX}"


def said(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    return record.getMessage()


def test_what_was_written_is_found(store: PackedStore) -> None:
    assert store.find(KEY) is None
    assert store.entries() == []
    assert put(store)
    found = store.find(KEY)
    assert found is not None
    assert (found.header.key, found.header.model) == (KEY, "/models/a.gguf")
    assert found.header.content == {"numbers": [1, 2, 3]}
    assert content(store) == DATA
    assert store.find(OTHER) is None
    assert [path.name for path in store.folder.iterdir()] == [f"{KEY}{SUFFIX}"]  # no lock and no partial file


def test_only_this_user_can_read_the_files(store: PackedStore) -> None:
    before = os.umask(0)
    try:
        put(store)
    finally:
        os.umask(before)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert path_of(store).stat().st_mode & 0o777 == 0o600


def test_writing_to_the_map_leaves_the_file(store: PackedStore) -> None:
    put(store)
    found = store.find(KEY)
    assert found is not None
    found.map[0:4] = b"abcd"
    assert content(store) == DATA


@pytest.mark.parametrize("kept", [0, 1, TRAILER.size, len(DATA), len(DATA) + 10, -1])
def test_a_truncated_file_is_refused(store: PackedStore, kept: int, caplog: pytest.LogCaptureFixture) -> None:
    put(store)
    whole = path_of(store).read_bytes()
    path_of(store).write_bytes(whole[:kept])
    assert store.find(KEY) is None
    assert "is not used, because it is" in said(caplog)
    assert [entry.model for entry in store.entries()] == [""]
    assert put(store)
    assert content(store) == DATA


@pytest.mark.parametrize("at", range(-1, -TRAILER.size - 40, -7))
def test_a_changed_header_or_trailer_is_refused(store: PackedStore, at: int) -> None:
    put(store)
    whole = bytearray(path_of(store).read_bytes())
    padding = range(len(whole) - TRAILER.size + 12, len(whole) - TRAILER.size + 16)
    if len(whole) + at in padding:
        pytest.skip("bytes without a meaning")
    whole[at] ^= 16
    path_of(store).write_bytes(whole)
    assert store.find(KEY) is None


def test_another_version_is_refused(
    store: PackedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store)
    monkeypatch.setattr(packed_store, "VERSION", 2)
    assert store.find(KEY) is None
    assert "it is of version 1, and this is version 2" in said(caplog)


def test_the_file_of_another_key_is_refused(store: PackedStore, caplog: pytest.LogCaptureFixture) -> None:
    put(store)
    shutil.copy(path_of(store), path_of(store, OTHER))
    assert store.find(OTHER) is None
    assert "it belongs to another model" in said(caplog)


def test_a_header_of_another_form_is_refused(store: PackedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("[]", "[" * 100_000, '{"key": 1}', "x"):
        monkeypatch.setattr(packed_store.json, "dumps", lambda _, text=text: text)
        put(store)
        monkeypatch.undo()
        monkeypatch.setattr(packed_store, "RESERVED_BYTES", 0)
        assert store.find(KEY) is None


def test_links_and_other_kinds_of_files_are_refused(store: PackedStore, caplog: pytest.LogCaptureFixture) -> None:
    put(store, OTHER)
    path_of(store).symlink_to(path_of(store, OTHER))
    assert store.find(KEY) is None
    assert "it is a symbolic link" in said(caplog)
    path_of(store).unlink()
    os.mkfifo(path_of(store))
    assert store.find(KEY) is None
    path_of(store).unlink()
    path_of(store).mkdir()
    assert store.find(KEY) is None
    assert not put(store)  # a folder is in the way, which is said and no error


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_files_that_others_may_write_are_refused(
    store: PackedStore, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    put(store)
    path_of(store).chmod(mode)
    assert store.find(KEY) is None
    assert "others may write to it" in said(caplog)
    assert put(store)
    assert content(store) == DATA


def test_a_folder_that_others_may_write_is_refused(store: PackedStore, caplog: pytest.LogCaptureFixture) -> None:
    put(store)
    store.folder.chmod(0o777)
    assert store.find(KEY) is None
    assert f"chmod go-w {store.folder}" in said(caplog)
    assert not put(store, OTHER)
    store.folder.chmod(0o700)
    assert content(store) == DATA


@pytest.mark.skipif(not AS_ROOT, reason="only root can give files away")
def test_files_of_other_users_are_refused(store: PackedStore, caplog: pytest.LogCaptureFixture) -> None:
    put(store)
    os.chown(path_of(store), 12345, -1)
    assert store.find(KEY) is None
    assert "it belongs to another user" in said(caplog)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_means_no_file(
    store: PackedStore, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, OTHER)

    def full(file: FileIO, data: memoryview) -> None:
        file.write(data[:100])
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(sys.modules[__name__], "write_all", full)
    assert not put(store)
    assert os.strerror(error) in said(caplog)
    assert [path.name for path in store.folder.iterdir()] == [f"{OTHER}{SUFFIX}"]


def test_too_little_free_space_means_no_file(
    store: PackedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_store, "RESERVED_BYTES", 1 << 60)
    assert not put(store)
    assert "are free" in said(caplog)
    assert [*store.folder.iterdir()] == []


@pytest.mark.skipif(AS_ROOT, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_read(store: PackedStore) -> None:
    put(store)
    store.folder.chmod(0o500)
    try:
        assert content(store) == DATA
        assert not put(store, OTHER)
    finally:
        store.folder.chmod(0o700)


def test_a_folder_that_cannot_be_made_means_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = PackedStore(tmp_path / "file" / "packed", 1 << 30)
    assert store.find(KEY) is None
    assert not put(store)
    assert "cannot be kept" in said(caplog)


def test_the_files_used_longest_ago_are_removed_first(store: PackedStore) -> None:
    for age, key in enumerate((KEY, OTHER, THIRD)):
        put(store, key)
        os.utime(path_of(store, key), (time.time() - 100 + age,) * 2)
    assert store.find(KEY) is not None  # it counts as used now
    assert [entry.path for entry in store.entries()] == [path_of(store, key) for key in (KEY, THIRD, OTHER)]
    store.max_bytes = 2 * path_of(store).stat().st_size + packed_store.HEADER_BYTES + len(DATA) // 256
    assert put(store, "3" * 32)
    assert content(store, OTHER) is None
    assert content(store, THIRD) is None
    assert content(store) == content(store, "3" * 32) == DATA
    assert sum(entry.size for entry in store.entries()) <= store.max_bytes


def test_a_file_larger_than_the_bound_is_not_written(store: PackedStore) -> None:
    put(store)
    store.max_bytes = len(DATA)
    assert not put(store, OTHER)
    assert content(store) == DATA  # and nothing is removed for it


def test_a_removed_or_replaced_file_stays_mapped(store: PackedStore) -> None:
    put(store)
    found = store.find(KEY)
    assert found is not None
    put(store, data=DATA[::-1])
    assert bytes(found.map[: len(DATA)]) == DATA
    assert content(store) == DATA[::-1]
    for entry in store.entries():
        store.remove(entry)
    assert bytes(found.map[: len(DATA)]) == DATA
    assert store.find(KEY) is None


def test_what_killed_processes_left_is_removed(store: PackedStore) -> None:
    put(store)
    own, old, young = (store.folder / f"{PARTIAL}{name}" for name in (f"{KEY}-x", f"{OTHER}-x", f"{THIRD}-x"))
    for path in (own, old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * artifact_cache.STALE_SECONDS,) * 2)
    (store.folder / f"{KEY}{LOCK_SUFFIX}").touch()
    assert put(store)
    assert not own.exists()
    assert not old.exists()
    assert young.exists()  # another process may be writing it


class Running(NamedTuple):
    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


WRITER = """
import sys
from pathlib import Path
from exlm.kernels import packed_store
packed_store.RESERVED_BYTES = 0
def fill(file):
    print("writing", flush=True)
    sys.stdin.readline()
    packed_store.write_all(file, memoryview(bytes(1000)))
    return None
print(packed_store.PackedStore(Path(sys.argv[1]), 1 << 30).write(sys.argv[2], "model", 1000, fill), flush=True)
"""


def test_of_two_processes_one_writes(store: PackedStore) -> None:
    command = [sys.executable, "-c", WRITER, str(store.folder), KEY]
    first = Running(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert first.line() == "writing"
    second = Running(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert second.line() == "False"
    assert put(store, OTHER)  # another model's lock is another one
    first.tell()
    assert first.line() == "True"
    for one in (first, second):
        one.process.communicate()
    assert content(store) == bytes(1000)
    assert not [path for path in store.folder.iterdir() if path.suffix != SUFFIX]


def test_a_process_that_is_killed_leaves_no_file_and_no_lock(store: PackedStore) -> None:
    command = [sys.executable, "-c", WRITER, str(store.folder), KEY]
    first = Running(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert first.line() == "writing"
    first.process.kill()
    first.process.communicate()
    assert store.find(KEY) is None
    assert put(store)
    assert content(store) == DATA
    assert not [path for path in store.folder.iterdir() if path.suffix != SUFFIX]
