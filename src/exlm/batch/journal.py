"""The journal: which rows are done and what became of them, in a file that survives being killed.

It is only appended to. A record is a line: a checksum, the row's number, the row's answer. What was written
last may be torn; whatever comes after the first line that is not whole counts as never written, is cut off,
and its rows are done again. The first line holds facts that every later run has to share. It knows nothing of
requests.
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
BINARY = getattr(os, "O_BINARY", 0)  # Windows would change line ends
FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class JournalError(ExlmError, OSError):
    """A journal or an output cannot be written or is not the one expected. What it held is still there."""


class Journal:
    """The done rows of one batch; held by one process at a time."""

    def __init__(self, path: Path, facts: Mapping[str, Any], rows: int, *, created: int) -> None:
        """Take up a journal, or begin one.

        `facts` must be those it was begun with. `created` is remembered from the run that began it.
        """
        self.path = path
        self.done: dict[int, tuple[int, int]] = {}
        """By row, where its answer lies in the file."""
        self._handle = _open_alone(path)
        try:
            self.created = self._begin({**facts, "rows": rows}, created)
            self._end = self._recover(rows)
        except BaseException:
            self.close()
            raise

    def add(self, answers: Iterable[tuple[int, bytes]]) -> None:
        """Write rows' answers, each a line without its end; they are on the disk when this returns."""
        text, places = bytearray(), {}
        for row, answer in answers:
            body = b"%d %b" % (row, answer)
            text += b"%08x %b\n" % (zlib.crc32(body), body)
            end = self._end + len(text) - 1
            places[row] = (end - len(answer), len(answer))
        if not text:
            return
        try:
            _write_all(self._handle, text)
            os.fsync(self._handle)
        except OSError as error:
            with contextlib.suppress(OSError):  # a torn line would be cut off next time anyway
                os.ftruncate(self._handle, self._end)
            raise unwritable(self.path, error, f" The {len(self.done)} rows done so far are safe.") from None
        self._end += len(text)
        self.done |= places

    def answer(self, row: int) -> bytes:
        """What became of a row."""
        place, length = self.done[row]
        with open(os.dup(self._handle), "rb") as file:
            file.seek(place)
            return file.read(length)

    def close(self) -> None:
        """Let another process have it; once is enough."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        """Close it and delete the file: everything is elsewhere by now."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _begin(self, facts: dict[str, Any], created: int) -> int:
        """Check the first line, or write it; when the journal was begun."""
        with open(os.dup(self._handle), "rb") as file:
            file.seek(0)
            first, more = file.readline(), file.read(1)
        found = _header(first)
        torn = not first.endswith(b"\n") and MAGIC.startswith(first[: len(MAGIC)])
        if torn or (found is not None and not more):  # nothing is done yet: begin again
            self._end = self._write_header({**facts, "created": created})
            return created
        if found is None:
            raise JournalError(f"{self.path} is no journal of a batch: move it away.")
        if changed := [name for name in facts if found.get(name) != facts[name]]:
            told = "; ".join(f"{name} was {found.get(name)!r}, is {facts[name]!r}" for name in changed)
            raise JournalError(
                f"{self.path} was begun with something else: {told}. Run it as before to finish it, or "
                "delete it to start over."
            )
        self._end = len(first)
        return int(found["created"])

    def _write_header(self, facts: dict[str, Any]) -> int:
        line = MAGIC + json.dumps(facts).encode("ascii") + b"\n"
        try:
            os.ftruncate(self._handle, 0)
            _write_all(self._handle, line)
            os.fsync(self._handle)
            sync_dir(self.path.parent)
        except OSError as error:
            raise unwritable(self.path, error) from None
        return len(line)

    def _recover(self, rows: int) -> int:
        """Find the answers that are whole and cut off the rest; where the file now ends."""
        with open(os.dup(self._handle), "rb") as file:
            place = file.seek(self._end)
            for line in file:
                row = _row(line)
                if row is None or row >= rows:
                    break
                length = len(line) - len(b"%08x %d \n" % (0, row))
                place += len(line)
                self.done[row] = (place - 1 - length, length)
        os.ftruncate(self._handle, place)
        return place


def unwritable(path: Path, error: OSError, more: str = "") -> JournalError:
    """Why something could not be written, in words."""
    if error.errno in FULL:
        return JournalError(
            f"There is no room to write {path} ({error.strerror}).{more} Make room, run again."
        )
    return JournalError(f"{path} cannot be written: {error.strerror or error}.{more}")


def _open_alone(path: Path) -> int:
    """The file, open for reading and appending, ours until it is closed."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            lock_handle(handle)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise JournalError(f"Another process is at work on {path}: wait for it, or end it.") from None
        except FileNotFoundError:
            pass
        os.close(handle)  # whoever had it before has finished and removed it


def _write_all(handle: int, text: bytes | bytearray) -> None:
    left = memoryview(text)
    while left:
        left = left[os.write(handle, left) :]


def _header(line: bytes) -> dict[str, Any] | None:
    """What a journal's first line says, None if it is not one."""
    if not line.startswith(MAGIC):
        return None
    try:
        found = json.loads(line.removeprefix(MAGIC))
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("created"), int) else None


def _row(line: bytes) -> int | None:
    """The row of a record that is whole, None for anything else."""
    mark, _, body = line.removesuffix(b"\n").partition(b" ")
    number, gap, _ = body.partition(b" ")
    if not line.endswith(b"\n") or not gap or mark != b"%08x" % zlib.crc32(body):
        return None
    return int(number) if number.isdigit() else None
