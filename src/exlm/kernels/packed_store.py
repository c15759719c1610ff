"""A folder of large files that can be made again, bounded in bytes: models' matrices as a backend packed them.

A file `<key>.packed` is

    data | header (JSON) | trailer: magic, version, length and SHA-256 of the header

The header names the key, the model, and what the caller needs to find its data and to verify it: a file that is cut
short, of another version or of another key is not used, and neither is one that users other than this one and root
could have changed (as in `artifact_cache`). Files are mapped, never executed or unpickled.

A file is written under a temporary name and renamed, so it appears whole or not at all, and a process that has the old
one mapped keeps it. It is not flushed to the disk: what a power cut leaves fails its checksums. If the folder would
exceed its bound, the files that were not used for the longest time are removed; the time of a file's last use is its
time of modification. Nothing here imports torch: `exlm cache` lists the folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from ..atomic import lock_handle
from ..memory import private_map
from .artifact_cache import (
    STALE_SECONDS,
    UntrustedFolder,
    Unusable,
    open_regular,
    refusal,
    warn_once,
    writable_by_others,
)

log = logging.getLogger(__name__)

PACKED_FOLDER = "packed"
"""Below the cache folder."""

SUFFIX = ".packed"
LOCK_SUFFIX = ".lock"
PARTIAL = ".exlm-partial-"
"""Begins the names of files that are being written."""

VERSION = 1
MAGIC = b"exlmpack"
TRAILER = struct.Struct("<8sIxxxxQ32s")

MAX_HEADER_BYTES = 64 << 20
HEADER_BYTES = 64 << 10
"""What is allowed for a header, and one 256th of the data."""

RESERVED_BYTES = 1 << 30
"""What a new file leaves free on its disk."""


@dataclass(frozen=True)
class Header:
    """What an intact file says of itself."""

    key: str
    model: str  # where the model was when it was packed
    content: Any  # the caller's part
    data_bytes: int


@dataclass(frozen=True)
class PackedFile:
    """A file whose header is intact, and whose data are not verified yet."""

    path: Path
    header: Header
    map: mmap.mmap  # private: what is written to it does not reach the file


@dataclass(frozen=True)
class Entry:
    """A file of the folder."""

    path: Path
    model: str  # empty if the file is damaged
    size: int
    last_used: float  # seconds since 1970


class PackedStore:
    """The files of a folder, which together have at most `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def find(self, key: str) -> PackedFile | None:
        """The file of a key, if there is one that may be used; it counts as used now."""
        path = self._path(key)
        try:
            if reason := writable_by_others(self.folder.stat()):
                warn_once(refusal(self.folder, reason))
                return None
            found = _open(path)
            if found.header.key != key:
                raise Unusable("it belongs to another model")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, Unusable) as problem:
            warn_once(f"{path} is not used, because {problem}: the model's matrices are packed again.")
            return None
        with suppress(OSError):  # the folder cannot be written
            os.utime(path)
        return found

    def write(self, key: str, model: str, data_bytes: int, fill: Callable[[FileIO], object]) -> bool:
        """Write the file of a key; `fill` writes its data and returns the caller's part of the header, for JSON.

        False, with a line in the log, if another process is writing it, or if there is no room for it.
        """
        try:
            self._make_folder()
            with self._locked(key) as locked:
                if not locked:
                    log.info("%s is being written by another process.", self._path(key))
                    return False
                if not self._make_room(key, data_bytes + data_bytes // 256 + HEADER_BYTES):
                    return False
                self._write(key, model, data_bytes, fill)
        except UntrustedFolder as error:
            warn_once(error.strerror)
            return False
        except OSError as error:  # a full disk, a quota, a folder that cannot be written
            warn_once(
                f"packed matrices of {model} cannot be kept in {self.folder} ({error}), so the next start packs them "
                "again: set EXLM_CACHE to a folder with room, or EXLM_PACKED_CACHE=0 to keep none."
            )
            return False
        return True

    def entries(self) -> list[Entry]:
        """Every file, the last used first."""
        found = []
        for path in self._paths(SUFFIX):
            with suppress(OSError):
                status = path.stat()
                found.append(Entry(path, _model_of(path), status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def remove(self, entry: Entry) -> None:
        """Remove a file; processes that have it mapped keep what they have."""
        entry.path.unlink(missing_ok=True)

    def remove_partial_files(self, key: str | None = None) -> None:
        """Remove partial files of killed processes, and those of `key`; the caller holds the key's lock."""
        for path in self._paths("", PARTIAL):
            with suppress(OSError):
                ours = key is not None and path.name.startswith(PARTIAL + key)
                if ours or abs(time.time() - path.stat().st_mtime) > STALE_SECONDS:
                    path.unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _paths(self, suffix: str, prefix: str = "") -> list[Path]:
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        return [self.folder / name for name in sorted(names) if name.startswith(prefix) and name.endswith(suffix)]

    def _make_folder(self) -> None:
        """Make the folder, which only this user can read: weights may be private."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := writable_by_others(self.folder.stat()):
            raise UntrustedFolder(errno.EACCES, refusal(self.folder, reason))

    @contextmanager
    def _locked(self, key: str) -> Iterator[bool]:
        """Hold the lock of a key; False if another process has it.

        Without locks, or when two processes lock two files of one name, both write, each a file of its own.
        """
        path = self.folder / f"{key}{LOCK_SUFFIX}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            try:
                lock_handle(handle)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                with suppress(OSError):
                    path.unlink()
        finally:
            os.close(handle)

    def _make_room(self, key: str, needed: int) -> bool:
        """Remove what processes that were killed left, and old files until a new one fits; False if it cannot."""
        self.remove_partial_files(key)
        if needed > self.max_bytes:
            log.info(
                "packed matrices of %s bytes are not kept: EXLM_PACKED_CACHE allows %s.",
                f"{needed:,}",
                f"{self.max_bytes:,}",
            )
            return False
        others = [entry for entry in self.entries() if entry.path != self._path(key)]
        total = sum(entry.size for entry in others)
        for path in self._paths("", PARTIAL):
            with suppress(OSError):
                total += path.stat().st_size
        while others and total + needed > self.max_bytes:
            oldest = others.pop()
            self.remove(oldest)
            total -= oldest.size
        free = shutil.disk_usage(self.folder).free
        if needed + RESERVED_BYTES > free:
            raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, and {free:,} are free")
        return True

    def _write(self, key: str, model: str, data_bytes: int, fill: Callable[[FileIO], object]) -> None:
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=f"{PARTIAL}{key}-")
        try:
            with FileIO(handle, "w") as file:
                file.truncate(data_bytes)  # other processes see how large it will be
                header = json.dumps({"key": key, "model": model, "content": fill(file)}).encode()
                trailer = TRAILER.pack(MAGIC, VERSION, len(header), hashlib.sha256(header).digest())
                if file.tell() != data_bytes:
                    raise OSError(errno.EIO, f"{file.tell():,} of {data_bytes:,} bytes were written")
                write_all(file, memoryview(header + trailer))
            os.replace(name, self._path(key))
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def write_all(file: FileIO, data: memoryview) -> None:
    """Write all bytes; a single write may take fewer."""
    while data:
        data = data[file.write(data) :]


def _open(path: Path) -> PackedFile:
    """Open and map a file and check its header; `Unusable` says what is wrong with it."""
    handle, status = open_regular(path)
    with FileIO(handle, "r") as file:
        header = _read_header(file, status.st_size)
        return PackedFile(path, header, private_map(file.fileno(), status.st_size))


def _model_of(path: Path) -> str:
    """The model in a file's header; empty if the file is damaged."""
    try:
        handle, status = open_regular(path)
        with FileIO(handle, "r") as file:
            return _read_header(file, status.st_size).model
    except Unusable:
        return ""


def _read_header(file: FileIO, size: int) -> Header:
    if size <= TRAILER.size:
        raise Unusable(f"it is cut short ({size} bytes)")
    file.seek(size - TRAILER.size)
    magic, version, header_bytes, digest = TRAILER.unpack(_read(file, TRAILER.size))
    data_bytes = size - TRAILER.size - header_bytes
    if magic != MAGIC:
        raise Unusable("it is cut short or damaged (it does not end with a trailer)")
    if version != VERSION:
        raise Unusable(f"it is of version {version}, and this is version {VERSION}")
    if not 0 < header_bytes <= MAX_HEADER_BYTES or data_bytes < 1:
        raise Unusable(f"it is damaged (a header of {header_bytes} bytes)")
    file.seek(data_bytes)
    header = _read(file, header_bytes)
    if hashlib.sha256(header).digest() != digest:
        raise Unusable("it is damaged (the checksum of its header is wrong)")
    try:
        fields = json.loads(header)
        return Header(str(fields["key"]), str(fields["model"]), fields["content"], data_bytes)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable("it is damaged (its header is of another form)") from error


def _read(file: FileIO, size: int) -> bytes:
    data = file.read(size)
    if data is None or len(data) != size:
        raise Unusable("it is cut short")
    return data
