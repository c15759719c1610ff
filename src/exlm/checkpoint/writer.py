"""Writes named tensors to safetensors files, in shards if they are large.

Files are written under temporary names and renamed at the end, so that a crash leaves no half-written model:
either no file has its final name, or a numbered set has a gap, which readers refuse.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..atomic import sync_file
from ..errors import BadTensor, CheckpointError, InputError
from .safetensors_files import DTYPES, INDEX, METADATA
from .tensor_files import quoted

_OWN_FILE_NAME = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def save_sharded(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write tensors in the order they come, a new file before one would exceed `shard_bytes`; return the
    files.

    At most one shard is in memory, until it is written: tensors must not change before this returns. A tensor
    that is larger than a shard gets a file of its own. `progress` is called with the number of tensors and
    of bytes written so far. With `overwrite`, a model that was written into the folder like this is replaced.
    """
    if shard_bytes <= 0:
        raise InputError(f"shard_bytes must be positive, found {shard_bytes}.")
    with _report_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        old = _replaceable_files(folder, overwrite)
        # On the same disk, so that renaming is enough in the end.
        hidden = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    try:
        shards = _ShardWriter(hidden, shard_bytes, {"format": "pt", **(metadata or {})}, progress)
        for name, tensor in tensors:
            shards.add(name, tensor)
        shards.flush()
        if not shards.files:
            raise CheckpointError(f"{folder}: no tensors were given to write.")
        with _report_disk_errors(folder):
            return _publish(folder, shards, old)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


class _ShardWriter:
    """Collects tensors and writes a file when a shard is full."""

    def __init__(
        self, folder: Path, limit: int, metadata: dict[str, str], progress: Callable[[int, int], None] | None
    ) -> None:
        self.files: list[Path] = []
        self.file_numbers: dict[str, int] = {}  # tensor → number of its file
        self.total = 0
        self._folder = folder
        self._limit = limit
        self._metadata = metadata
        self._progress = progress
        self._held: dict[str, torch.Tensor] = {}
        self._storages: set[int] = set()
        self._size = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.file_numbers or name == METADATA:
            raise CheckpointError(f"The tensor name {quoted(name)} is reserved or was given twice.")
        if tensor.dtype not in DTYPES.values() or tensor.layout != torch.strided:
            kind = f"{tensor.layout} {tensor.dtype}"
            raise BadTensor(f"Tensor {quoted(name)}: {kind} cannot be stored in a safetensors file.")
        if self._held and self._size + tensor.nbytes > self._limit:
            self.flush()
        self.file_numbers[name] = len(self.files)
        self._held[name] = self._without_shared_memory(tensor)
        self._size += tensor.nbytes

    def flush(self) -> None:
        if not self._held:
            return
        path = self._folder / f"{len(self.files)}"
        with _report_disk_errors(self._folder.parent):
            save_file(self._held, path, metadata=self._metadata)
            sync_file(path)
        self.files.append(path)
        self.total += self._size
        self._held, self._storages, self._size = {}, set(), 0
        if self._progress:
            self._progress(len(self.file_numbers), self.total)

    def _without_shared_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to("cpu").contiguous()
        # A view would keep the whole tensor alive, and the library refuses tensors that share memory.
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in self._storages:
            return tensor.clone()
        self._storages.add(storage.data_ptr())
        return tensor


@contextmanager
def _report_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: the weights could not be written ({error}).") from error


def _replaceable_files(folder: Path, overwrite: bool) -> list[Path]:
    """The files of a model already in the folder; CheckpointError if they may not be replaced."""
    names = sorted(os.listdir(folder))
    weights = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    foreign = [name for name in weights if not _OWN_FILE_NAME.fullmatch(name)]
    found = [*weights, *(name for name in names if name == INDEX)]
    if foreign or (found and not overwrite):
        remedy = "Remove it" if foreign else "Ask to overwrite it"
        raise CheckpointError(
            f"{folder} already holds weights ({(foreign or found)[0]}), which would mix with new ones. "
            f"{remedy}, or choose another folder."
        )
    return [folder / name for name in found]


def _publish(folder: Path, shards: _ShardWriter, old: list[Path]) -> list[Path]:
    count = len(shards.files)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        files = {name: names[n] for name, n in sorted(shards.file_numbers.items())}
        index = {"metadata": {"total_size": shards.total}, "weight_map": files}
        written = shards.files[0].parent / INDEX
        written.write_text(json.dumps(index, indent=2), encoding="utf-8")
        sync_file(written)
        shards.files.append(written)
        names.append(INDEX)
    # The old model is deleted first, its index before its files: a crash must not leave a mixture of two.
    for path in reversed(old):
        if count > 1 or path.name != names[0]:
            path.unlink()
    for written, name in zip(shards.files, names, strict=True):
        written.replace(folder / name)
    return [folder / name for name in names[:count]]
