"""The safetensors files of a model folder: their headers, which tensors they hold, and the data on demand.

Headers are not trusted: a number in one is checked against the file's size before memory is allocated for it. The
`safetensors` library writes exlm's files but does not read them: it refuses a whole file for one tensor of an unknown
type, its errors do not say what was expected and found where, and every page it has touched stays resident.

The headers decide which tensors there are. `model.safetensors.index.json` is often a stale copy, so it only
decides between two files that hold the same tensor, and explains what is missing.

Data that is kept as it is stored is loaded: read into memory of its own, a large tensor by several threads.
Data that is cast or converted is a view of the mapped file, whose pages can be released again, so that
loading a model takes the memory of the model and not that of its files too. Names are the stored ones;
`source` maps a model's roles to them.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from typing import Any

import torch

from ..errors import BadFile, CheckpointError, ModelNotFound, UnsafeFile
from ..formats.host_buffers import pooled_empty
from .tensor_files import (
    TensorFiles,
    TensorInfo,
    check_size,
    damaged,
    parse_json,
    quoted,
    read_small_file,
    refuse_lfs_pointer,
    regular_file_size,
)

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

FLOAT_TYPES = ("F16", "BF16", "F32", "F64")

_FIELDS = ("dtype", "shape", "data_offsets")
METADATA = "__metadata__"

INDEX = "model.safetensors.index.json"

_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
_CONSOLIDATED = "consolidated"
"""Prefix of the files in which Mistral stores the same weights a second time, for its own program."""

_SHARD_NAME = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})\.safetensors", re.DOTALL)

MAX_THREADS = 4
"""Threads that read one tensor: enough for a fast disk, and not too many for few cores."""

MIN_THREAD_BYTES = 16 * 2**20
"""Bytes each of those threads reads at least; several tensors are loaded at a time anyway."""


# -- headers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SafetensorsHeader:
    """A checked header: each tensor of a known type has the bytes its shape needs, and all fill the file."""

    tensors: dict[str, TensorInfo]
    file_size: int


def read_header(path: Path) -> SafetensorsHeader:
    """The checked header of a safetensors file; BadFile names the tensor that is wrong, and how."""
    raw, size = _raw_header(path)
    start = 8 + len(raw)  # of the data
    tensors = {name: _tensor_info(path, name, value, start) for name, value in _parse(path, raw).items()}
    _check_every_byte_is_used(path, tensors, start, size)
    return SafetensorsHeader(tensors, size)


def _raw_header(path: Path) -> tuple[bytes, int]:
    size = regular_file_size(path)
    try:
        with path.open("rb") as file:
            start = file.read(64)
            refuse_lfs_pointer(path, start)
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
        raise damaged(path, f"expected a list of tensors as header, found brackets in most of {len(raw)} bytes")
    try:
        table = parse_json(raw.decode("utf-8"))
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


def _tensor_info(path: Path, name: str, value: object, data_start: int) -> TensorInfo:
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
    return TensorInfo(name, path, dtype, tuple(shape), stop - start, data_start + start)


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_every_byte_is_used(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """Check that each data byte belongs to one tensor: no shifted, cut or lengthened file passes."""
    last, end, stored = "", 0, size - start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        first = info.offset - start
        if first + info.nbytes > stored:
            raise damaged(
                path,
                f"tensor {quoted(info.name)}: expected {first + info.nbytes} bytes of data, found {stored}; "
                "it is cut short",
            )
        if first < end:
            raise damaged(path, f"tensors {quoted(last)} and {quoted(info.name)} overlap at data byte {first}")
        if first > end:
            raise damaged(path, f"tensor {quoted(info.name)}: expected to start at {end}, found {first}")
        last, end = info.name, first + info.nbytes
    if end != stored:
        raise damaged(path, f"expected {end} bytes of data after the header, found {stored}")


# -- folders ---------------------------------------------------------------------------------------


class SafetensorsFolder(TensorFiles):
    """Every tensor of the `*.safetensors` files in a folder; headers are read at once, data on demand."""

    def __init__(self, folder: Path) -> None:
        """Read every header and the index."""
        super().__init__(folder)
        self.paths = tuple(weight_files(folder))
        self.index = read_index(folder)  # tensor name → file name
        found: dict[str, list[TensorInfo]] = {}
        for path in self.paths:
            header = read_header(path)
            self._sizes[path] = header.file_size
            for name, info in header.tensors.items():
                found.setdefault(name, []).append(info)
        self.tensors = {name: _resolve_duplicate(infos, self.index.get(name)) for name, infos in found.items()}

    def explain_missing(self, name: str) -> str:
        """Where the index says a missing tensor should be, as a sentence; empty if it says nothing."""
        file = self.index.get(name)
        if file is None:
            return ""
        if self.path / file in self._sizes:
            return f"{INDEX} says it is in {quoted(file)}, which does not hold it: one of them is stale."
        return f"{INDEX} says it is in {quoted(file)}, which is not in the folder: download that file."

    def dtype(self, name: str) -> torch.dtype:
        """The torch type of a tensor's numbers; BadFile if torch has none like it."""
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

    def load_rows(self, info: TensorInfo, start: int, target: torch.Tensor) -> None:
        """Fill `target`, contiguous, on the CPU and of the stored type, with the rows from `start` on.

        Here, in `view_rows` and in `release`, a caller may have reshaped `info`, which changes what its rows are.
        """
        first, _ = info.byte_range(start, start + len(target), _rows(info))
        self._fill(info, first, target)

    def view(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, as stored: a view of the file where the file's layout allows.

        Writing to it changes other views of the same tensor, but never the file. Copy what is to be kept,
        then `release` it: a file that is truncated while a view is in use ends the process (SIGBUS).
        """
        info = self.info(name)
        return self._view(info, info.offset, info.shape)

    def view_rows(self, of: str | TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` along the first dimension; the others are not touched."""
        info = self.info(of) if isinstance(of, str) else of
        first, _ = info.byte_range(start, stop, _rows(info))
        return self._view(info, first, (stop - start, *info.shape[1:]))

    def release(self, of: str | TensorInfo, start: int = 0, stop: int | None = None) -> None:
        """Free the mapped pages of a tensor, or of some of its rows; a later read maps them again.

        What was written into views of it is lost.
        """
        info = self.info(of) if isinstance(of, str) else of
        first, size = info.offset, info.nbytes
        if stop is not None:
            first, size = info.byte_range(start, stop, _rows(info))
        # Only pages that hold nothing but this tensor: its neighbours may be in use.
        page = mmap.PAGESIZE
        self._release_pages(info.file, -(-first // page) * page, (first + size) // page * page)

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
        # Old writers left headers of odd length, which put everything after them at odd addresses.
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        # `clone` would fragment the heap with large short-lived blocks; an anonymous map does not.
        copied = torch.frombuffer(mmap.mmap(-1, len(raw)), dtype=torch.uint8).copy_(raw)
        return copied.view(dtype).view(shape)


def _rows(info: TensorInfo) -> int:
    return info.shape[0] if info.shape else 0


def _read_into(path: Path, size: int, offset: int, target: memoryview) -> None:
    """Fill `target` from a file; BadFile if it has changed or cannot be read, even halfway."""
    try:
        # Each thread opens the file itself: a shared handle would share its position.
        with path.open("rb", buffering=0) as file:
            check_size(path, os.fstat(file.fileno()).st_size, size)
            file.seek(offset)
            while target:
                count = file.readinto(target)
                if not count:
                    raise damaged(path, f"expected {len(target)} more bytes, found its end")
                target = target[count:]
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror}).") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by name, none of a numbered set missing.

    Weights that are stored a second time under Mistral's own names are left out, so that a copy of the model
    does not carry them along.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a folder; expected a model folder with *.safetensors files.")
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed ({error.strerror}).") from error
    found = [name for name in names if name.endswith(".safetensors")]
    if not found:
        raise _no_weights_error(folder, names)
    found = [name for name in found if not name.startswith(_CONSOLIDATED)] or found
    _check_shards_complete(folder, found)
    return [folder / name for name in found]


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name → file name as the folder's index has it; empty without an index."""
    path = folder / INDEX
    if not os.path.lexists(path):
        return {}
    raw = read_small_file(path, MAX_HEADER)
    refuse_lfs_pointer(path, raw)
    remedy = "Delete it: the weights are found without it."
    try:
        # Some writers give `total_size` as a float (14483464192.0); it is not used.
        table = parse_json(raw.decode("utf-8"), allow_floats=True)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not the JSON it should be ({error}). {remedy}") from error
    files = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise BadFile(f"{path}: expected file names by tensor in `weight_map`, found {quoted(files)}. {remedy}")
    for name, file in files.items():
        if _leaves_folder(file):
            raise BadFile(
                f"{path}: tensor {quoted(name)} is said to be in {quoted(file)}, outside the folder. {remedy}"
            )
    return files


def _leaves_folder(file: str) -> bool:
    # Windows path rules on every system: they cover all ways out of a folder.
    path = PureWindowsPath(file)
    return not path.parts or bool(path.anchor) or ".." in path.parts or "\0" in file


def _resolve_duplicate(infos: list[TensorInfo], indexed: str | None) -> TensorInfo:
    if len(infos) == 1:
        return infos[0]
    for info in infos:
        if info.file.name == indexed:
            return info
    first, second = infos[0], infos[1]
    raise BadFile(
        f"{first} is also in {second.file}, and no {INDEX} says which of them counts. "
        "Move the file that does not belong to the model out of the folder."
    )


def _check_shards_complete(folder: Path, names: list[str]) -> None:
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        if match := _SHARD_NAME.fullmatch(name):
            sets.setdefault((match[1], match[3]), {})[int(match[2])] = match[2]
    for (prefix, total), present in sets.items():
        width = len(next(iter(present.values())))
        first = min(1, *present)  # some writers begin with 00000
        expected = range(first, first + int(total))
        count = len(expected) - sum(number in expected for number in present)
        if count:
            # A file name may claim a billion shards: look at the first few gaps only.
            gaps = [number for number in expected[: len(present) + 4] if number not in present][:4]
            files = ", ".join(f"{prefix}-{number:0{width}}-of-{total}.safetensors" for number in gaps)
            more = f" and {count - len(gaps)} more" if count > len(gaps) else ""
            raise BadFile(
                f"{folder}: {files}{more} missing; expected {int(total)} files numbered like this, found "
                f"{len(present)}. Download the missing ones."
            )


def _no_weights_error(folder: Path, names: list[str]) -> CheckpointError:
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    if not pickles:
        return CheckpointError(f"{folder} holds no weights: expected *.safetensors files, found none.")
    source = os.path.abspath(folder)
    command = (
        'python -c "from transformers import AutoModelForCausalLM as M; '
        f'M.from_pretrained({source!r}).save_pretrained({source + "-safetensors"!r})"'
    )
    some = ", ".join(pickles[:3]) + (", …" if pickles[3:] else "")
    return UnsafeFile(
        f"{folder} holds its weights only as pickles ({some}), which can run code when they are opened; exlm "
        f"reads safetensors only. If you trust the files, convert them:\n{command}"
    )
