"""Packed matrices of a model on disk: packed once, mapped by later starts.

A matrix is kept as a region, which is the same bytes wherever it is in memory: the C structs with zeros in place of
pointers, then the buffers that they point to. A relocation gives the place of a pointer in the structs, and where in
the region it points. At a start the structs are copied and their pointers set; the buffers stay in the map of the
file if that has huge pages, else they are copied into those of the arena while it has any. A region is verified when it
is taken, by a reader thread, which also reads its pages ahead of the first pass.

    one region, in multiples of REGION_ALIGNMENT bytes
    | Matrix, Segments … | codes | spans | scales … |
       └ relocations: codes, spans, scales point here

A file is used for the same contents of the model's files, the same matrices, and the same sources of exlm (`copy_key`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...formats.host_buffers import HUGE_PAGE, MAX_HUGE_BYTES, HugePageArena, mapped_in_huge_pages
from ...version import __version__
from ..artifact_cache import warn_once
from ..interface import LinearFn
from ..packed_store import PackedStore, write_all
from . import bindings
from .bindings import Library
from .compile import source_digest
from .ops import PackedEmbedding, PackedLinear, PaddedLinear
from .repack import PackedMatrix

log = logging.getLogger(__name__)

REGION_ALIGNMENT = 4096
PART_ALIGNMENT = 64
"""Of each buffer in its region: a cache line."""

MIN_COPY_BYTES = 32 << 20
"""Smaller models are packed at each start, in less time than a file takes to find."""

CHUNK_BYTES = 1 << 20
WRITE_BYTES = 2 * HUGE_PAGE
"""Of one write: file systems with large folios then keep the file in huge pages, which is how it is mapped."""

BACKGROUND_NICENESS = 19

PACKAGE = Path(__file__).parents[2]
READING_AND_PACKING = ("formats/*.py", "checkpoint/*.py", "kernels/cpu/repack.py", "kernels/cpu/bindings.py")
"""Sources, besides those in C, that decide what a packed matrix is."""

_DTYPES = {"float16": torch.float16, "float32": torch.float32}


@cache
def _sources_digest(instructions: str) -> str:
    """Identifies the version of exlm that packs matrices, and the instruction set it packs them for."""
    digest = hashlib.sha256(f"{__version__} {source_digest(instructions)}".encode())
    for pattern in READING_AND_PACKING:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def copy_key(fingerprint: str, library: Library) -> str:
    """The key of a model's packed matrices; `fingerprint` identifies what its files hold and how they are read."""
    return hashlib.sha256(f"{fingerprint} {_sources_digest(library.instructions)}".encode()).hexdigest()[:32]


# -- checksums -------------------------------------------------------------------------------------

_BLOCK_WORDS = REGION_ALIGNMENT // 8


@cache
def _block_factors() -> Tensor:
    """Different odd numbers: a sum of words times these, modulo 2^64, changes with each word and with their order."""
    return torch.arange(1, _BLOCK_WORDS + 1).mul_(0x1E3779B97F4A7C15).bitwise_or_(1)


