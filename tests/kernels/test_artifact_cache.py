"""The cache of compiled kernels and plans: what is read was written so, by this user, and whole."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exlm.kernels import artifact_cache
from exlm.kernels.artifact_cache import (
    ArtifactCache,
    ArtifactFolder,
    UntrustedFolder,
    checksum,
    damage,
    file_name,
    scratch_folder,
)

NAME = "multiply-sm_90a-0123456789abcdef.cubin"
AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes and owners of files")


@pytest.fixture(autouse=True)
def _anew() -> None:
    artifact_cache.warn_once.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "a" / "kernels")


def found(folder: ArtifactFolder, name: str = NAME) -> list[bytes]:
    """The content of what is intact, and no warning about anything else."""
    said: list[str] = []
    files = [artifact.data for artifact in folder.find(name, said.append)]
    assert not said
    return files


def refused(folder: ArtifactFolder, name: str = NAME) -> str:
    """The one warning about a file, when nothing is intact."""
    said: list[str] = []
    assert [*folder.find(name, said.append)] == []
    (told,) = said
    return told


def test_the_checksum_in_a_name_is_that_of_sha256sum(folder: ArtifactFolder) -> None:
    path = folder.put(NAME, b"code")
    assert path.name == f"{Path(NAME).stem}-{hashlib.sha256(b'code').hexdigest()[:32]}.cubin"
    assert path.read_bytes() == b"code"
    assert found(folder) == [b"code"]
    assert damage(path) is None
    assert found(ArtifactFolder(folder.path)) == [b"code"]


def test_a_name_is_no_prefix_of_another(folder: ArtifactFolder) -> None:
    folder.put("cpu-avx2-1.so", b"a")
    folder.put("cpu-avx2-1-2.so", b"b")
    folder.put("cpu-avx2-1.cubin", b"c")
    (folder.path / "cpu-avx2-1.so").write_bytes(b"as earlier versions named it")
    (folder.path / f"cpu-avx2-1-{checksum(b'd').upper()}.so").write_bytes(b"d")
    (folder.path / f"cpu-avx2-1-{checksum(b'e')}.so~").write_bytes(b"e")
    assert found(folder, "cpu-avx2-1.so") == [b"a"]
    assert found(folder, "cpu-avx2-.so") == []
    assert found(folder, ".*.so") == []


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_written_is_not_for_others_to_change(folder: ArtifactFolder, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = folder.put(NAME, b"code")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o755 & ~umask
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert found(folder) == [b"code"]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "the first byte": lambda data: b"\xff" + data[1:],
    "the last byte": lambda data: data[:-1] + b"\0",
    "truncated": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_content_is_found_out_and_replaced(folder: ArtifactFolder, change: str) -> None:
    data = bytes(range(256)) * 40
    path = folder.put(NAME, data)
    path.write_bytes(CHANGES[change](data))
    assert refused(folder).startswith(f"{path} is not used, because it is damaged (the checksum of its")
    assert damage(path) is not None
    assert folder.put(NAME, data) == path
    assert found(folder) == [data]


def test_other_content_takes_the_place_of_what_is_damaged_alone(folder: ArtifactFolder) -> None:
    good, bad = folder.put(NAME, b"good"), folder.put(NAME, b"bad")
    bad.write_bytes(b"worse")
    new = folder.put(NAME, b"new")
    assert {*folder.path.iterdir()} == {good, new}
    os.utime(good, (1, 1))
    assert found(folder) == [b"new", b"good"]  # the newest first
    only = folder.put(NAME, b"only", only=True)
    assert [*folder.path.iterdir()] == [only]


def test_what_is_no_file_is_never_waited_for_nor_followed(folder: ArtifactFolder, tmp_path: Path) -> None:
    path = folder.put(NAME, b"code")
    elsewhere = path.rename(tmp_path / "elsewhere")
    makers: list[tuple[str, Callable[[], object]]] = [
        ("it is a symbolic link", lambda: path.symlink_to(elsewhere)),
        ("it is a symbolic link", lambda: path.symlink_to("nothing")),
        ("it is a symbolic link", lambda: path.symlink_to(path.name)),
        ("it is not a regular file", lambda: os.mkfifo(path)),
        ("it is not a regular file", path.mkdir),
    ]
    for reason, make in makers:
        make()
        assert f"because {reason}: another one is used or compiled." in refused(folder)
        assert folder.put(NAME, b"code") == path
        assert found(folder) == [b"code"]
        assert stat.S_ISREG(path.lstat().st_mode)
        path.unlink()
    assert elsewhere.read_bytes() == b"code"


def test_a_folder_with_something_in_it_is_left_alone(folder: ArtifactFolder) -> None:
    path = folder.put(NAME, b"code")
    path.unlink()
    path.mkdir()
    (path / "file").touch()
    with pytest.raises(OSError, match="not empty"):
        folder.put(NAME, b"code")
    assert [*folder.path.iterdir()] == [path]
    assert found(ArtifactFolder(path)) == []
    other = folder.put(NAME, b"other")
    assert {*folder.path.iterdir()} == {path, other}


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646, 0o777, 0o622])
def test_a_file_that_others_may_write_is_not_used(folder: ArtifactFolder, mode: int) -> None:
    path = folder.put(NAME, b"code")
    path.chmod(mode)
    who = f"(owner {os.geteuid()}, mode {mode:04o})"
    assert refused(folder) == (
        f"{path} is not used, because others may write to it {who}: another one is used or compiled."
    )
    held = path.open("r+b")  # another user's, from before
    folder.put(NAME, b"code")
    with held:
        held.write(b"evil")
    assert found(folder) == [b"code"]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(
    folder: ArtifactFolder, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    folder.put(NAME, b"code")
    folder.path.chmod(mode)
    for _ in range(3):
        assert found(folder) == []
        with pytest.raises(UntrustedFolder, match="EXLM_CACHE"):
            folder.put(NAME, b"code")
    (record,) = caplog.records
    assert f"{folder.path} is not used, because others may write to it" in record.message
    assert f"mode {mode:04o}" in record.message
    assert f"`chmod go-w {folder.path}`" in record.message
    folder.path.chmod(0o755)
    assert found(folder) == [b"code"]


@pytest.mark.skipif(not AS_ROOT, reason="only root gives files away")
def test_what_belongs_to_another_user_is_not_used(folder: ArtifactFolder) -> None:
    path = folder.put(NAME, b"code")
    os.chown(path, 12345, 12345)
    assert "it belongs to another user (owner 12345, mode 0644)" in refused(folder)
    os.chown(folder.path, 12345, 12345)
    with pytest.raises(UntrustedFolder, match=r"belongs to another user .owner 12345, mode 0755"):
        folder.put(NAME, b"code")


def test_what_belongs_to_root_is_used(folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder.put(NAME, b"code")
    if not AS_ROOT:
        pytest.skip("only root has files of root")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert found(folder) == [b"code"]
    os.chown(folder.path, 12345, 0)
    os.chown(path, 12345, 0)
    assert found(folder) == [b"code"]
    os.chown(path, 12346, 0)
    assert "owner 12346" in refused(folder)


def test_a_link_to_a_folder_is_followed(folder: ArtifactFolder, tmp_path: Path) -> None:
    folder.put(NAME, b"code")
    (tmp_path / "link").symlink_to(folder.path)
    linked = ArtifactFolder(tmp_path / "link")
    assert found(linked) == [b"code"]
    linked.put(NAME, b"more")
    assert len(found(folder)) == 2


def test_no_more_is_read_than_an_artifact_can_have(folder: ArtifactFolder) -> None:
    path = folder.put(NAME, b"code")
    os.truncate(path, 1 << 40)
    assert f"it is damaged ({1 << 40} bytes, more than {64 << 20})" in refused(folder)


def test_who_has_the_old_file_open_keeps_it(folder: ArtifactFolder) -> None:
    data = bytes(1 << 16)
    path = folder.put(NAME, data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        path.chmod(0o666)  # a reason to write it again
        assert folder.put(NAME, data) == path
        assert not os.path.samestat(os.fstat(file.fileno()), path.stat())
        assert mapped[:] == data  # truncated or written in place it would be SIGBUS, or something else


def test_a_write_that_fails_leaves_nothing(folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    old = folder.put(NAME, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.put(NAME, b"new", only=True)
    assert [*folder.path.iterdir()] == [old]


def test_the_content_is_on_the_disk_before_it_has_its_name(
    folder: ArtifactFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        sync(handle)

    def replaced(source: str, target: Path) -> None:
        done.append("rename")
        assert Path(source).read_bytes() == b"code"
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    folder.put(NAME, b"code")
    assert done == ["file", "rename", "folder"]


def test_readers_and_writers_at_once_see_whole_files(folder: ArtifactFolder) -> None:
    contents = [bytes([n]) * 100_000 for n in range(4)]
    folder.put(NAME, contents[0])
    over, failures = threading.Event(), []

    def read() -> None:
        own = ArtifactFolder(folder.path)
        while not over.is_set():
            said: list[str] = []
            seen = [artifact.data for artifact in own.find(NAME, said.append)]
            if said or not set(seen) <= {*contents}:
                failures.append((said, seen))

    def write(which: int) -> None:
        own = ArtifactFolder(folder.path)
        for turn in range(15):
            own.put(NAME, contents[(which + turn) % 4], only=which == 0)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(which,)) for which in range(3)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    over.set()
    for thread in readers:
        thread.join()
    assert not failures
    assert found(folder)
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


def test_a_file_that_another_process_wrote_is_found(folder: ArtifactFolder) -> None:
    assert found(folder) == []
    ArtifactFolder(folder.path).put(NAME, b"first")
    assert found(folder) == [b"first"]
    (kept,) = folder.path.iterdir()
    os.utime(folder.path, ns=(0, folder.path.stat().st_mtime_ns + 1))
    kept.unlink()
    assert found(folder) == []


def test_old_temporary_files_are_removed(folder: ArtifactFolder) -> None:
    folder.put(NAME, b"code")
    ages = {".exlm-partial-a": 7200, ".exlm-partial-b": 0, ".exlm-partial-c": -7200, "tmp0123abc_.so": 7200}
    ages |= {"tmp0123abcd": 7200, "tmp0123abc_.txt": 7200, "notes": 7200, "tmp01234": 7200}
    for name, age in ages.items():
        (folder.path / name).touch()
        os.utime(folder.path / name, (time.time() - age,) * 2)
    assert found(folder) == [b"code"]
    left = {path.name for path in folder.path.iterdir()}
    assert left == {file_name(NAME, b"code"), ".exlm-partial-b", "tmp0123abc_.txt", "notes", "tmp01234"}


def test_folders_to_compile_in_are_removed_when_their_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / ".exlm-partial-dead"
    dead.mkdir()
    (dead / "library.so").touch()
    new = tmp_path / ".exlm-partial-new"
    new.mkdir()
    os.utime(dead, (time.time() - 60,) * 2)
    with scratch_folder() as living:
        os.utime(living, (time.time() - 60,) * 2)
        with scratch_folder() as other:
            assert {*tmp_path.iterdir()} == {new, living, other}
    assert [*tmp_path.iterdir()] == [new]


def test_what_the_folder_does_not_take_is_kept_in_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "kernels"
    private = tmp_path / f"exlm-kernels-{os.geteuid()}"
    assert [*ArtifactCache(folder).find(NAME)] == []
    assert not private.exists()
    for _ in range(2):
        kept = ArtifactCache(folder).put(NAME, b"code")
        assert kept == private / file_name(NAME, b"code")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert [artifact.path for artifact in ArtifactCache(folder).find(NAME)] == [kept]
    (record,) = caplog.records
    assert f"cannot be kept in {folder}" in record.message
    assert "set EXLM_CACHE" in record.message
    private.chmod(0o777)
    assert [*ArtifactCache(folder).find(NAME)] == []
    assert ArtifactCache(folder).put(NAME, b"code") is None


def test_a_good_folder_leaves_the_private_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    cache = ArtifactCache(tmp_path / "kernels")
    assert cache.put(NAME, b"code") == tmp_path / "kernels" / file_name(NAME, b"code")
    assert [artifact.data for artifact in cache.find(NAME)] == [b"code"]
    assert [*(tmp_path / "tmp").iterdir()] == []
