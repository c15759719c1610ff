"""The tensors and the metadata of a GGUF file, or of all files a model was split into.

Each file is mapped into memory; a tensor's bytes are a view of the map, whose pages can be released once they
have been copied. Names are the stored ones and bytes are only bytes here: `gguf_reader` maps a model's roles
to names, and `formats.gguf` knows what the bytes mean.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..errors import BadFile, BadTensor, MissingTensor, ModelNotFound
from .file_access import MappedFiles, damaged, quoted, regular_size
from .gguf_header import GgufHeader, GgufTensor, read_gguf_header

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of a model's description and not weights."""

MAX_ROPE_FACTORS = 4096

FAULT_AROUND = 2**16
"""Bytes that the kernel may map around a touched page (Linux's fault-around window)."""

_header_cache: weakref.WeakValueDictionary[tuple[Path, int, int, int, int], GgufHeader] = (
    weakref.WeakValueDictionary()
)
"""Headers of open files by (path, device, inode, size, mtime), so that opening a file again is quick: parsing
a vocabulary takes a while."""

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
        self._maps = MappedFiles({})
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
        self._headers = headers  # keeps them in _header_cache

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

        Copy what is to be kept, then `release` it: a file that is truncated while a view is in use ends the
        process (SIGBUS).
        """
        return self.read_rows(name, 0, self.entry(name).rows)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The bytes of rows `start` to `stop`; all dimensions but the innermost count as rows."""
        entry = self.entry(name)
        first, width = self._span(entry, start, stop)
        if start == stop:
            return torch.empty((0, width), dtype=torch.uint8)
        view = torch.frombuffer(
            self._maps.get(entry.file), dtype=torch.uint8, count=(stop - start) * width, offset=first
        )
        return view.view(stop - start, width)

    def release(self, name: str) -> None:
        """Free the mapped pages of a tensor; a later read gets them from the file again."""
        entry = self.entry(name)
        # Neighbours too, as the kernel maps pages around each that is touched; no tensor here is written to.
        begin = entry.offset // FAULT_AROUND * FAULT_AROUND
        self._maps.release_pages(entry.file, begin, entry.offset + entry.nbytes + FAULT_AROUND)

    def close(self) -> None:
        """Forget the maps of the files; views stay valid, and a later read maps the files again."""
        self._maps.close()

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
        self._maps.sizes[path] = size
        now = path.stat()
        mark = (path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
        header = _header_cache.get(mark)
        if header is None:
            header = _header_cache[mark] = read_gguf_header(path, self._maps.get(path))
        return header


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