class _Checksum:
    """SHA-256 of one 64-bit sum for each 4 KB, at the speed of memory; it finds damage, not forgery."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, data: Tensor) -> None:
        """Add whole blocks."""
        sums = data.view(torch.int64).view(-1, _BLOCK_WORDS) @ _block_factors()
        self._digest.update(sums.numpy().tobytes())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _checksum(data: Tensor) -> str:
    checksum = _Checksum()
    checksum.update(data)
    return checksum.hexdigest()


# -- regions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """A matrix as bytes that do not depend on their address."""

    structs: bytes  # pointers are zero
    parts: tuple[tuple[int, int, int], ...]  # (offset in the region, address, bytes) of each buffer
    relocations: tuple[tuple[int, int], ...]  # (offset of a pointer in the structs, offset it points to)
    nbytes: int

    def chunks(self, staging: Tensor) -> Iterator[Tensor]:
        """Its bytes in order; each chunk is a part of `staging` and valid until the next one."""
        structs = ctypes.create_string_buffer(self.structs, len(self.structs))
        parts = [(0, ctypes.addressof(structs), len(self.structs)), *self.parts]
        for start in range(0, self.nbytes, len(staging)):
            chunk = staging[: min(len(staging), self.nbytes - start)].zero_()
            stop = start + len(chunk)
            while parts and parts[0][0] < stop:
                offset, address, size = parts[0]
                count = min(size, stop - offset)
                ctypes.memmove(chunk.data_ptr() + offset - start, address, count)
                parts[0] = offset + count, address + count, size - count
                if count < size:
                    break
                del parts[0]
            yield chunk


def make_region(matrix: PackedMatrix) -> Region | None:
    """The region of a matrix; None if it points to memory that it does not hold."""
    structs: list[Any] = [matrix.struct]
    tensors: list[Tensor] = []
    for buffer in matrix.buffers:
        if isinstance(buffer, Tensor):
            if not buffer.is_contiguous():
                return None
            tensors += [buffer] if buffer.nbytes else []
        elif buffer is not None:
            structs.append(buffer)
    image, places = bytearray(), []  # places: (address, bytes, offset in the region)
    for struct in structs:
        places.append((ctypes.addressof(struct), ctypes.sizeof(struct), len(image)))
        image += bytes(struct)
        image += bytes(-len(image) % PART_ALIGNMENT)
    end, parts = len(image), []
    for tensor in tensors:
        places.append((tensor.data_ptr(), tensor.nbytes, end))
        parts.append((end, tensor.data_ptr(), tensor.nbytes))
        end += -(-tensor.nbytes // PART_ALIGNMENT) * PART_ALIGNMENT
    relocations = []
    for struct, (_, _, base) in zip(structs, places, strict=False):
        for at, pointer in _pointers(struct, base):
            target = next((offset for address, _, offset in places if address == pointer), None)
            if target is None:
                return None
            relocations.append((at, target))
            image[at : at + ctypes.sizeof(ctypes.c_void_p)] = bytes(ctypes.sizeof(ctypes.c_void_p))
    nbytes = -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT
    return Region(bytes(image), tuple(parts), tuple(relocations), nbytes)


def _pointers(value: Any, at: int) -> Iterator[tuple[int, int]]:
    """(offset, address) of every pointer in a struct or array that begins at `at`, except NULL."""
    if isinstance(value, ctypes.Array):
        for index, item in enumerate(value):
            yield from _pointers(item, at + index * ctypes.sizeof(item))
    elif isinstance(value, ctypes.Structure):
        for name, ctype, *_ in value._fields_:
            field, offset = getattr(value, name), at + getattr(type(value), name).offset
            if ctype is ctypes.c_void_p and field:
                yield offset, field
            else:
                yield from _pointers(field, offset)


# -- a model's packed matrices -----------------------------------------------------------------------


@dataclass(frozen=True)
class StoredMatrix:
    """Where in a file a matrix is."""

    offset: int
    nbytes: int
    structs: int  # bytes of its structs
    relocations: tuple[tuple[int, int], ...]
    inputs: int
    outputs: int
    checksum: str

    @classmethod
    def parse(cls, fields: Sequence[Any], data_bytes: int) -> StoredMatrix:
        """From JSON; ValueError or TypeError if it does not fit into the file."""
        offset, nbytes, structs, relocations, inputs, outputs, checksum = fields
        pairs = tuple((int(at), int(target)) for at, target in relocations)
        last = structs - ctypes.sizeof(ctypes.c_void_p)
        fits = 0 <= offset <= data_bytes - nbytes and ctypes.sizeof(bindings.Matrix) <= structs <= nbytes
        aligned = offset % REGION_ALIGNMENT == nbytes % REGION_ALIGNMENT == 0
        if not fits or not aligned or any(not (0 <= at <= last and 0 <= target < nbytes) for at, target in pairs):
            raise ValueError("a matrix is not in the file")
        return cls(offset, nbytes, structs, pairs, int(inputs), int(outputs), str(checksum))


class CpuPackedCopy:
    """A model's packed matrices while it loads: taken from a file, or gathered for one; each by its role."""

    def __init__(
        self, store: PackedStore, fingerprint: str, model: str, library: Library, arena: HugePageArena
    ) -> None:
        self._store, self._model, self._library, self._arena = store, model, library, arena
        self._key = copy_key(fingerprint, library)
        self._stored: list[StoredMatrix] = []
        self._roles: Mapping[str, Sequence[Any]] = {}
        self._restored: dict[StoredMatrix, PackedMatrix | None] = {}
        self._regions: dict[PackedMatrix, Region] = {}  # of restored matrices
        self._kept: dict[str, tuple[LinearFn, str]] = {}
        self._file = store.find(self._key)
        self._mapped_huge = self._file is not None and mapped_in_huge_pages(self._file.map, MAX_HUGE_BYTES)
        if self._file is not None:
            try:
                content = self._file.header.content
                self._stored = [StoredMatrix.parse(one, self._file.header.data_bytes) for one in content["matrices"]]
                self._roles = {role: (self._stored[index], *use) for role, (index, *use) in content["roles"].items()}
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                self._report_damage(f"its header is of another form ({error})")

    def restore(self, role: str) -> tuple[LinearFn, str] | None:
        """The kernel of a role and the description of its weight; None if no intact file has it."""
        if role not in self._roles:
            return None
        stored, kind, detail, more = self._roles[role]
        if stored not in self._restored:
            self._restored[stored] = self._restore_matrix(stored)
        matrix = self._restored[stored]
        if matrix is None:
            return None
        kernel: LinearFn
        if kind == "embedding":
            kernel = PackedEmbedding(self._library, matrix, _DTYPES[more])
        elif kind == "padded":
            kernel = PaddedLinear(PackedLinear(self._library, matrix), more)
        else:
            kernel = PackedLinear(self._library, matrix)
        self._kept[role] = kernel, detail
        return kernel, detail

    def keep(self, role: str, kernel: object, detail: str) -> None:
        """Gather what was bound for a role, if it is a packed matrix."""
        if isinstance(kernel, PackedLinear | PaddedLinear | PackedEmbedding):
            self._kept[role] = kernel, detail

    def finish(self) -> threading.Thread | None:
        """Write a file in a thread unless all gathered matrices are from one; the process ends after the thread."""
        kept, new = self._kept, self._kept.keys() != self._roles.keys() or None in self._restored.values()
        self._kept, self._restored, self._file = {}, {}, None
        regions, self._regions = self._regions, {}
        nbytes = sum(matrix.nbytes for matrix in {_matrix_of(kernel) for kernel, _ in kept.values()})
        if not new or nbytes < MIN_COPY_BYTES:
            return None
        thread = threading.Thread(target=self._write, args=(kept, regions), name="exlm-packed-copy")
        try:
            thread.start()
        except RuntimeError:  # too little memory for its stack
            return None
        return thread

    def _restore_matrix(self, stored: StoredMatrix) -> PackedMatrix | None:
        assert self._file is not None  # it has roles
        mapped = self._file.map
        region = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.nbytes, offset=stored.offset)
        if hasattr(mmap, "MADV_WILLNEED") and not self._mapped_huge:  # it would read small folios
            mapped.madvise(mmap.MADV_WILLNEED, stored.offset, stored.nbytes)
        huge = None if self._mapped_huge else self._arena.allocate_huge(stored.nbytes)
        if huge is not None:
            # Not torch's copy_, whose threads wait for each other: the readers are threads already.
            ctypes.memmove(huge.data_ptr(), region.data_ptr(), stored.nbytes)
            region = huge
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED, stored.offset, stored.nbytes)
        if _checksum(region) != stored.checksum:
            self._report_damage("the checksum of a matrix is wrong")
            return None
        image = bytes(region[: stored.structs].numpy())
        structs = ctypes.create_string_buffer(image, stored.structs)
        for at, target in stored.relocations:
            base = ctypes.addressof(structs) if target < stored.structs else region.data_ptr()
            ctypes.c_void_p.from_buffer(structs, at).value = base + target
        matrix = PackedMatrix(stored.inputs, stored.outputs, bindings.Matrix.from_buffer(structs), (structs, region))
        parts = (stored.structs, region.data_ptr() + stored.structs, stored.nbytes - stored.structs)
        self._regions[matrix] = Region(image, (parts,), stored.relocations, stored.nbytes)
        return matrix

    def _report_damage(self, what: str) -> None:
        assert self._file is not None
        warn_once(f"{self._file.path} is damaged ({what}): the model's matrices are packed again.")

    def _write(self, kept: Mapping[str, tuple[LinearFn, str]], regions: Mapping[PackedMatrix, Region]) -> None:
        """Write the file with little claim on the processor and the disk."""
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
        try:
            matrices = list(dict.fromkeys(_matrix_of(kernel) for kernel, _ in kept.values()))
            found = [regions.get(matrix) or make_region(matrix) for matrix in matrices]
            if (whole := [region for region in found if region is not None]) != found:
                log.debug("Packed matrices are not kept: one points to memory of others.")
                return
            roles = {role: _describe(kernel, detail, matrices) for role, (kernel, detail) in kept.items()}
            fill = _fill(matrices, whole, roles)
            self._store.write(self._key, self._model, sum(region.nbytes for region in whole), fill)
        except Exception:  # the model works without; the next start packs again
            log.warning("Packed matrices of %s could not be kept.", self._model, exc_info=True)


