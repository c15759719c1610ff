"""Files of a checkpoint, opened with distrust: their size, small text files, JSON, and views through mmap.

Every error names the file, what was expected, what was found and what to do. Nothing here knows a format.
"""

from __future__ import annotations

import json
import mmap
import os
import reprlib
import stat
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from ..errors import BadFile
from ..memory import memory_errors

_LFS = b"version https://git-lfs.github.com/spec/"


def quoted(text: object) -> str:
    """A name or value from a file, fit for a message: escaped, and at most a line long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 120
    return short.repr(text)


def damaged(path: Path, what: str) -> BadFile:
    """The error for a file whose contents are not what they should be."""
    return BadFile(f"{path}: {what}. The file is damaged or incomplete: download or convert it again.")


def read_small_file(path: Path, limit: int) -> bytes:
    """All of a text file of at most `limit` bytes; a pipe or a device is refused instead of waited for."""
    size = regular_file_size(path)
    if size > limit:
        raise BadFile(f"{path}: expected at most {limit} bytes, found {size}.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}).") from error


def regular_file_size(path: Path) -> int:
    """The size of a regular file; BadFile for a folder, a pipe or a broken link."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}); is it a broken link?") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadFile(f"{path}: expected a file, found a folder, pipe or device. Remove or rename it.")
    return status.st_size


def check_size(path: Path, found: int, expected: int) -> None:
    """BadFile if a file's size has changed since its header was read."""
    if found != expected:
        raise damaged(path, f"expected {expected} bytes as when its header was read, found {found}")


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """BadFile if a file begins as a git-lfs pointer does."""
    if start.startswith(_LFS):
        raise BadFile(f"{path}: this is a git-lfs pointer, not the file itself. Run `git lfs pull` in {path.parent}.")


def parse_json(text: str, *, allow_floats: bool = False) -> Any:
    """Parse JSON; ValueError or RecursionError for a duplicate key and, unless `allow_floats`, a float."""
    number = float if allow_floats else _refuse_float
    return json.loads(text, object_pairs_hook=_refuse_duplicates, parse_float=number, parse_constant=number)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {quoted(twice)} is there twice")
    return table


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"expected a whole number, found {quoted(text)}")


class MappedFiles:
    """Files mapped into memory when they are first needed; several threads may use one object.

    `sizes` holds the size of each file when its header was read. A file that has changed its size since is
    refused: touching a page that was cut off would end the process.
    """

    def __init__(self, sizes: dict[Path, int]) -> None:
        self.sizes = sizes
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> mmap.mmap:
        """The map of a file."""
        with self._lock:
            if path not in self._maps:
                self._maps[path] = _map_file(path, self.sizes[path])
            found = self._maps[path]
        check_size(path, found.size(), self.sizes[path])
        return found

    def release_pages(self, path: Path, begin: int, end: int) -> None:
        """Free the pages between two page borders if the file is mapped; later access reads them again.

        What was written to them is lost.
        """
        mapped = self._maps.get(path)
        if mapped is not None and begin < end and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        """Forget all maps; views of them stay valid, and `get` maps a file again."""
        with self._lock:
            # mmap.close() would leave live views pointing at unmapped memory.
            self._maps.clear()


def _map_file(path: Path, size: int) -> mmap.mmap:
    """A private copy-on-write map: pages are read when touched, writes never reach the file."""
    try:
        with memory_errors(lambda: f"{path}: {size:,} bytes cannot be mapped"), path.open("rb") as file:
            check_size(path, os.fstat(file.fileno()).st_size, size)
            if sys.platform == "linux":
                # Without MAP_NORESERVE the whole size of a private writable map counts as committed memory,
                # and a file may be larger than that. Python names the constant from 3.13 on.
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
                return mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise BadFile(f"{path}: cannot be mapped into memory ({error.strerror}).") from error
