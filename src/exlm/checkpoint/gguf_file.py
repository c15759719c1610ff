"""The tensors and the metadata of a GGUF file, or of all files a model was split into.

Each file is mapped into memory; a tensor's bytes are a view of the map, and pages that have been copied
elsewhere can be given back. Names are the stored ones and bytes are bytes: roles are known to
`gguf_reader`, and what the bytes mean to `formats`.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..errors import BadFile, BadTensor, MissingTensor, ModelNotFound
from ..memory import memory_errors
from .gguf_header import GgufHeader, GgufTensor, read_gguf_header
from .safetensors_header import damaged, quoted, regular_size

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to a model's description, not to its weights."""

MAX_ROPE_FACTORS = 4096

FAULT_AROUND = 2**16
"""Bytes that are in memory together, whichever of them was asked for."""

_header_cache: weakref.WeakValueDictionary[tuple[Path, int, int, int, int], GgufHeader] = (
    weakref.WeakValueDictionary()
)
"""Headers that somebody still holds, by their files as those were: a vocabulary takes a while to read."""

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class GgufFile:
    """A GGUF file; of a split model, any of the files stands for all of them.

    `metadata` holds plain Python values (of a split model, those of the first file), `tensors` every tensor.
    """

    def __init__(self, path: str | Path) -> None:
        """Map the file and read its header; no tensor data is touched."""
        self.path = Path(path)
        if not self.path.exists():
            raise ModelNotFound(f"Can't find {self.path}: no such file.")
        self._maps: dict[Path, mmap.mmap] = {}
        self._sizes: dict[Path, int] = {}
        self._lock = threading.Lock()
        header = self._header(self.path)
        shards = _shards(self.path, header)
        headers = {one: header if one == self.path else self._header(one) for one in shards}
        _check_shards(headers)
        self.metadata: Mapping[str, Any] = MappingProxyType(headers[shards[0]].metadata)
        tensors: dict[str, GgufTensor] = {}
        for one in headers.values():
            for name, entry in one.tensors.items():
                if name in tensors:
                    raise BadFile(f"{tensors[name]} is also in {entry.file}; expected it once.")
                tensors[name] = entry
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(tensors)
        self.paths = tuple(shards)
        self._headers = headers  # who opens the files again meanwhile gets the same

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def entry(self, name: str) -> GgufTensor:
        """What the header says of a tensor."""
        if name not in self.tensors:
            raise MissingTensor(f"{self.path}: found no tensor {quoted(name)} among {len(self.tensors)}.")
        return self.tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, (rows, bytes), a view of the file.

        Copy what is to be kept, then `release` it: a file that is cut short while a view is in use takes the
        process down.
        """
        return self.read_rows(name, 0, self.entry(name).rows)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The bytes of rows `start` to `stop`; all dimensions but the innermost count as rows."""
        entry = self.entry(name)
        first, width = self._span(entry, start, stop)
        if start == stop:
            return torch.empty((0, width), dtype=torch.uint8)
        view = torch.frombuffer(
            self._map(entry.file), dtype=torch.uint8, count=(stop - start) * width, offset=first
        )
        return view.view(stop - start, width)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor; a later read gets it from the file again."""
        entry = self.entry(name)
        mapped = self._maps.get(entry.file)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Neighbours too: the system maps some pages around each that is touched. Nobody writes to these.
            begin, end = (
                entry.offset // FAULT_AROUND * FAULT_AROUND,
                entry.offset + entry.nbytes + FAULT_AROUND,
            )
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        """Let go of the files; bytes that were read stay valid, and a later read opens the files again."""
        with self._lock:
            # Not mmap.close(): a view that is still alive would then point nowhere.
            self._maps.clear()

    def rope_factors(self) -> dict[str, list[float]]:
        """The rotary factors that are stored as tensors, by name: a part of the model's description."""
        found = {}
        for name in ROPE_FACTORS:
            if name not in self.tensors:
                continue
            entry = self.entry(name)
            if entry.type_name != "F32" or len(entry.shape) != 1 or entry.shape[0] > MAX_ROPE_FACTORS:
                raise BadTensor(
                    f"{entry}: expected at most {MAX_ROPE_FACTORS} numbers of F32, found {entry.type_name} "
                    f"{list(entry.shape)}."
                )
            found[name] = [float(one) for one in self.read(name).clone().view(torch.float32)[0]]
        return found

    def _span(self, entry: GgufTensor, start: int, stop: int) -> tuple[int, int]:
        if not 0 <= start <= stop <= entry.rows:
            raise BadTensor(f"{entry}: expected at least {stop} rows, found {entry.rows}.")
        width = entry.nbytes // entry.rows
        return entry.offset + start * width, width

    def _header(self, path: Path) -> GgufHeader:
        size = regular_size(path)
        if size < 24:
            raise damaged(path, f"expected a GGUF file of at least 24 bytes, found {size}")
        self._sizes[path] = size
        now = path.stat()
        mark = (path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
        header = _header_cache.get(mark)
        if header is None:
            header = _header_cache[mark] = read_gguf_header(path, self._map(path))
        return header

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            if path not in self._maps:
                self._maps[path] = _mapped(path, self._sizes[path])
            found = self._maps[path]
        # Whatever was cut off since would take the process down when it is touched.
        _check_size(path, found.size(), self._sizes[path])
        return found


def _mapped(path: Path, size: int) -> mmap.mmap:
    """The file in memory: pages come when touched, and writes stay with us."""
    try:
        with memory_errors(lambda: f"{path}: {size:,} bytes cannot be mapped"), path.open("rb") as file:
            _check_size(path, os.fstat(file.fileno()).st_size, size)
            if sys.platform == "linux":
                # Private, writable memory is reserved in full unless told otherwise, and a file may be larger
                # than what there is to reserve. The constant has a name only from Python 3.13 on.
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
                return mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise BadFile(f"{path}: cannot be mapped into memory ({error.strerror}).") from error


def _check_size(path: Path, found: int, size: int) -> None:
    if found != size:
        raise damaged(path, f"expected {size} bytes as when its header was read, found {found}")


def _shards(path: Path, header: GgufHeader) -> list[Path]:
    """All files of the model, the first one first."""
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return [path]
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise BadFile(
            f"{path}: the file is one of {count} and must keep its name, which ends in "
            f"-00001-of-{count:05}.gguf."
        )
    names = [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadFile(
            f"{path}: expected {count} files, {', '.join(missing[:3])}{more} missing. Download them."
        )
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
