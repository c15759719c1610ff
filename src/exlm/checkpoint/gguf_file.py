"""A GGUF file, or all files a model was split into: metadata, tensors, and their bytes.

The `gguf` package's reader trusts the counts and lengths it finds, and takes seconds for a vocabulary; it is
the oracle of the tests. Here every number in the header is checked against the bytes that are left before
memory is allocated for it.

Each file is mapped into memory; a tensor's bytes are a view of the map, whose pages can be released once they
have been copied. Names are the stored ones and bytes are only bytes here: `gguf_checkpoint` maps a model's
roles to names, and `formats.gguf` knows what the bytes mean.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..errors import BadFile, BadTensor, ModelNotFound
from ..formats.gguf import GGUF_TYPES, REMOVED_TYPES
from .tensor_files import TensorFiles, TensorInfo, damaged, quoted, refuse_lfs_pointer, regular_file_size

ROPE_FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of a model's description and not weights."""

MAX_ROPE_FACTORS = 4096

FAULT_AROUND = 2**16
"""Bytes that the kernel may map around a touched page (Linux's fault-around window)."""

_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)

MAGIC = b"GGUF"
VERSIONS = (2, 3)

MAX_HEADER = 2**28
MAX_ITEMS = 2**23  # values in all arrays together; a vocabulary of 256 thousand tokens has two million
MAX_KEYS = 2**16
MAX_TENSORS = 2**20
MAX_NAME = 2**16
MAX_RANK = 4
MAX_DEPTH = 4  # arrays in arrays

# GGUF's value types, here `kind`: the struct format of each number, then names for those that the code treats apart.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 7, 8, 9, 10
_MIN_BYTES = {_STRING: 8, _ARRAY: 12} | {kind: struct.calcsize(code) for kind, code in _NUMBERS.items()}
_LENGTH = struct.Struct("<Q")

ALIGNMENT = "general.alignment"


