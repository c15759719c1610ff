"""The folder of an unfinished job beside its target: every step's result, written whole or not at all.

A step is done when its file is there, so a killed job goes on behind the last one. Files come and go in the
order that was asked for, by a thread of their own, while the next step is under way. What the steps are is
not known here.
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

FACTS_FILE = "job.json"
PARTIAL = ".partial"


class StepStore:
    """Named results of steps; an error in writing one is raised by whatever is asked for next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(1, "job")
        self._pending: dict[str, Future[None]] = {}  # by file: what was asked for last
        self._last_save: Future[None] | None = None
        self._failure: Exception | None = None

    def has(self, name: str) -> bool:
        """Whether a step's tensors are there."""
        return self._wait_for(f"{name}.safetensors").is_file()

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors of a step as they are now; the ones before have been written then."""
        if self._last_save is not None:
            self._last_save.result()  # copies of one step in memory are enough
        kept = {key: _host_copy(tensor) for key, tensor in tensors.items()}
        self._last_save = self._enqueue(
            f"{name}.safetensors", partial(_write_atomic, write=lambda path: save_file(kept, path))
        )

    def load(self, name: str) -> dict[str, Tensor]:
        """The tensors of a step; `CheckpointError` if its file is damaged."""
        path = self._wait_for(f"{name}.safetensors")
        try:
            return load_file(path)
        except (OSError, SafetensorError, ValueError) as error:
            raise damaged_step(path, error) from error

    def save_json(self, name: str, value: Any) -> None:
        """Keep a step's plain data."""
        text = json.dumps(value)
        self._enqueue(
            f"{name}.json", partial(_write_atomic, write=lambda path: path.write_text(text, encoding="utf-8"))
        )

    def load_json(self, name: str) -> Any:
        """A step's plain data, or None; `CheckpointError` if its file is damaged."""
        path = self._wait_for(f"{name}.json")
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, RecursionError) as error:
            raise damaged_step(path, error) from error

    def delete(self, *names: str) -> None:
        """Let go of tensors nobody needs any more."""
        for name in names:
            self._enqueue(f"{name}.safetensors", partial(Path.unlink, missing_ok=True))

    def close(self) -> None:
        """Wait until everything is done."""
        self._writer.shutdown()

    def raise_failure(self) -> None:
        """Raise what has failed so far: `CheckpointError` if the disk is full."""
        if self._failure is not None:
            raise self._failure

    def _wait_for(self, file: str) -> Path:
        """A file, when what was asked for is done."""
        if (asked := self._pending.pop(file, None)) is not None:
            asked.result()
        self.raise_failure()
        return self.folder / file

    def _enqueue(self, file: str, act: Callable[[Path], object]) -> Future[None]:
        """Do something to a file behind everything else, or nothing if that failed."""
        self.raise_failure()
        self._pending[file] = asked = self._writer.submit(self._run, act, self.folder / file)
        return asked

    def _run(self, act: Callable[[Path], object], path: Path) -> None:
        if self._failure is not None:
            return
        try:
            act(path)
        except (OSError, SafetensorError) as error:
            self._failure = CheckpointError(
                f"{path} could not be written ({error}). Make room on the disk, then run the same command "
                "again: it goes on from here."
            )
            self._failure.__cause__ = error
        except Exception as error:
            self._failure = error


def damaged_step(path: Path, problem: object) -> CheckpointError:
    """The error for a file of an unfinished job that cannot be used."""
    return CheckpointError(
        f"{path} belongs to an unfinished job and is damaged ({problem!s:.200}). Ask to restart, which "
        "throws that job's work away, or restore the file."
    )


def _write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """A file whole or not at all."""
    with atomic_file(path, path.with_name(f"{path.name}{PARTIAL}")) as temp:
        write(temp)


def _host_copy(tensor: Tensor) -> Tensor:
    """On the host, and nobody else's; a GPU writes fastest to memory that stays where it is."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor.detach())


def store_dir(target: Path) -> Path:
    """The hidden folder of the job that makes `target`."""
    return target.with_name(f".{target.name}.quantizing")


@contextmanager
def open_step_store(
    target: Path,
    facts: Mapping[str, Any],
    *,
    changeable: Collection[str] = (),
    until: str = "",
    restart: bool,
) -> Iterator[StepStore]:
    """The job that makes `target`: the unfinished one if its facts are the same, else a new one.

    `InputError` if an unfinished job was begun with other facts, unless `restart` throws it away; those named
    in `later` may still change until there are files that begin with `mark`. The folder vanishes when the
    block ends without an error, or with one before anything was done.
    """
    folder = store_dir(target)
    lock = job = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        if restart:
            for left in folder.iterdir():
                left.unlink()
        job = StepStore(folder)
        for left in folder.glob(f"*{PARTIAL}"):
            left.unlink()
        _check_facts(job, facts, () if any(folder.glob(f"{until}*")) else changeable)
        job.save_json("job", facts)
        yield job
        job.close()
        job.raise_failure()
        shutil.rmtree(folder)
    except ModelNotFound:  # which is an OSError too, and not about this folder
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written ({error}).") from error
    finally:
        if job is not None:
            job.close()
        if os.path.isdir(folder) and set(os.listdir(folder)) <= {FACTS_FILE}:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _check_facts(job: StepStore, facts: Mapping[str, Any], later: Collection[str]) -> None:
    before = job.load_json("job")
    if before is None:
        return
    if not isinstance(before, dict):
        raise damaged_step(job.folder / FACTS_FILE, f"expected an object, found {type(before).__name__}")
    now = json.loads(json.dumps(facts))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in later]
    if changed:
        key = sorted(changed)[0]
        raise InputError(
            f"{job.folder} holds an unfinished job with another {key} ({before.get(key)!r:.200}, now "
            f"{now.get(key)!r:.200}): give what it was begun with, or ask to restart, which "
            "throws its work away."
        )


def _lock(folder: Path) -> int | None:
    """Hold the folder as long as this process lives; `InputError` if another process does."""
    try:
        return lock_dir(folder)
    except BlockingIOError as error:
        raise InputError(f"{folder}: another process is at work on this model.") from error
