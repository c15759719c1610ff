"""Reads and checks the header of one GGUF file: its metadata, and the place of each tensor.

The `gguf` package's reader trusts the counts and lengths it finds, and takes seconds for a vocabulary; it is
the oracle of the tests. Here every number is checked against the bytes that are left before memory is
allocated for it. No tensor data is touched, and the metadata is not interpreted.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadFile
from ..formats.gguf_types import GGUF_TYPES, REMOVED_TYPES
from .file_access import damaged, quoted, refuse_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)

MAX_HEADER = 2**28
MAX_ITEMS = 2**23  # values in all arrays together; a vocabulary of 256 thousand tokens has two million
MAX_KEYS = 2**16
MAX_TENSORS = 2**20
MAX_NAME = 2**16
MAX_RANK = 4
MAX_DEPTH = 4  # arrays in arrays

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SMALLEST = {_STRING: 8, _ARRAY: 12} | {kind: struct.calcsize(code) for kind, code in _NUMBERS.items()}
_LENGTH = struct.Struct("<Q")

ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class GgufTensor:
    """One stored tensor, as the header of its file describes it."""

    name: str
    type_name: str  # as GGUF spells it: F32, Q4_K
    shape: tuple[int, ...]  # the innermost size last, as torch has it
    nbytes: int
    file: Path
    offset: int  # of the first byte, from the start of the file

    @property
    def rows(self) -> int:
        """How many runs of the innermost size."""
        return math.prod(self.shape[:-1])

    def __str__(self) -> str:
        return f"{self.file}: tensor {quoted(self.name)}"


@dataclass(frozen=True)
class GgufHeader:
    """A checked header: every tensor lies inside the file, and no two share a byte."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path, data: mmap.mmap | bytes) -> GgufHeader:
    """The checked header of a GGUF file whose bytes are `data`."""
    cursor = _Cursor(path, data)
    _check_start(path, data)
    cursor.take(8)
    tensor_count = cursor.count("tensors", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
    metadata = _metadata(cursor)
    entries: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        entry = _entry(cursor)
        if entry.name in entries:
            raise damaged(path, f"tensor {quoted(entry.name)} is there twice")
        entries[entry.name] = entry
    start = _aligned(cursor.position, _alignment(path, metadata))
    return GgufHeader(metadata, _with_file_offsets(path, entries, start, metadata, len(data)))


class _Cursor:
    """A position in the bytes of a header that is checked to stay inside them."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self.data = data
        self.end = min(len(data), MAX_HEADER)
        self.position = 0
        self.items = 0

    def take(self, size: int) -> int:
        """Step over `size` bytes; where they start."""
        start = self.position
        if size > self.end - start:
            raise damaged(self.path, f"the header needs {size} bytes at {start}, found {self.end - start}")
        self.position = start + size
        return start

    def number(self, kind: int) -> Any:
        """One number of a kind of value."""
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        """Several numbers."""
        code = _NUMBERS[kind]
        start = self.take(count * struct.calcsize(code))
        if kind == _BOOL and max(self.data[start : self.position], default=0) > 1:
            raise damaged(self.path, f"expected true or false at byte {start}, found another value")
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))

    def text(self, limit: int | None = None) -> str:
        """A string with its length before it."""
        length = self.number(10)
        if limit is not None and length > limit:
            raise damaged(self.path, f"expected a name of at most {limit} bytes, found {length}")
        start = self.take(length)
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"the text at byte {start} is not UTF-8 ({error.reason})") from error

    def texts(self, count: int) -> list[str]:
        """Several strings, without a call for each: a vocabulary has hundreds of thousands."""
        data, end, at = self.data, self.end, self.position
        found: list[str] = []
        while len(found) < count and at + _LENGTH.size <= end:
            start = at + _LENGTH.size
            stop = start + _LENGTH.unpack_from(data, at)[0]
            if stop > end:
                break
            try:
                found.append(data[start:stop].decode("utf-8"))
            except UnicodeDecodeError:
                break
            at = stop
        self.position = at
        return found + [
            self.text() for _ in range(count - len(found))
        ]  # raises the error for the string at which the loop stopped

    def count(self, what: str, limit: int, smallest: int) -> int:
        """A count of things of at least `smallest` bytes, which the rest of the header can hold."""
        found: int = self.number(10)
        if found > limit:
            raise damaged(self.path, f"expected at most {limit} {what}, found {found}")
        if found * smallest > self.end - self.position:
            raise damaged(self.path, f"{found} {what} do not fit the {self.end - self.position} bytes left")
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value of metadata as plain Python."""
        if kind in _NUMBERS:
            return self.number(kind)
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth >= MAX_DEPTH:
            what = f"arrays at most {MAX_DEPTH} deep" if kind == _ARRAY else "a kind of value up to 12"
            raise damaged(self.path, f"expected {what} at byte {self.position}, found {kind}")
        inner = self.number(4)
        if inner not in _SMALLEST:
            raise damaged(self.path, f"expected an array of values up to kind 12, found {inner}")
        count = self.count("values", MAX_ITEMS - self.items, _SMALLEST[inner])
        self.items += count
        if inner in _NUMBERS:
            return self.numbers(inner, count)
        if inner == _STRING:
            return self.texts(count)
        return [self.value(inner, depth + 1) for _ in range(count)]


def _check_start(path: Path, data: mmap.mmap | bytes) -> None:
    start = bytes(data[:64])
    refuse_pointer(path, start)
    if start[:4] != MAGIC:
        raise BadFile(f"{path}: expected a GGUF file, which begins with {MAGIC!r}, found {start[:4]!r}.")
    version = int.from_bytes(start[4:8], "little")
    if version in VERSIONS:
        return
    if int.from_bytes(start[4:8], "big") in VERSIONS:
        raise BadFile(f"{path}: the file is written for big-endian machines. Use the little-endian one.")
    expected = " or ".join(map(str, VERSIONS))
    raise BadFile(f"{path}: expected GGUF version {expected}, found {version}. Convert the model again.")


def _metadata(cursor: _Cursor) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("keys", MAX_KEYS, 8 + 4 + 1)):
        key = cursor.text(MAX_NAME)
        kind = cursor.number(4)
        if key in metadata:
            raise damaged(cursor.path, f"the key {quoted(key)} is there twice")
        if key == ALIGNMENT and kind != 4:
            raise damaged(cursor.path, f"expected {ALIGNMENT} of kind 4, found {kind}")
        metadata[key] = cursor.value(kind)
    return metadata


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    found: int = metadata.get(ALIGNMENT, 32)
    if found < 1 or found & (found - 1):
        raise damaged(path, f"expected a power of two as {ALIGNMENT}, found {found}")
    return found


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _entry(cursor: _Cursor) -> GgufTensor:
    """One tensor; its offset counts from the start of the data."""
    path = cursor.path
    name = cursor.text(MAX_NAME)
    rank = cursor.number(4)
    if not 1 <= rank <= MAX_RANK:
        raise damaged(path, f"tensor {quoted(name)}: expected 1 to {MAX_RANK} dimensions, found {rank}")
    shape = tuple(reversed(cursor.numbers(10, rank)))
    number = cursor.number(4)
    offset = cursor.number(10)
    if number in REMOVED_TYPES:
        other = "Q4_0" if REMOVED_TYPES[number].startswith("Q4") else "IQ4_NL"
        raise BadFile(
            f"{path}: tensor {quoted(name)} is stored as {REMOVED_TYPES[number]}, which llama.cpp has given "
            f"up. Take the {other} file of the same model."
        )
    if number not in GGUF_TYPES:
        raise BadFile(
            f"{path}: tensor {quoted(name)} has the unknown type {number}. The file is damaged, or made by "
            "something newer than this version of exlm."
        )
    kind, block, size = GGUF_TYPES[number]
    if min(shape) < 1 or shape[-1] % block:
        raise damaged(
            path,
            f"tensor {quoted(name)}: expected rows of whole {kind} blocks of {block}, found {list(shape)}",
        )
    return GgufTensor(name, kind, shape, math.prod(shape) // block * size, path, offset)


def _with_file_offsets(
    path: Path, entries: dict[str, GgufTensor], start: int, metadata: dict[str, Any], size: int
) -> dict[str, GgufTensor]:
    """The entries with offsets from the start of the file, if each has its own bytes there."""
    alignment = _alignment(path, metadata)
    last, end = "", 0
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if entry.offset % alignment:
            raise damaged(
                path, f"tensor {quoted(entry.name)}: expected a multiple of {alignment}, found {entry.offset}"
            )
        if entry.offset < end:
            raise damaged(path, f"tensors {quoted(last)} and {quoted(entry.name)} overlap")
        last, end = entry.name, entry.offset + entry.nbytes
        if start + end > size:
            raise damaged(
                path,
                f"tensor {quoted(entry.name)} ends at byte {start + end} of {size}; the file is cut short",
            )
    return {
        name: GgufTensor(name, entry.type_name, entry.shape, entry.nbytes, path, start + entry.offset)
        for name, entry in entries.items()
    }
