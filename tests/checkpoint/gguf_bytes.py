"""GGUF files built by hand, so that tests can damage them, and valid ones by the gguf package."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

KINDS = {"u8": 0, "u32": 4, "f32": 6, "bool": 7, "string": 8, "array": 9, "u64": 10}
CODES = {"u8": "B", "u32": "I", "f32": "f", "bool": "B", "u64": "Q"}


def string_bytes(value: str | bytes) -> bytes:
    """A string with its length."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def metadata_bytes(name: str, kind: str, value: Any) -> bytes:
    """One entry of metadata; bytes are taken as they are."""
    if isinstance(value, bytes):
        body = value
    elif kind == "string":
        body = string_bytes(value)
    else:
        body = struct.pack(f"<{CODES[kind]}", value)
    return string_bytes(name) + struct.pack("<I", KINDS[kind]) + body


def tensor_info_bytes(name: str = "x", dims: Sequence[int] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    """The header entry of a tensor; `dims` in the file's order, the innermost first."""
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return string_bytes(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    keys: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
    alignment: int = 32,
) -> bytes:
    """A file of these parts, valid if they are."""
    tensors, entries = counts or (len(infos), len(keys))
    head = magic + struct.pack("<IQQ", version, tensors, entries) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(
    path: Path,
    arch: str,
    tensors: Mapping[str, np.ndarray[Any, Any]],
    metadata: Mapping[str, Any] | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    **options: Any,
) -> Path:
    """A valid file by the gguf package; `kinds` are the types of tensors given as blocks of bytes."""
    writer = gguf.GGUFWriter(path, arch, **options)
    for name, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, list(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