# -- headers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufHeader:
    """A checked header: every tensor lies inside the file, and no two share a byte."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_gguf_header(path: Path, data: mmap.mmap | bytes) -> GgufHeader:
    """The checked header of a GGUF file whose bytes are `data`."""
    cursor = _Cursor(path, data)
    _check_start(path, data)
    cursor.take(8)
    tensor_count = cursor.count("tensors", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
    metadata = _metadata(cursor)
    entries: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        info = _tensor_info(cursor)
        if info.name in entries:
            raise damaged(path, f"tensor {quoted(info.name)} is there twice")
        entries[info.name] = info
    alignment = _alignment(path, metadata)
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(metadata, _with_file_offsets(path, entries, start, alignment, len(data)))


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
        """One number of a value type."""
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
        length = self.number(_UINT64)
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
        # `text` raises the error for the string at which the loop stopped.
        return found + [self.text() for _ in range(count - len(found))]

    def count(self, what: str, limit: int, smallest: int) -> int:
        """A count of things of at least `smallest` bytes, which the rest of the header can hold."""
        found: int = self.number(_UINT64)
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
        inner = self.number(_UINT32)
        if inner not in _MIN_BYTES:
            raise damaged(self.path, f"expected an array of values up to kind 12, found {inner}")
        count = self.count("values", MAX_ITEMS - self.items, _MIN_BYTES[inner])
        self.items += count
        if inner in _NUMBERS:
            return self.numbers(inner, count)
        if inner == _STRING:
            return self.texts(count)
        return [self.value(inner, depth + 1) for _ in range(count)]


def _check_start(path: Path, data: mmap.mmap | bytes) -> None:
    start = bytes(data[:64])
    refuse_lfs_pointer(path, start)
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
        kind = cursor.number(_UINT32)
        if key in metadata:
            raise damaged(cursor.path, f"the key {quoted(key)} is there twice")
        if key == ALIGNMENT and kind != _UINT32:
            raise damaged(cursor.path, f"expected {ALIGNMENT} of kind 4, found {kind}")
        metadata[key] = cursor.value(kind)
    return metadata


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    found: int = metadata.get(ALIGNMENT, 32)
    if found < 1 or found & (found - 1):
        raise damaged(path, f"expected a power of two as {ALIGNMENT}, found {found}")
    return found


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    """One tensor; its offset counts from the start of the data."""
    path = cursor.path
    name = cursor.text(MAX_NAME)
    rank = cursor.number(_UINT32)
    if not 1 <= rank <= MAX_RANK:
        raise damaged(path, f"tensor {quoted(name)}: expected 1 to {MAX_RANK} dimensions, found {rank}")
    shape = tuple(reversed(cursor.numbers(_UINT64, rank)))
    number = cursor.number(_UINT32)
    offset = cursor.number(_UINT64)
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
            path, f"tensor {quoted(name)}: expected rows of whole {kind} blocks of {block}, found {list(shape)}"
        )
    return TensorInfo(name, path, kind, shape, math.prod(shape) // block * size, offset)


def _with_file_offsets(
    path: Path, entries: dict[str, TensorInfo], start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """The entries with offsets from the start of the file, if each has its own bytes there."""
    last, end = "", 0
    for info in sorted(entries.values(), key=lambda info: info.offset):
        if info.offset % alignment:
            raise damaged(path, f"tensor {quoted(info.name)}: expected a multiple of {alignment}, found {info.offset}")
        if info.offset < end:
            raise damaged(path, f"tensors {quoted(last)} and {quoted(info.name)} overlap")
        last, end = info.name, info.offset + info.nbytes
        if start + end > size:
            raise damaged(
                path, f"tensor {quoted(info.name)} ends at byte {start + end} of {size}; the file is cut short"
            )
    return {name: replace(info, offset=start + info.offset) for name, info in entries.items()}


# -- files -----------------------------------------------------------------------------------------


_header_cache: weakref.WeakValueDictionary[tuple[Path, int, int, int, int], GgufHeader] = weakref.WeakValueDictionary()
"""Headers of open files by (path, device, inode, size, mtime), so that opening a file again is quick: parsing
a vocabulary takes a while."""


class GgufFile(TensorFiles):
    """A GGUF file, or all files of a split model, of which `path` may be any.

    `metadata` holds plain Python values; of a split model, those of the first file.
    """

    def __init__(self, path: str | Path) -> None:
        """Map the file and read its header; no tensor data is touched."""
        super().__init__(Path(path))
        if not self.path.exists():
            raise ModelNotFound(f"Can't find {self.path}: no such file.")
        header = self._header(self.path)
        shards = _shards(self.path, header)
        headers = {one: header if one == self.path else self._header(one) for one in shards}
        _check_shards(headers)
        self.metadata: Mapping[str, Any] = MappingProxyType(headers[shards[0]].metadata)
        tensors: dict[str, TensorInfo] = {}
        for one in headers.values():
            for name, info in one.tensors.items():
                if name in tensors:
                    raise BadFile(f"{tensors[name]} is also in {info.file}; expected it once.")
                tensors[name] = info
        self.tensors = MappingProxyType(tensors)
        self.paths = tuple(shards)
        self._headers = headers  # keeps them in _header_cache

    def view(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, (rows, bytes), a view of the file.

        Copy what is to be kept, then `release` it: a file that is truncated while a view is in use ends the
        process (SIGBUS).
        """
        return self.view_rows(name, 0, num_stored_rows(self.info(name)))

    def view_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The bytes of rows `start` to `stop`; all dimensions but the innermost count as rows."""
        info = self.info(name)
        rows = num_stored_rows(info)
        offset, count = info.byte_range(start, stop, rows)
        if not count:
            return torch.empty((0, info.nbytes // rows), dtype=torch.uint8)
        view = torch.frombuffer(self._map(info.file), dtype=torch.uint8, count=count, offset=offset)
        return view.view(stop - start, -1)

    def release(self, name: str) -> None:
        """Free the mapped pages of a tensor; a later read gets them from the file again."""
        info = self.info(name)
        # Neighbours too, as the kernel maps pages around each that is touched; no tensor here is written to.
        begin = info.offset // FAULT_AROUND * FAULT_AROUND
        self._release_pages(info.file, begin, info.offset + info.nbytes + FAULT_AROUND)

    def rope_factors(self) -> dict[str, list[float]]:
        """The rotary factors that are stored as tensors, by name: a part of the model's description."""
        found = {}
        for name in ROPE_FACTOR_TENSORS:
            if name not in self.tensors:
                continue
            info = self.info(name)
            if info.dtype != "F32" or len(info.shape) != 1 or info.shape[0] > MAX_ROPE_FACTORS:
                raise BadTensor(
                    f"{info}: expected at most {MAX_ROPE_FACTORS} numbers of F32, found {info.dtype} "
                    f"{list(info.shape)}."
                )
            found[name] = [float(one) for one in self.view(name).clone().view(torch.float32)[0]]
        return found

    def _header(self, path: Path) -> GgufHeader:
        size = regular_file_size(path)
        if size < 24:
            raise damaged(path, f"expected a GGUF file of at least 24 bytes, found {size}")
        self._sizes[path] = size
        now = path.stat()
        cache_key = (path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
        header = _header_cache.get(cache_key)
        if header is None:
            header = _header_cache[cache_key] = read_gguf_header(path, self._map(path))
        return header


def num_stored_rows(info: TensorInfo) -> int:
    """The number of rows: the product of all dimensions but the innermost."""
    return math.prod(info.shape[:-1])


def _shards(path: Path, header: GgufHeader) -> list[Path]:
    """All files of the model, the first one first."""
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return [path]
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise BadFile(
            f"{path}: the file is one of {count} and must keep its name, which ends in -00001-of-{count:05}.gguf."
        )
    names = [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadFile(f"{path}: expected {count} files, {', '.join(missing[:3])}{more} missing. Download them.")
    return [path.parent / name for name in names]


def _check_shards(headers: Mapping[Path, GgufHeader]) -> None:
    """Each file says which of them it is."""
    if len(headers) == 1:
        return
    for number, (path, header) in enumerate(headers.items()):
        found = header.metadata.get("split.no"), header.metadata.get("split.count")
        if found != (number, len(headers)):
            raise BadFile(
                f"{path}: expected file {number} of {len(headers)} by its own count, found {found[0]} of "
                f"{found[1]}. The files are not of one model."
            )
