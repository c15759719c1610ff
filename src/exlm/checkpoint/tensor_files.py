"""`TensorFiles`: named tensors in mapped files, the base of `SafetensorsFolder` and `GgufFile`.

Also what both need to read a file that may be damaged: its size, JSON without duplicate keys, and errors that name the
file, what was expected, what was found and what to do. Nothing here knows what a tensor's bytes mean.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import reprlib
import stat
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import BadFile, BadTensor, MissingTensor
from ..memory import memory_errors, private_map

SAMPLE_BYTES = 4096
SAMPLED_BEGIN = 2**20
SAMPLES = 64
"""What a fingerprint reads of a file: all of its first SAMPLED_BEGIN bytes, then SAMPLES pieces of SAMPLE_BYTES."""

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


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor, as the header of its file describes it."""

    name: str
    file: Path
    dtype: str  # as the file spells it: F16, I32, Q4_K
    shape: tuple[int, ...]  # the innermost size last, as torch has it
    nbytes: int
    offset: int  # of the first byte, from the start of the file

    def __str__(self) -> str:
        return f"{self.file}: tensor {quoted(self.name)}"

    def byte_range(self, start: int, stop: int, rows: int) -> tuple[int, int]:
        """Offset and number of bytes of rows `start` to `stop` out of `rows`; BadTensor if there are fewer."""
        if not 0 <= start <= stop <= rows:
            raise BadTensor(f"{self}: expected at least {stop} rows, found {rows} (shape {list(self.shape)}).")
        row = self.nbytes // rows if rows else 0
        return self.offset + start * row, (stop - start) * row


class TensorFiles:
    """Named tensors in files that are mapped into memory when first needed; several threads may read at a time.

    A file that has changed its size since its header was read is refused: touching a page that was cut off would
    end the process (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths: tuple[Path, ...] = ()  # a subclass sets these two
        self.tensors: Mapping[str, TensorInfo] = {}
        self._sizes: dict[Path, int] = {}  # of each file, when its header was read
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor."""
        if name not in self.tensors:
            what = f"{self.path}: tensor {quoted(name)} is in none of the files."
            raise MissingTensor(f"{what} {self.explain_missing(name)}".rstrip())
        return self.tensors[name]

    def explain_missing(self, name: str) -> str:
        """Where a missing tensor should be, as a sentence; empty if nothing says it."""
        return ""

    def fingerprint(self) -> str:
        """Identifies what the files hold, wherever they are, without reading them whole.

        It is made of their sizes, their times of modification, the headers' tensors, and samples of their bytes.
        """
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                with path.open("rb", buffering=0) as file:
                    status = os.fstat(file.fileno())
                    check_size(path, status.st_size, self._sizes[path])
                    digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
                    for offset in _sample_offsets(status.st_size):
                        file.seek(offset)
                        digest.update(file.read(SAMPLE_BYTES))
            except OSError as error:
                raise BadFile(f"{path}: cannot be read ({error.strerror}).") from error
        number = {path: index for index, path in enumerate(self.paths)}
        for name, info in sorted(self.tensors.items()):
            digest.update(repr((name, number.get(info.file), info.dtype, info.shape, info.offset)).encode())
        return digest.hexdigest()

    def close(self) -> None:
        """Forget the maps of the files; views stay valid, and a later read maps the files again."""
        with self._lock:
            # mmap.close() would leave live views pointing at unmapped memory.
            self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            if path not in self._maps:
                self._maps[path] = _map_file(path, self._sizes[path])
            found = self._maps[path]
        check_size(path, found.size(), self._sizes[path])
        return found

    def _release_pages(self, path: Path, begin: int, end: int) -> None:
        """Free the pages between two page borders if the file is mapped; later access reads them again.

        What was written to them is lost.
        """
        mapped = self._maps.get(path)
        if mapped is not None and begin < end and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _sample_offsets(size: int) -> Iterator[int]:
    """Where a file is sampled: its beginning, its end, and between them at equal distances."""
    begin, last = min(size, SAMPLED_BEGIN), max(0, size - SAMPLE_BYTES)
    yield from range(0, begin, SAMPLE_BYTES)
    yield from range(begin, last, max(SAMPLE_BYTES, (last - begin) // SAMPLES + 1))
    yield last


def _map_file(path: Path, size: int) -> mmap.mmap:
    """A private map of a file: writes never reach it."""
    try:
        with memory_errors(lambda: f"{path}: {size:,} bytes cannot be mapped"), path.open("rb") as file:
            check_size(path, os.fstat(file.fileno()).st_size, size)
            return private_map(file.fileno(), size)
    except OSError as error:
        raise BadFile(f"{path}: cannot be mapped into memory ({error.strerror}).") from error
