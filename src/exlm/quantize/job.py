"""The folder of an unfinished job beside its target: every step's result, written whole or not at all.

A step is done when its file is there, so a killed job goes on behind the last one. What the steps are is not
known here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError, InputError

FACTS = "job.json"
PARTIAL = ".partial"


class Job:
    """Named results of steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, name: str) -> bool:
        """Whether a step's tensors are there."""
        return (self.folder / f"{name}.safetensors").is_file()

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors of a step."""
        kept = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        with self._writing(f"{name}.safetensors") as path:
            save_file(kept, path)

    def load(self, name: str) -> dict[str, Tensor]:
        """The tensors of a step."""
        return load_file(self.folder / f"{name}.safetensors")

    def note(self, name: str, value: Any) -> None:
        """Keep a step's plain data."""
        with self._writing(f"{name}.json") as path:
            path.write_text(json.dumps(value), encoding="utf-8")

    def noted(self, name: str) -> Any:
        """A step's plain data, or None."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def drop(self, *names: str) -> None:
        """Let go of tensors nobody needs any more."""
        for name in names:
            (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        partial = self.folder / f"{name}{PARTIAL}"
        try:
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(self.folder / name)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink()
            raise CheckpointError(
                f"{self.folder / name} could not be written ({error}). Make room on the disk, then run the "
                "same command again: it goes on from here."
            ) from error


def place_of(target: Path) -> Path:
    """The hidden folder of the job that makes `target`."""
    return target.with_name(f".{target.name}.quantizing")


@contextmanager
def open_job(
    target: Path, facts: Mapping[str, Any], *, later: Collection[str] = (), mark: str = "", restart: bool
) -> Iterator[Job]:
    """The job that makes `target`: the unfinished one if its facts are the same, else a new one.

    `InputError` if an unfinished job was begun with other facts, unless `restart` throws it away; those named
    in `later` may still change until there are files that begin with `mark`. The folder vanishes when the
    block ends without an error, or with one before anything was done.
    """
    folder = place_of(target)
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        if restart:
            for left in folder.iterdir():
                left.unlink()
        job = Job(folder)
        for left in folder.glob(f"*{PARTIAL}"):
            left.unlink()
        _compare(job, facts, () if any(folder.glob(f"{mark}*")) else later)
        job.note("job", facts)
        yield job
        shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written ({error}).") from error
    finally:
        if folder.is_dir() and {path.name for path in folder.iterdir()} <= {FACTS}:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _compare(job: Job, facts: Mapping[str, Any], later: Collection[str]) -> None:
    before = job.noted("job")
    if before is None:
        return
    now = json.loads(json.dumps(facts))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in later]
    if changed:
        key = sorted(changed)[0]
        raise InputError(
            f"{job.folder} holds an unfinished job with another {key} ({before.get(key)!r}, now "
            f"{now.get(key)!r}): give what it was begun with, or ask to restart, which throws its work away."
        )


def _lock(folder: Path) -> int | None:
    """Hold the folder as long as this process lives; `InputError` if another process does."""
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise InputError(f"{folder}: another process is at work on this model.") from error
    return handle
