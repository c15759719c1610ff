"""The folder of an unfinished job, beside its target: every step's result, written completely or not at all.

A step is done when its file is there, so a job that was killed continues after its last finished step. A
thread writes and deletes files in the order of the calls, while the next step is computed. What the steps are
is decided in `pipeline`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..atomic import atomic_file, lock_dir
from ..errors import CheckpointError, InputError, ModelNotFound

FINGERPRINT_FILE = "job.json"
PARTIAL = ".partial"


class StepStore:
    """Named results of steps; writes are asynchronous, and a failed one is raised by the next call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(1, "job")
        self._pending: dict[str, Future[None]] = {}  # the last operation on each file
        self._last_save: Future[None] | None = None
        self._failure: Exception | None = None

    def has(self, name: str) -> bool:
        """Whether a step's tensors are there."""
        return self._wait_for(f"{name}.safetensors").is_file()

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save a copy of a step's tensors; waits until the previous save is written."""
        if self._last_save is not None:
            self._last_save.result()  # so that at most one copy is in memory
        copies = {key: _host_copy(tensor) for key, tensor in tensors.items()}
        self._last_save = self._enqueue(
            f"{name}.safetensors", partial(_write_atomic, write=lambda path: save_file(copies, path))
        )

    def load(self, name: str) -> dict[str, Tensor]:
        """The tensors of a step; `CheckpointError` if the file is damaged."""
        path = self._wait_for(f"{name}.safetensors")
        try:
            return load_file(path)
        except (OSError, SafetensorError, ValueError) as error:
            raise damaged_step(path, error) from error

    def save_json(self, name: str, value: Any) -> None:
        """Save a step's plain data."""
        text = json.dumps(value)
        self._enqueue(
            f"{name}.json", partial(_write_atomic, write=lambda path: path.write_text(text, encoding="utf-8"))
        )

    def load_json(self, name: str) -> Any:
        """A step's plain data, or None; `CheckpointError` if the file is damaged."""
        path = self._wait_for(f"{name}.json")
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, RecursionError) as error:
            raise damaged_step(path, error) from error

    def delete(self, *names: str) -> None:
        """Delete the tensors of steps, whether they are there or not."""
        for name in names:
            self._enqueue(f"{name}.safetensors", partial(Path.unlink, missing_ok=True))

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    def raise_failure(self) -> None:
        """Raise the first failed write, if any: `CheckpointError` if the disk is full."""
        if self._failure is not None:
            raise self._failure

    def _wait_for(self, file: str) -> Path:
        """A file's path, once the pending operation on it is done."""
        if (pending := self._pending.pop(file, None)) is not None:
            pending.result()
        self.raise_failure()
        return self.folder / file

    def _enqueue(self, file: str, operation: Callable[[Path], object]) -> Future[None]:
        """Run an operation on a file after all earlier ones; nothing more runs after a failure."""
        self.raise_failure()
        self._pending[file] = pending = self._writer.submit(self._run, operation, self.folder / file)
        return pending

    def _run(self, operation: Callable[[Path], object], path: Path) -> None:
        if self._failure is not None:
            return
        try:
            operation(path)
        except (OSError, SafetensorError) as error:
            self._failure = CheckpointError(
                f"{path} could not be written ({error}). Make room on the disk, then run the same command "
                "again: it continues from here."
            )
            self._failure.__cause__ = error
        except Exception as error:
            self._failure = error


def damaged_step(path: Path, problem: object) -> CheckpointError:
    """The error for a file of an unfinished job that cannot be used."""
    return CheckpointError(
        f"{path} belongs to an unfinished job and is damaged ({problem!s:.200}). Give the option restart, "
        "which discards that job's work, or restore the file."
    )


def _write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    with atomic_file(path, path.with_name(f"{path.name}{PARTIAL}")) as temp:
        write(temp)


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy on the host that the caller cannot change; pinned for a GPU, which copies faster to it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor.detach())


def store_dir(target: Path) -> Path:
    """The hidden folder of the job that makes `target`."""
    return target.with_name(f".{target.name}.quantizing")


@contextmanager
def open_step_store(
    target: Path,
    fingerprint: Mapping[str, Any],
    *,
    changeable: Collection[str] = (),
    changeable_until: str = "",
    restart: bool,
) -> Iterator[StepStore]:
    """The steps of the job that makes `target`: of an unfinished job with the same fingerprint, else none.

    `InputError` if an unfinished job has another fingerprint, unless `restart` discards it. The keys named in
    `changeable` may change until the step `changeable_until` is saved. The folder is deleted when the block
    ends without an error, or with one before any step was done.
    """
    folder = store_dir(target)
    lock = store = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        if restart:
            for path in folder.iterdir():
                path.unlink()
        store = StepStore(folder)
        for path in folder.glob(f"*{PARTIAL}"):
            path.unlink()
        fixed = any(folder.glob(f"{changeable_until}.*"))
        _check_fingerprint(store, fingerprint, () if fixed else changeable)
        store.save_json("job", fingerprint)
        yield store
        store.close()
        store.raise_failure()
        shutil.rmtree(folder)
    except ModelNotFound:  # an OSError, too, but not about this folder
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written ({error}).") from error
    finally:
        if store is not None:
            store.close()
        if os.path.isdir(folder) and set(os.listdir(folder)) <= {FINGERPRINT_FILE}:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _check_fingerprint(store: StepStore, fingerprint: Mapping[str, Any], changeable: Collection[str]) -> None:
    before = store.load_json("job")
    if before is None:
        return
    if not isinstance(before, dict):
        raise damaged_step(store.folder / FINGERPRINT_FILE, f"expected an object, found {type(before).__name__}")
    now = json.loads(json.dumps(fingerprint))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in changeable]
    if changed:
        key = sorted(changed)[0]
        raise InputError(
            f"{store.folder} holds an unfinished job with another {key} ({before.get(key)!r:.200}, now "
            f"{now.get(key)!r:.200}): give the same {key} to continue it, or the "
            "option restart, which discards its work."
        )


def _lock(folder: Path) -> int | None:
    """Hold the folder for this process; `InputError` if another process holds it."""
    try:
        return lock_dir(folder)
    except BlockingIOError as error:
        raise InputError(f"{folder}: another process is quantising into this target.") from error
