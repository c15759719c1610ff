"""The new model's folder: quantised matrices, everything else as in the source, and config.json.

It is written under a hidden name and renamed when it is complete; the caller gives the quantised tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import spec
from ..atomic import atomic_dir, report_write_errors
from ..checkpoint import GgufCheckpoint, SafetensorsCheckpoint, WeightSource, save_sharded
from ..config import FrozenConfig
from ..convert.plan import ConversionPlan, vector_specs
from ..convert.planners import FolderPlanner, GgufPlanner
from ..convert.side_files import (
    CONFIG_FILE,
    QUANTIZATION_FILES,
    SideFiles,
    side_files_of_folder,
    side_files_of_gguf,
)
from ..errors import CheckpointError, InputError

CARD = "README.md"
"""Where the model's card goes; a card of the source is kept as README-source.md."""


class StoredTensors(Protocol):
    """Gives the stored tensors of a quantised matrix."""

    def __call__(self, role: str) -> Mapping[str, Tensor]:
        """Tensors by their names in the new model's files."""
        ...


def conversion_plan(frozen: FrozenConfig, source: WeightSource, roles: Set[str]) -> ConversionPlan:
    """How the source becomes a folder of safetensors, with `roles` to be replaced; no tensor is read yet.

    A head that is not in `roles` is dequantised: readers of the new format may not know the source's.
    """
    if isinstance(source, GgufCheckpoint):
        return GgufPlanner(source, frozen.spec, "dense").plan()
    assert isinstance(source, SafetensorsCheckpoint)
    to = "safetensors" if "head" in roles else "dense"
    return FolderPlanner(source, frozen.spec, to, frozen.quantization).plan()


def unquantized_bytes(plan: ConversionPlan, model: spec.Model, roles: Set[str]) -> int:
    """Bytes of everything that is not quantised: embedding and norms in float16, the rest as it is."""
    vectors = {vector.role for vector in vector_specs(model)}
    total = 0
    for step in plan.steps:
        if step.label in roles:
            continue
        if step.label == "embed":
            total += 2 * model.hidden * model.vocab
        else:
            total += step.nbytes if step.label not in vectors else step.nbytes // 2
    return total


@contextmanager
def write_model(
    target: Path,
    frozen: FrozenConfig,
    source: WeightSource,
    roles: Set[str],
    matrices: StoredTensors,
    quantization_config: Mapping[str, Any],
    *,
    shard_bytes: int,
    overwrite: bool,
) -> Iterator[Path]:
    """Write the model to a hidden folder, which gets its name when the block ends without an error.

    `matrices` gives the tensors of the quantised `roles`; `quantization_config` is config.json's section.
    """
    plan = conversion_plan(frozen, source, roles)
    with atomic_dir(target, overwrite=overwrite) as hidden:
        weights = save_sharded(
            hidden, _model_tensors(plan, frozen.spec, roles, matrices), shard_bytes=shard_bytes
        )
        with report_write_errors(target):
            _side_files(frozen, source, plan, quantization_config).write_to(hidden)
            for path in weights:
                shutil.copymode(hidden / CONFIG_FILE, path)
        yield hidden


def check_disk_space(folder: Path, needed: int) -> None:
    """`CheckpointError` if the disk has fewer than `needed` bytes free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: the job needs about {needed / 2**20:,.0f} MiB of disk, and {free / 2**20:,.0f} MiB "
            "are free. Make room, or choose another disk."
        )


def check_float16_range(plan: ConversionPlan, model: spec.Model, roles: Set[str]) -> None:
    """`InputError` names the first unquantised tensor that float16 cannot hold, before hours of work."""
    labels = _float16_labels(plan, model, roles)
    for step in plan.steps:
        if step.label in labels:
            for name, tensor in step.make_tensors():
                _to_float16(name, tensor)


def _float16_labels(plan: ConversionPlan, model: spec.Model, roles: Set[str]) -> set[str]:
    """The labels of the plan whose tensors are converted to float16."""
    return {"embed", *(vector.role for vector in vector_specs(model)), *plan.actions} - set(roles)


def _model_tensors(
    plan: ConversionPlan, model: spec.Model, roles: Set[str], matrices: StoredTensors
) -> Iterator[tuple[str, Tensor]]:
    labels = _float16_labels(plan, model, roles)
    for step in plan.steps:
        if step.label in roles:
            yield from matrices(step.label).items()
        elif step.label in labels:
            for name, tensor in step.make_tensors():
                yield name, _to_float16(name, tensor)
        else:
            yield from step.make_tensors()
    if "head" in roles and all(step.label != "head" for step in plan.steps):
        yield from matrices("head").items()  # the source ties it to the embedding


def _to_float16(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    half = tensor.half()
    if not bool(torch.isfinite(half).all()):
        if bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"{name} holds numbers that float16 cannot: the model cannot be stored in float16."
            )
        raise InputError(f"{name} of the source holds NaN or infinity. Download the model again.")
    return half


def _side_files(
    frozen: FrozenConfig, source: WeightSource, plan: ConversionPlan, quantization_config: Mapping[str, Any]
) -> SideFiles:
    if isinstance(source, GgufCheckpoint):
        files = side_files_of_gguf(source.files, source.has("head"))
    else:
        files = side_files_of_folder(frozen.path, plan, frozen.quantization)
    config = json.loads(files.written[CONFIG_FILE])
    config["quantization_config"] = dict(quantization_config)
    written = {
        **files.written,
        CONFIG_FILE: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    copied = {name: path for name, path in files.copied.items() if name not in QUANTIZATION_FILES}
    if CARD in copied:
        copied["README-source.md"] = copied.pop(CARD)
    return SideFiles(written, copied)
