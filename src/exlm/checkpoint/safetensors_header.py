"""The header of one safetensors file, read with distrust.

The `safetensors` library writes our files but does not read them: it refuses a whole file for one tensor of a
type it does not know, does not say what was expected and found where, and keeps every page it has touched
resident. No tensor data is touched here, and nothing is allocated on the word of a file before that word is
checked.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import BadFile

MAX_HEADER = 100_000_000
MAX_RANK = 64
MAX_ELEMENTS = 2**62

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_LFS = b"version https://git-lfs.github.com/spec/"
_FIELDS = ("dtype", "shape", "data_offsets")
METADATA = "__metadata__"


@dataclass(frozen=True)
class HeaderEntry:
    """What a header says of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """A checked header: every known tensor fits its bytes, and together they fill the file exactly."""

    entries: dict[str, HeaderEntry]
    data: int  # where in the file the first tensor byte is
    size: int  # of the whole file


def quoted(text: object) -> str:
    """Anything a file says, fit for a message: escaped, and no longer than a line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 120
    return short.repr(text)


def damaged(path: Path, what: str) -> BadFile:
    """The error for a file that is not what it should be."""
    return BadFile(f"{path}: {what}. The file is damaged or incomplete: download or convert it again.")


def read_header(path: Path) -> SafetensorsHeader:
    """The checked header of a safetensors file; BadFile says what is wrong with it, tensor by tensor."""
    raw, size = _raw_header(path)
    data = 8 + len(raw)
    entries = {name: _entry(path, name, value) for name, value in _parse(path, raw).items()}
    _check_cover(path, entries, size - data)
    return SafetensorsHeader(entries, data, size)


def read_small(path: Path, limit: int) -> bytes:
    """All of a text file that may not be longer than `limit`; a pipe or a device is not waited for."""
    size = regular_size(path)
    if size > limit:
        raise BadFile(f"{path}: expected at most {limit} bytes, found {size}.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}).") from error


def regular_size(path: Path) -> int:
    """The size of a file that is one; a folder, a pipe or a broken link is a BadFile."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}); is it a broken link?") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadFile(f"{path}: expected a file, found a folder, pipe or device. Remove or rename it.")
    return status.st_size


def refuse_pointer(path: Path, start: bytes) -> None:
    """Say so if the file holds git-lfs' note of a file instead of the file."""
    if start.startswith(_LFS):
        raise BadFile(
            f"{path}: this is a git-lfs pointer, not the file itself. Run `git lfs pull` in {path.parent}."
        )


def load_json(text: str, *, fractions: bool = False) -> Any:
    """JSON with each key at most once and perhaps no fractions; ValueError or RecursionError otherwise."""
    number = float if fractions else _refuse_fraction
    return json.loads(text, object_pairs_hook=_refuse_duplicates, parse_float=number, parse_constant=number)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {quoted(twice)} is there twice")
    return table


def _refuse_fraction(text: str) -> NoReturn:
    raise ValueError(f"expected a whole number, found {quoted(text)}")


def _raw_header(path: Path) -> tuple[bytes, int]:
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            start = file.read(64)
            refuse_pointer(path, start)
            if size < 8:
                raise damaged(path, f"expected at least 8 bytes of header length, found {size} bytes in all")
            length = int.from_bytes(start[:8], "little")
            if length > MAX_HEADER:
                raise damaged(path, f"expected a header of at most {MAX_HEADER} bytes, found {length}")
            if length > size - 8:
                raise damaged(path, f"the header is said to take {length} bytes, but {size - 8} follow")
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}).") from error
    if len(raw) != length:
        raise damaged(path, f"expected {length} bytes of header, found {len(raw)}")
    return raw, size


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    # A tensor opens three brackets in fifty bytes or more. Brackets alone would cost twenty times their size
    # to parse.
    if len(raw) > 2**20 and raw.count(b"[") + raw.count(b"{") > len(raw) // 12:
        raise damaged(
            path, f"expected a list of tensors as header, found brackets in most of {len(raw)} bytes"
        )
    try:
        table = load_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise damaged(path, f"the header is not UTF-8 at byte {8 + error.start}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"the header is not the JSON it should be ({error})") from error
    if not isinstance(table, dict):
        raise damaged(path, f"expected a JSON object as header, found {quoted(table)}")
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, f"expected strings by name in {METADATA}, found {quoted(metadata)}")
    return table


def _entry(path: Path, name: str, value: object) -> HeaderEntry:
    def wrong(expected: str, found: object) -> BadFile:
        return damaged(path, f"tensor {quoted(name)}: expected {expected}, found {quoted(found)}")

    if not isinstance(value, dict) or not all(field in value for field in _FIELDS):
        raise wrong(f"an object with {', '.join(_FIELDS)}", value)
    dtype, shape, offsets = (value[field] for field in _FIELDS)
    if not isinstance(dtype, str):
        raise wrong("a type name", dtype)
    if not _whole_numbers(shape) or len(shape) > MAX_RANK:
        raise wrong(f"a shape of at most {MAX_RANK} whole numbers", shape)
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("data_offsets of two rising whole numbers", offsets)
    start, stop = offsets
    elements = math.prod(shape)
    # Sizes of an empty tensor may still overflow the strides that torch computes from them.
    if math.prod(filter(None, shape)) > MAX_ELEMENTS:
        raise wrong(f"a shape of at most {MAX_ELEMENTS} elements", shape)
    if dtype in DTYPES:
        item = DTYPES[dtype].itemsize
        if stop - start != elements * item:
            raise wrong(f"{elements * item} bytes for {dtype} {quoted(shape)}", stop - start)
        if start % item:
            raise wrong(f"data_offsets that start at a multiple of {item} for {dtype}", offsets)
    return HeaderEntry(dtype, tuple(shape), start, stop)


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_cover(path: Path, entries: dict[str, HeaderEntry], held: int) -> None:
    """Each byte after the header belongs to one tensor: a shifted, cut or lengthened file cannot pass."""
    last, end = "", 0
    for name, entry in _in_order(entries):
        if entry.stop > held:
            raise damaged(
                path,
                f"tensor {quoted(name)}: expected {entry.stop} bytes of data, found {held}; it is cut short",
            )
        if entry.start < end:
            raise damaged(
                path, f"tensors {quoted(last)} and {quoted(name)} overlap at data byte {entry.start}"
            )
        if entry.start > end:
            raise damaged(path, f"tensor {quoted(name)}: expected to start at {end}, found {entry.start}")
        last, end = name, entry.stop
    if end != held:
        raise damaged(path, f"expected {end} bytes of data after the header, found {held}")


def _in_order(entries: dict[str, HeaderEntry]) -> Iterable[tuple[str, HeaderEntry]]:
    return sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
