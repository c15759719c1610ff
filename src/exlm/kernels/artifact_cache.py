"""A verified cache of files that can be made again: compiled kernels and the plans that `exlm tune` measured.

The name of a file ends with a checksum of its content (`cpu-avx512-<key>-<checksum>.so`), so a file and its
checksum cannot get out of step, and two processes that write at once write the same file or two good ones.
A file is used if all of this holds; otherwise a warning says why not, and the caller makes it again:

- it is a regular file (not a symbolic link, a FIFO, a folder), and its content has the checksum of its name;
- it and its folder belong to this user or to root, and neither the group nor others may write to them:
  machine code that another user could have put there is not loaded.

The folders above are not checked. A user who may write to one of those could exchange the folder; the owner
of the new one gives that away, unless it happens between the check and the loading.

Writing is a temporary file, fsync and a rename, so a process that has the old file mapped keeps it. Standard
library only, and nothing of the package: the build of a wheel also names files by this module.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

CHECKSUM_DIGITS = 32  # of SHA-256, in hexadecimal
MAX_BYTES = 64 << 20  # the CPU library has 0.4 MB, a cubin less; more is not read into memory
STALE_SECONDS = 3600.0  # a temporary file of this age was left by a process that was killed
LOCK_SECONDS = 10.0  # a temporary folder of this age is locked by the process that made it, if that one lives

_PARTIAL = ".exlm-partial-"  # begins the names of temporary files and folders
_EARLIER = re.compile(r"tmp[a-z0-9_]{8}(\.so)?")  # temporary files of earlier versions
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | sum(  # O_NONBLOCK: opening a FIFO must not wait for a writer
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)

Report = Callable[[str], None]


class Artifact(NamedTuple):
    """A verified file."""

    path: Path
    data: bytes


class UntrustedFolder(PermissionError):
    """Other users may change what is in a folder."""


class Unusable(Exception):
    """Why a file is not used."""


@cache
def warn_once(message: str) -> None:
    """Log a warning the first time this process has it."""
    log.warning("%s", message)


def checksum(data: bytes) -> str:
    """What ends the name of a file with this content."""
    return hashlib.sha256(data).hexdigest()[:CHECKSUM_DIGITS]


def file_name(name: str, data: bytes) -> str:
    """`packed.cubin` → `packed-<checksum>.cubin`."""
    path = Path(name)
    return f"{path.stem}-{checksum(data)}{path.suffix}"


def damage(path: Path) -> str | None:
    """What is wrong with the content of a file whose name ends with a checksum; None if it is intact.

    This is for files of the installed package, which are trusted as the Python code beside them is: their
    owner and mode do not matter, and installers may have made them symbolic links.
    """
    try:
        _read(path, ours=False)
    except (OSError, Unusable) as reason:
        return str(reason)
    return None


class ArtifactFolder:
    """The files of one folder."""

    def __init__(self, path: Path, remedy: str = "another one is used or compiled") -> None:
        """`remedy` ends the warnings about files that are not used."""
        self.path = path
        self._remedy = remedy
        self._listed: tuple[int, list[str]] = (-1, [])  # the folder's time of modification, its names

    def find(self, name: str, report: Report = warn_once) -> Iterator[Artifact]:
        """The intact files of a name, the newest first; `report` gets the reason for each other one."""
        try:
            status = self.path.stat()
        except OSError:
            return
        if reason := writable_by_others(status):
            warn_once(refusal(self.path, reason))
            return
        for path in self._candidates(name, status):
            try:
                data = _read(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, Unusable) as problem:
                report(f"{path} is not used, because {problem}: {self._remedy}.")
                continue
            yield Artifact(path, data)

    def find_unverified(self, name: str, report: Report = warn_once) -> Artifact | None:
        """The file of exactly this name, as earlier versions wrote it; its owner and mode are checked.

        Only for content that the caller validates completely, never for machine code.
        """
        path = self.path / name
        try:
            if writable_by_others(self.path.stat()):
                return None  # `find` has said so
            return Artifact(path, _read(path, verify=False))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, Unusable) as problem:
            report(f"{path} is not used, because {problem}: {self._remedy}.")
            return None

    def put(self, name: str, data: bytes, *, only: bool = False) -> Path:
        """Write a file; unusable files of this name are removed, with `only` all others of this name.

        `OSError` if the folder does not take it.
        """
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)  # no umask lets others write to it
        status = self.path.stat()
        if reason := writable_by_others(status):
            raise UntrustedFolder(errno.EACCES, refusal(self.path, reason))
        self._listed = (-1, [])
        before = self._candidates(name, status)
        target = self.path / file_name(name, data)
        _write(target, data)
        for path in before:
            if path != target and (only or not _is_usable(path)):
                _remove(path)
        self._listed = (-1, [])
        return target

    def _candidates(self, name: str, status: os.stat_result) -> list[Path]:
        """Paths that are called as files of this name are, the newest first."""
        if self._listed[0] != status.st_mtime_ns:
            names = []
            with suppress(OSError):
                names = os.listdir(self.path)
            _sweep(self.path, names)
            self._listed = status.st_mtime_ns, names
        parts = Path(name)
        wanted = re.compile(rf"{re.escape(parts.stem)}-[0-9a-f]{{{CHECKSUM_DIGITS}}}{re.escape(parts.suffix)}")
        return sorted(
            (self.path / found for found in self._listed[1] if wanted.fullmatch(found)),
            key=lambda path: (_modified(path), path.name),
            reverse=True,
        )


class ArtifactCache:
    """A user's cache folder and, where that one cannot be used, a private one among the temporary files."""

    def __init__(self, folder: Path) -> None:
        self._folder = ArtifactFolder(folder)

    def find(self, name: str) -> Iterator[Artifact]:
        """The intact files of a name."""
        for folder in self._lasting(make=False):
            yield from folder.find(name)

    def folders(self) -> Iterator[ArtifactFolder]:
        """Where a new file may go, the best first; the last one is removed when the iterator ends."""
        yield from self._lasting(make=True)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, ignore_cleanup_errors=True) as fresh:
            yield ArtifactFolder(Path(fresh))

    def put(self, name: str, data: bytes) -> Path | None:
        """Write a file where it will be found again; None if that is impossible."""
        for folder in self._lasting(make=True):
            try:
                return folder.put(name, data)
            except OSError as error:
                warn_unwritable(folder, error)
        return None

    def _lasting(self, make: bool) -> Iterator[ArtifactFolder]:
        yield self._folder
        if path := _private_path(make):
            yield ArtifactFolder(path)


