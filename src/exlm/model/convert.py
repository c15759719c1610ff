"""A model rewritten in another form or container where nothing is lost, and refused where something would be.

What becomes of each tensor is planned from the headers first, so a refusal comes before anything is written.
Rounding numbers to make a model smaller is quantising, and not done here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from ..checkpoint import Checkpoint, GgufCheckpoint, Source, open_source, save
from ..config import Config, FrozenConfig
from ..errors import CheckpointError, InputError
from .convert_files import CONFIG, Files, folder_files, gguf_files
from .convert_folder import FolderPlanner
from .convert_gguf import GgufPlanner
from .convert_plan import KEPT, Plan, Step
from .new_folder import check_target, new_folder, writing
from .progress import Callback, silent

SHARD = 2 * 2**30
"""Bytes of a weight file, and of memory that holds it until it is written."""

SLACK = 2**20
"""Bytes that headers and folders take beyond what they hold."""


def convert_model(
    source: str | Path,
    target: str | Path,
    to: str = "safetensors",
    *,
    shard_bytes: int = SHARD,
    overwrite: bool = False,
    progress: Callback | None = None,
) -> Path:
    """Write the model at `source` (a folder or a GGUF file) into a new folder and return it.

    `to` is "safetensors" (each matrix in the form it has, renamed and un-fused), "dense" (every matrix as
    plain floats), "exl2", "gptq" or "gptq-v2". The numbers of every matrix stay the same bit for bit;
    `Unsupported` names the first one for which they would not, before anything is written. The folder appears
    when it is complete; one that is there already is replaced only with `overwrite`. `progress(done, total)`
    counts tensors and matrices.
    """
    if to not in KEPT:
        raise InputError(f"A model can be converted to {', '.join(KEPT)}; found {to!r}.")
    if shard_bytes < 1:
        raise InputError(f"shard_bytes must be positive, found {shard_bytes}.")
    place = Path(target).expanduser()
    folder = Path(os.path.realpath(place))
    frozen = Config(source).freeze()
    checkpoint = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    read = [Path(os.path.realpath(path)) for path in (frozen.path, *checkpoint.files.paths)]
    check_target(folder, read, overwrite=overwrite)
    plan, files = _planned(frozen, checkpoint, to)
    _check_space(folder, plan.nbytes + files.nbytes + SLACK)
    with new_folder(folder, overwrite=overwrite) as hidden:
        weights = save(hidden, _tensors(plan.steps, progress or silent), shard_bytes=shard_bytes)
        with writing(folder):
            files.put(hidden)
            for path in weights:  # written for their owner alone; the others are as this user's files are
                shutil.copymode(hidden / CONFIG, path)
        _check_result(hidden, plan)
    return place


def _planned(frozen: FrozenConfig, checkpoint: Source, to: str) -> tuple[Plan, Files]:
    """The work, and the files beside it."""
    if isinstance(checkpoint, GgufCheckpoint):
        plan = GgufPlanner(checkpoint, frozen.spec, to).plan()
        return plan, gguf_files(checkpoint.files, checkpoint.has("head"))
    assert isinstance(checkpoint, Checkpoint)
    plan = FolderPlanner(checkpoint, frozen.spec, to, frozen.quantization).plan()
    return plan, folder_files(frozen.path, plan, frozen.quantization)


def _tensors(steps: Iterable[Step], progress: Callback) -> Iterator[tuple[str, Tensor]]:
    steps = tuple(steps)
    for done, step in enumerate(steps):
        progress(done, len(steps))
        yield from step.make()
    progress(len(steps), len(steps))


def _check_space(folder: Path, needed: int) -> None:
    """A disk that is too small is known before the first byte is written."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: the new model takes about {needed / 2**20:,.0f} MiB, and the disk has "
            f"{free / 2**20:,.0f} MiB free. Make room, or choose another disk."
        )


def _check_result(folder: Path, plan: Plan) -> None:
    """A model that does not say and hold what it should must not get its name."""
    frozen = Config(folder).freeze()
    checkpoint = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    for role in plan.fates:
        checkpoint.describe(role)