def _matrix_of(kernel: Any) -> PackedMatrix:
    matrix: PackedMatrix = kernel.inner.matrix if isinstance(kernel, PaddedLinear) else kernel.matrix
    return matrix


def _describe(kernel: Any, detail: str, matrices: Sequence[PackedMatrix]) -> tuple[object, ...]:
    """How a role uses its matrix, for JSON."""
    index = matrices.index(_matrix_of(kernel))
    if isinstance(kernel, PackedEmbedding):
        return index, "embedding", detail, str(kernel.dtype).removeprefix("torch.")
    if isinstance(kernel, PaddedLinear):
        return index, "padded", detail, kernel.outputs
    return index, "linear", detail, None


class _AlignedWriter:
    """Writes to a file in pieces of WRITE_BYTES, from its beginning."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._staging = torch.empty(WRITE_BYTES, dtype=torch.uint8)
        self._used = 0

    def write(self, data: Tensor) -> None:
        """Add bytes."""
        while len(data):
            count = min(len(data), WRITE_BYTES - self._used)
            self._staging[self._used : self._used + count] = data[:count]
            self._used, data = self._used + count, data[count:]
            if self._used == WRITE_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what is left."""
        write_all(self._file, self._staging[: self._used].numpy().data)
        self._used = 0


def _fill(
    matrices: Sequence[PackedMatrix], regions: Sequence[Region], roles: Mapping[str, object]
) -> Callable[[FileIO], object]:
    """Writes the regions; returns the header's part."""

    def fill(file: FileIO) -> object:
        chunk_memory, writer = torch.empty(CHUNK_BYTES, dtype=torch.uint8), _AlignedWriter(file)
        stored, end = [], 0
        for matrix, region in zip(matrices, regions, strict=True):
            checksum = _Checksum()
            for chunk in region.chunks(chunk_memory):
                checksum.update(chunk)
                writer.write(chunk)
            sizes = (end, region.nbytes, len(region.structs))
            shape = (matrix.in_features, matrix.out_features)
            stored.append((*sizes, region.relocations, *shape, checksum.hexdigest()))
            end += region.nbytes
        writer.flush()
        return {"matrices": stored, "roles": roles}

    return fill
