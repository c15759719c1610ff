"""`convert_model`: writes a model in another format, or refuses where that would change its numbers.

The whole conversion is planned from the headers, so that a refusal comes before anything is written. Rounding
weights to make a model smaller is quantising (`quantize`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from ..atomic import atomic_dir, check_disk_space, check_output_dir, report_write_errors
from ..checkpoint import save_sharded
from ..config import Config
from ..errors import InputError
from ..model.loader import ProgressCallback
from .plan import KEPT_FORMATS, ConversionPlan, ConversionStep
from .planners import make_plan
from .side_files import CONFIG_FILE, side_files

DEFAULT_SHARD_BYTES = 2 * 2**30
"""Size of a weight file, and of the memory that holds its tensors until it is written."""

DISK_SLACK_BYTES = 2**20
"""Disk space for headers and directories beyond the tensors' bytes."""


def convert_model(
    source: str | Path,
    target: str | Path,
    to: str = "safetensors",
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """Convert the model at `source` (a folder or a GGUF file) into a new folder, and return its path.

    `to` is "safetensors" (each matrix in the format it has, renamed, and un-fused where the family's files may
    hold it alone), "dense" (every matrix as plain floats), "exl2", "gptq" or "gptq-v2". Every weight keeps its
    exact value; before anything is written, `Unsupported` names the first matrix for which that is impossible.
    The folder appears when it is complete; an existing one is replaced only with `overwrite`.
    `progress(done, total)` counts tensors and matrices.
    """
    if to not in KEPT_FORMATS:
        raise InputError(f"A model can be converted to {', '.join(KEPT_FORMATS)}; found {to!r}.")
    if shard_bytes < 1:
        raise InputError(f"shard_bytes must be positive, found {shard_bytes}.")
    target_path = Path(target).expanduser()
    folder = Path(os.path.realpath(target_path))
    frozen = Config(source).freeze()
    checkpoint = frozen.open_checkpoint()
    source_paths = [Path(os.path.realpath(path)) for path in (frozen.path, *checkpoint.files.paths)]
    check_output_dir(folder, source_paths, overwrite=overwrite)
    plan = make_plan(frozen, checkpoint, to)
    files = side_files(frozen, checkpoint, plan)
    check_disk_space(folder, plan.nbytes + files.nbytes + DISK_SLACK_BYTES, "the new model")
    with atomic_dir(folder, overwrite=overwrite) as temp_dir:
        weights = save_sharded(temp_dir, _iter_tensors(plan.steps, progress), shard_bytes=shard_bytes)
        with report_write_errors(folder):
            files.write_to(temp_dir)
            for path in weights:  # safetensors creates them readable by their owner only
                shutil.copymode(temp_dir / CONFIG_FILE, path)
        _check_result(temp_dir, plan)
    return target_path


def _iter_tensors(steps: Sequence[ConversionStep], progress: ProgressCallback | None) -> Iterator[tuple[str, Tensor]]:
    for done, step in enumerate(steps):
        if progress is not None:
            progress(done, len(steps))
        yield from step.make_tensors()
    if progress is not None:
        progress(len(steps), len(steps))


def _check_result(folder: Path, plan: ConversionPlan) -> None:
    """Read the written folder's headers as a load would, before it is renamed to its final name."""
    frozen = Config(folder).freeze()
    checkpoint = frozen.open_checkpoint()
    for role in plan.actions:
        checkpoint.describe(role)
