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

from ..atomic_dir import atomic_dir, check_output_dir, report_write_errors
from ..checkpoint import Checkpoint, GgufCheckpoint, Source, open_source, save
from ..config import Config, FrozenConfig
from ..errors import CheckpointError, InputError
from ..model.instance import ProgressCallback, no_progress
from .from_folder import FolderPlanner
from .from_gguf import GgufPlanner
from .plan import KEPT_FORMS, ConversionPlan, ConversionStep
from .side_files import CONFIG_FILE, SideFiles, side_files_of_folder, side_files_of_gguf

DEFAULT_SHARD_BYTES = 2 * 2**30
"""Bytes of a weight file, and of memory that holds it until it is written."""

DISK_SLACK_BYTES = 2**20
"""Bytes that headers and folders take beyond what they hold."""


def convert_model(
    source: str | Path,
    target: str | Path,
    to: str = "safetensors",
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """Write the model at `source` (a folder or a GGUF file) into a new folder and return it.

    `to` is "safetensors" (each matrix in the form it has, renamed and un-fused), "dense" (every matrix as
    plain floats), "exl2", "gptq" or "gptq-v2". The numbers of every matrix stay the same bit for bit;
    `Unsupported` names the first one for which they would not, before anything is written. The folder appears
    when it is complete; one that is there already is replaced only with `overwrite`. `progress(done, total)`
    counts tensors and matrices.
    """
    if to not in KEPT_FORMS:
        raise InputError(f"A model can be converted to {', '.join(KEPT_FORMS)}; found {to!r}.")
    if shard_bytes < 1:
        raise InputError(f"shard_bytes must be positive, found {shard_bytes}.")
    target_path = Path(target).expanduser()
    folder = Path(os.path.realpath(target_path))
    frozen = Config(source).freeze()
    checkpoint = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    source_paths = [Path(os.path.realpath(path)) for path in (frozen.path, *checkpoint.files.paths)]
    check_output_dir(folder, source_paths, overwrite=overwrite)
    plan, files = _make_plan(frozen, checkpoint, to)
    _check_space(folder, plan.nbytes + files.nbytes + DISK_SLACK_BYTES)
    with atomic_dir(folder, overwrite=overwrite) as temp_dir:
        weights = save(temp_dir, _iter_tensors(plan.steps, progress or no_progress), shard_bytes=shard_bytes)
        with report_write_errors(folder):
            files.write_to(temp_dir)
            for path in weights:  # written for their owner alone; the others are as this user's files are
                shutil.copymode(temp_dir / CONFIG_FILE, path)
        _check_result(temp_dir, plan)
    return target_path


def _make_plan(frozen: FrozenConfig, checkpoint: Source, to: str) -> tuple[ConversionPlan, SideFiles]:
    """The work, and the files beside it."""
    if isinstance(checkpoint, GgufCheckpoint):
        plan = GgufPlanner(checkpoint, frozen.spec, to).plan()
        return plan, side_files_of_gguf(checkpoint.files, checkpoint.has("head"))
    assert isinstance(checkpoint, Checkpoint)
    plan = FolderPlanner(checkpoint, frozen.spec, to, frozen.quantization).plan()
    return plan, side_files_of_folder(frozen.path, plan, frozen.quantization)


def _iter_tensors(
    steps: Iterable[ConversionStep], progress: ProgressCallback
) -> Iterator[tuple[str, Tensor]]:
    steps = tuple(steps)
    for done, step in enumerate(steps):
        progress(done, len(steps))
        yield from step.make_tensors()
    progress(len(steps), len(steps))


def _check_space(folder: Path, needed: int) -> None:
    """A disk that is too small is known before the first byte is written."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: the new model takes about {needed / 2**20:,.0f} MiB, and the disk has "
            f"{free / 2**20:,.0f} MiB free. Make room, or choose another disk."
        )


def _check_result(folder: Path, plan: ConversionPlan) -> None:
    """A model that does not say and hold what it should must not get its name."""
    frozen = Config(folder).freeze()
    checkpoint = open_source(frozen.path, frozen.spec.names, frozen.quantization)
    for role in plan.actions:
        checkpoint.describe(role)
