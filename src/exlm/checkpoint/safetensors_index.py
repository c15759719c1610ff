"""Which weight files a model folder has, and which tensor is in which file.

The files found are the truth. An index beside them is often a stale copy, so it decides only between two
files that hold the same tensor, and explains what is missing. No tensor data is read here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath

from ..errors import BadFile, CheckpointError, ModelNotFound, UnsafeFile
from .safetensors_header import MAX_HEADER, load_json, quoted, read_header, read_small, refuse_pointer

INDEX = "model.safetensors.index.json"

_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
_CONSOLIDATED = "consolidated"
"""How the names of files begin in which Mistral has the same weights again, for another program."""

_SHARD = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})\.safetensors", re.DOTALL)


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: what its file's header says of it."""

    name: str
    file: Path
    dtype: str  # as the file spells it: F16, BF16, I32
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # of the first byte, from the start of the file

    def __str__(self) -> str:
        return f"{self.file}: tensor {quoted(self.name)}"


def flatten_experts(info: TensorInfo) -> TensorInfo:
    """Experts stacked in a third dimension, as rows that follow each other: the bytes are the same."""
    if len(info.shape) != 3:
        return info
    experts, rows, columns = info.shape
    return replace(info, shape=(experts * rows, columns))


@dataclass(frozen=True)
class FolderContents:
    """Everything a folder's headers and its index say."""

    tensors: dict[str, TensorInfo]
    sizes: dict[Path, int]  # of each weight file, when its header was read
    index: dict[str, str]  # tensor name → file name, as the index has it


def scan(folder: Path) -> FolderContents:
    """Read every header of a model folder."""
    files = weight_files(folder)
    index = read_index(folder)
    found: dict[str, list[TensorInfo]] = {}
    sizes: dict[Path, int] = {}
    for file in files:
        header = read_header(file)
        sizes[file] = header.size
        for name, entry in header.entries.items():
            size = entry.stop - entry.start
            info = TensorInfo(name, file, entry.dtype, entry.shape, size, header.data + entry.start)
            found.setdefault(name, []).append(info)
    tensors = {name: _resolve_duplicate(infos, index.get(name)) for name, infos in found.items()}
    return FolderContents(tensors, sizes, index)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by name, none of a numbered set missing.

    Weights that lie there a second time under Mistral's own names are left out: a copy of the model would
    carry them along.
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
    raw = read_small(path, MAX_HEADER)
    refuse_pointer(path, raw)
    remedy = "Delete it: the weights are found without it."
    try:
        # Some writers count parts of bytes: `total_size` may be 14483464192.0, and nobody needs it.
        table = load_json(raw.decode("utf-8"), fractions=True)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not the JSON it should be ({error}). {remedy}") from error
    files = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise BadFile(
            f"{path}: expected file names by tensor in `weight_map`, found {quoted(files)}. {remedy}"
        )
    for name, file in files.items():
        if _leaves_folder(file):
            raise BadFile(
                f"{path}: tensor {quoted(name)} is said to be in {quoted(file)}, outside the folder. {remedy}"
            )
    return files


def _leaves_folder(file: str) -> bool:
    # Spelling alone decides, so that a folder is judged alike on every system; Windows knows all the ways
    # out.
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
        if match := _SHARD.fullmatch(name):
            sets.setdefault((match[1], match[3]), {})[int(match[2])] = match[2]
    for (prefix, total), present in sets.items():
        width = len(next(iter(present.values())))
        first = min(1, *present)  # some writers begin with 00000
        expected = range(first, first + int(total))
        count = len(expected) - sum(number in expected for number in present)
        if count:
            # A name may claim a billion files: look no further than the first few gaps.
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
