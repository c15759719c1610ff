"""The journal of a batch: a write-ahead log of the rows that are done, which survives a crash.

It is append-only. A record is a line of a CRC-32, the row's number and its answer. The last write may
be torn: everything from the first invalid line on is truncated, and its rows are done again. The first line
holds the identity of the batch (the input's hash, the model, options), which every later run must share.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exlm import ExlmError
from exlm.atomic import lock_handle, sync_dir

MAGIC = b"exlm batch journal 1 "
O_BINARY = getattr(os, "O_BINARY", 0)  # Windows would change line ends
DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class JournalError(ExlmError, OSError):
    """A journal or output cannot be written, or belongs to another batch. Its contents are untouched."""


class Journal:
    """The rows of one batch that are done; open in one process at a time."""

    def __init__(self, path: Path, identity: Mapping[str, Any], rows: int, *, created: int) -> None:
        """Open a journal, or create one.

        `identity` must be the one it was created with. `created` is read from the journal if it exists.
        """
        self.path = path
        self.done: dict[int, tuple[int, int]] = {}
        """Offset and length of each done row's answer in the file."""
        self._handle = _open_locked(path)
        try:
            self.created, header_bytes = self._begin({**identity, "rows": rows}, created)
            self._end = self._recover(header_bytes, rows)
        except BaseException:
            self.close()
            raise

    def add(self, answers: Iterable[tuple[int, bytes]]) -> None:
        """Append answers, each a line of the output without its newline; they are on disk when this returns."""
        records, positions = bytearray(), {}
        for row, answer in answers:
            body = b"%d %b" % (row, answer)
            records += b"%08x %b\n" % (zlib.crc32(body), body)
            end = self._end + len(records) - 1
            positions[row] = (end - len(answer), len(answer))
        if not records:
            return
        try:
            _write_all(self._handle, records)
            os.fsync(self._handle)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next run would truncate a torn line anyway
                os.ftruncate(self._handle, self._end)
            raise failed_write(self.path, error, f" The {len(self.done)} rows done so far are safe.") from None
        self._end += len(records)
        self.done |= positions

    def answer(self, row: int) -> bytes:
        """The answer of a row that is done: its line of the output."""
        offset, length = self.done[row]
        with open(os.dup(self._handle), "rb") as file:
            file.seek(offset)
            return file.read(length)

    def close(self) -> None:
        """Close the file and release its lock; may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        """Close and delete the file, once the output has been written."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _begin(self, identity: dict[str, Any], created: int) -> tuple[int, int]:
        """Check the header or write it; returns when the journal was created, and the header's length."""
        with open(os.dup(self._handle), "rb") as file:
            file.seek(0)
            first, more = file.readline(), file.read(1)
        header = _header(first)
        torn = not first.endswith(b"\n") and MAGIC.startswith(first[: len(MAGIC)])
        if torn or (header is not None and not more):  # no row is done yet: write a new header
            return created, self._write_header({**identity, "created": created})
        if header is None:
            raise JournalError(f"{self.path} is no journal of a batch: move it away.")
        if changed := [name for name in identity if header.get(name) != identity[name]]:
            changes = "; ".join(f"{name} was {header.get(name)!r}, is {identity[name]!r}" for name in changed)
            raise JournalError(
                f"{self.path} was begun with something else: {changes}. Run it as before to finish it, or "
                "delete it to start over."
            )
        return int(header["created"]), len(first)

    def _write_header(self, identity: dict[str, Any]) -> int:
        line = MAGIC + json.dumps(identity).encode("ascii") + b"\n"
        try:
            os.ftruncate(self._handle, 0)
            _write_all(self._handle, line)
            os.fsync(self._handle)
            sync_dir(self.path.parent)
        except OSError as error:
            raise failed_write(self.path, error) from None
        return len(line)

    def _recover(self, header_bytes: int, rows: int) -> int:
        """Find the valid records after the header and truncate the rest; returns where the file now ends."""
        with open(os.dup(self._handle), "rb") as file:
            offset = file.seek(header_bytes)
            for line in file:
                row = _row_of_record(line)
                if row is None or row >= rows:
                    break
                length = len(line) - len(b"%08x %d \n" % (0, row))
                offset += len(line)
                self.done[row] = (offset - 1 - length, length)
        os.ftruncate(self._handle, offset)
        return offset


def failed_write(path: Path, error: OSError, more: str = "") -> JournalError:
    """The error for a file that cannot be written; `more` is a sentence about what is safe."""
    if error.errno in DISK_FULL:
        return JournalError(f"There is no room to write {path} ({error.strerror}).{more} Make room, run again.")
    return JournalError(f"{path} cannot be written: {error.strerror or error}.{more}")


def _open_locked(path: Path) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY, 0o666)
        except OSError as error:
            raise failed_write(path, error) from None
        try:
            lock_handle(handle)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise JournalError(f"Another process is at work on {path}: wait for it, or end it.") from None
        except FileNotFoundError:
            pass
        os.close(handle)  # the process that held the lock has finished and removed the file


def _write_all(handle: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


def _header(line: bytes) -> dict[str, Any] | None:
    """The identity in a journal's first line; None if it is not one."""
    if not line.startswith(MAGIC):
        return None
    try:
        found = json.loads(line.removeprefix(MAGIC))
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("created"), int) else None


def _row_of_record(line: bytes) -> int | None:
    """The row of a valid record; None for anything else."""
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    number, gap, _ = body.partition(b" ")
    if not line.endswith(b"\n") or not gap or checksum != b"%08x" % zlib.crc32(body):
        return None
    return int(number) if number.isdigit() else None
