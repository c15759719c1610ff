"""The tensors of a model folder, read when they are asked for.

What is kept as it is stored is loaded: straight into memory of its own, a large tensor by several threads.
What is converted on the way is read: a view of its file, which is mapped once, and whose pages can be given
back, so that loading a model takes the memory of the model and not that of its files too. Names here are the
stored ones; roles and renaming are not known.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

from ..errors import BadFile, BadTensor, MissingTensor
from ..formats.host_buffers import pooled_empty
from ..memory import memory_errors
from .safetensors_header import DTYPES, damaged, quoted
from .safetensors_index import INDEX, TensorInfo, scan

MAX_THREADS = 4
"""Threads that load one tensor: enough for a fast disk, and not too many for few cores."""

MIN_THREAD_BYTES = 16 * 2**20
"""Bytes for which another of them is worth its while, where several tensors are loaded at a time anyway."""


class SafetensorsFolder:
    """Every tensor of the `*.safetensors` files in a folder; headers are read at once, data on demand.

    Reads may come from several threads at a time.
    """

    def __init__(self, folder: Path) -> None:
        contents = scan(folder)
        self.folder = folder
        self.index = contents.index
        self._tensors = contents.tensors
        self._sizes = contents.sizes
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> tuple[str, ...]:
        """Every stored name."""
        return tuple(self._tensors)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The weight files, by name."""
        return tuple(self._sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self._tensors.values())

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor."""
        if name not in self._tensors:
            where = f"{self.folder}: tensor {quoted(name)}"
            raise MissingTensor(f"{where} is in none of the files. {self.hint(name)}".rstrip())
        return self._tensors[name]

    def hint(self, name: str) -> str:
        """Where the index says a missing tensor should be, as a sentence; empty if it says nothing."""
        file = self.index.get(name)
        if file is None:
            return ""
        if self.folder / file in self._sizes:
            return f"{INDEX} says it is in {quoted(file)}, which does not hold it: one of them is stale."
        return f"{INDEX} says it is in {quoted(file)}, which is not in the folder: download that file."

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor's numbers; BadFile if torch has none like it."""
        info = self.info(name)
        if info.dtype not in DTYPES:
            raise BadFile(f"{info}: type {quoted(info.dtype)} is not one of {', '.join(DTYPES)}.")
        return DTYPES[info.dtype]

    def load(self, name: str) -> torch.Tensor:
        """A tensor on the CPU as stored, in memory of its own."""
        info = self.info(name)
        target = pooled_empty(info.shape, self.dtype(name))
        self._fill(info, info.offset, target)
        return target

    def load_rows(self, of: str | TensorInfo, start: int, target: torch.Tensor) -> None:
        """Fill `target`, contiguous, on the CPU and of the stored type, with the rows from `start` on.

        Whose rows is said by name, or by what the header says, perhaps in another shape (`flat`).
        """
        info = self.info(of) if isinstance(of, str) else of
        first, _ = self._row_bytes(info, start, start + len(target))
        self._fill(info, first, target)

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, as stored: a view of the file where the file's layout allows.

        Writing to it changes other views of the same tensor, but never the file. Copy what is to be kept,
        then `release` it: a file that is cut short while a view is in use takes the process down.
        """
        info = self.info(name)
        return self._view(info, info.offset, info.shape)

    def read_rows(self, of: str | TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` along the first dimension; the others are not touched."""
        info = self.info(of) if isinstance(of, str) else of
        first, _ = self._row_bytes(info, start, stop)
        return self._view(info, first, (stop - start, *info.shape[1:]))

    def release(self, of: str | TensorInfo, start: int = 0, stop: int | None = None) -> None:
        """Give back the memory of a tensor, or of some of its rows; a later read gets it from the file again.

        What was written into views of it is lost.
        """
        info = self.info(of) if isinstance(of, str) else of
        mapped = self._maps.get(info.file)
        if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first, size = info.offset, info.nbytes
        if stop is not None:
            first, size = self._row_bytes(info, start, stop)
        # Only whole pages of this tensor: its neighbours may be in use.
        page = mmap.PAGESIZE
        begin, end = -(-first // page) * page, (first + size) // page * page
        if begin < end:
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        """Let go of the files; tensors that were read stay valid, and a later read opens them again."""
        with self._lock:
            # Not mmap.close(): a view that is still alive would then point nowhere.
            self._maps.clear()

    def _row_bytes(self, info: TensorInfo, start: int, stop: int) -> tuple[int, int]:
        rows = info.shape[0] if info.shape else 0
        if not 0 <= start <= stop <= rows:
            raise BadTensor(f"{info}: expected at least {stop} rows, found shape {list(info.shape)}.")
        row = info.nbytes // rows if rows else 0
        return info.offset + start * row, (stop - start) * row

    def _fill(self, info: TensorInfo, offset: int, target: torch.Tensor) -> None:
        if not target.numel():
            return
        block, size = target.view(-1).view(torch.uint8).numpy().data, self._sizes[info.file]
        count = min(MAX_THREADS, len(block) // MIN_THREAD_BYTES)
        if count < 2:
            _read_into(info.file, size, offset, block)
            return
        cuts = [len(block) * n // count for n in range(count + 1)]
        with ThreadPoolExecutor(count, "exlm-load") as threads:
            shares = [
                threads.submit(_read_into, info.file, size, offset + start, block[start:stop])
                for start, stop in pairwise(cuts)
            ]
        for share in shares:
            share.result()

    def _view(self, info: TensorInfo, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = self.dtype(info.name)
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        mapped = self._map(info.file)
        if offset % dtype.itemsize == 0:
            return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shape)
        # A header of odd length, as old writers left it, puts everything after it at odd addresses.
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        # Not `clone`: large blocks that come and go leave holes in the heap; a map of its own leaves none.
        copied = torch.frombuffer(mmap.mmap(-1, len(raw)), dtype=torch.uint8).copy_(raw)
        return copied.view(dtype).view(shape)

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


def _read_into(path: Path, size: int, offset: int, target: memoryview) -> None:
    """Fill `target` from a file; one that has changed or cannot be read is a BadFile, even halfway."""
    try:
        # A handle for each reader: those that shared one would have to share its position.
        with path.open("rb", buffering=0) as file:
            _check_size(path, os.fstat(file.fileno()).st_size, size)
            file.seek(offset)
            while target:
                count = file.readinto(target)
                if not count:
                    raise damaged(path, f"expected {len(target)} more bytes, found its end")
                target = target[count:]
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}).") from error


def _check_size(path: Path, found: int, size: int) -> None:
    if found != size:
        raise damaged(path, f"expected {size} bytes as when its header was read, found {found}")
