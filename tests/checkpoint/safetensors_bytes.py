"""Safetensors files built by hand: tests do not depend on the writer, and can damage them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header_entry(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict[str, Any]:
    """The entry of a tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_bytes(header: object, data: bytes = b"") -> bytes:
    """A whole file: length, header (JSON unless it is bytes already), data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def safetensors_bytes(tensors: dict[str, torch.Tensor], *, pad: int = 0) -> bytes:
    """A valid file of these tensors, its header lengthened by `pad` spaces."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        size = tensor.element_size()
        # A filler tensor aligns the next one, since a file may have no holes.
        if gap := -len(data) % size:
            header[f"filler.{len(data)}"] = header_entry("U8", [gap], [len(data), len(data) + gap])
            data += bytes(gap)
        raw = tensor_bytes(tensor).numpy().tobytes()
        header[name] = header_entry(TYPES[tensor.dtype], list(tensor.shape), [len(data), len(data) + len(raw)])
        data += raw
    return file_bytes(json.dumps(header).encode() + b" " * pad, data)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, one after the other."""
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def write_safetensors(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    """Write a valid file into a folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(safetensors_bytes(tensors))
    return folder


def write_index(folder: Path, files: dict[str, str]) -> None:
    """An index beside the files."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(tensor_bytes(a), tensor_bytes(b))