def warn_unwritable(folder: ArtifactFolder, reason: Exception) -> None:
    """Log once that a folder holds no new files."""
    if isinstance(reason, UntrustedFolder):
        warn_once(reason.strerror)
    else:
        warn_once(
            f"compiled kernels cannot be kept in {folder.path} ({reason}): set EXLM_CACHE to a folder that "
            "can be written."
        )


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder to compile in; those of processes that were killed are removed first."""
    with suppress(OSError):
        root = Path(tempfile.gettempdir())
        _sweep(root, [name for name in os.listdir(root) if name.startswith(_PARTIAL)])
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, ignore_cleanup_errors=True) as made:
        lock = _lock(Path(made))
        try:
            yield Path(made)
        finally:
            if lock is not None:
                os.close(lock)


def _private_path(make: bool) -> Path | None:
    """This user's own folder among the temporary files; None if there is none, or another user made it."""
    try:
        path = Path(tempfile.gettempdir()) / f"exlm-kernels-{os.geteuid() if hasattr(os, 'geteuid') else 'own'}"
        if make:
            path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()  # not a link: in a shared folder another user may have made that
    except OSError:
        return None
    return path if stat.S_ISDIR(status.st_mode) and not writable_by_others(status) else None


def refusal(folder: Path, reason: str) -> str:
    """Why a folder is not used that other users can change, and the remedy."""
    return (
        f"{folder} is not used, because {reason}, so another user could change what is loaded from "
        f"it: run `chmod go-w {folder}` if it is yours, or set EXLM_CACHE to a folder "
        "that only you can write to."
    )


def writable_by_others(status: os.stat_result) -> str | None:
    """How users other than this one and root can change a file or folder; None if they cannot."""
    if not hasattr(os, "geteuid"):  # Windows: access is not in the mode
        return None
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (owner {status.st_uid}, mode {mode:04o})"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (owner {status.st_uid}, mode {mode:04o})"
    return None


def open_regular(path: Path, ours: bool = True) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; with `ours`, only if no other user can change it, and no symbolic link.

    `Unusable` says why another file is not opened; FileNotFoundError and NotADirectoryError are not converted.
    """
    try:
        handle = os.open(path, _READ | (_NOFOLLOW if ours else 0))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:  # ELOOP: O_NOFOLLOW on a symbolic link
        words = "it is a symbolic link" if error.errno == errno.ELOOP else f"it cannot be opened ({error})"
        raise Unusable(words) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable("it is not a regular file")
        if ours and (reason := writable_by_others(status)):
            raise Unusable(reason)
    except BaseException:
        os.close(handle)
        raise
    return handle, status


def _read(path: Path, ours: bool = True, verify: bool = True) -> bytes:
    """The content of a file if it may be used; with `ours`, only if no other user can change it.

    With `verify` the checksum in its name must be that of its content.
    """
    handle, status = open_regular(path, ours)
    try:
        with open(handle, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > MAX_BYTES:
        raise Unusable(f"it is damaged ({status.st_size} bytes, more than {MAX_BYTES})")
    if verify and checksum(data) != path.stem[-CHECKSUM_DIGITS:]:
        raise Unusable(f"it is damaged (the checksum of its {len(data)} bytes is {checksum(data)})")
    return data


def _is_usable(path: Path) -> bool:
    try:
        _read(path)
    except (OSError, Unusable):
        return False
    return True


def _write(target: Path, data: bytes) -> None:
    """A file whole or not at all, on the disk before it has its name."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_PARTIAL)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):
            os.chmod(name, 0o644)  # another user may read it, as from a cache that root has filled
        if target.is_dir() and not target.is_symlink():
            target.rmdir()
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    with suppress(OSError):  # not every system can do that to a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sweep(folder: Path, names: list[str]) -> None:
    """Remove temporary files and folders of this user that no living process can still need."""
    now = time.time()
    for name in names:
        if not name.startswith(_PARTIAL) and not _EARLIER.fullmatch(name):
            continue
        path = folder / name
        with suppress(OSError):
            status = path.lstat()
            age = abs(now - status.st_mtime)
            if writable_by_others(status):
                continue
            if stat.S_ISREG(status.st_mode) and age > STALE_SECONDS:
                path.unlink()
            elif stat.S_ISDIR(status.st_mode) and name.startswith(_PARTIAL) and age > LOCK_SECONDS:
                lock = _lock(path)
                if lock is not None or age > STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
                if lock is not None:
                    os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder until the handle is closed; None if another process has it or there are no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove(path: Path) -> None:
    """Remove a file, a link or an empty folder, if the system lets us."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def _modified(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
