"""Reads and checks the header of one safetensors file; no tensor data is touched.

The `safetensors` library writes exlm's files but does not read them: it refuses a whole file for one tensor
of an unknown type, its errors do not say what was expected and found where, and every page it has touched
stays resident. A number in the header is checked against the file's size before memory is allocated for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import BadFile
from .file_access import damaged, load_json, quoted, refuse_pointer, regular_size

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
    """A checked header: each tensor of a known type has the bytes its shape needs, and all fill the file."""

    entries: dict[str, HeaderEntry]
    data: int  # where in the file the first tensor byte is
    size: int  # of the whole file


def read_header(path: Path) -> SafetensorsHeader:
    """The checked header of a safetensors file; BadFile names the tensor that is wrong, and how."""
    raw, size = _raw_header(path)
    data = 8 + len(raw)
    entries = {name: _entry(path, name, value) for name, value in _parse(path, raw).items()}
    _check_cover(path, entries, size - data)
    return SafetensorsHeader(entries, data, size)


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
    # The entry of a tensor has three opening brackets in at least fifty bytes. Parsing brackets alone would
    # take twenty times their size in memory.
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
    # The other sizes of an empty tensor can still overflow the strides that torch computes.
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
    """Check that each data byte belongs to one tensor: no shifted, cut or lengthened file passes."""
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
