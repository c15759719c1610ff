"""The new model's folder: quantised matrices, everything else as the source has it, config.json and a card.

The folder appears under its name when it is complete. Where the quantised matrices come from is not known
here.
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
from ..checkpoint import GgufCheckpoint, SafetensorsCheckpoint, WeightSource, save
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
SLACK = 2**20


class StoredTensors(Protocol):
    """Where the stored tensors of quantised matrices come from."""

    def __call__(self, role: str) -> Mapping[str, Tensor]:
        """Tensors by the name the model's files give them."""
        ...


def conversion_plan(frozen: FrozenConfig, source: WeightSource, roles: Set[str]) -> ConversionPlan:
    """What the source holds, as a folder of safetensors would have it; nothing is read yet.

    A head that is not among the roles to be quantised becomes floats: what the source has packed is in a form
    that readers of the new one do not know.
    """
    if isinstance(source, GgufCheckpoint):
        return GgufPlanner(source, frozen.spec, "dense").plan()
    assert isinstance(source, SafetensorsCheckpoint)
    to = "safetensors" if "head" in roles else "dense"
    return FolderPlanner(source, frozen.spec, to, frozen.quantization).plan()


def unquantized_bytes(plan: ConversionPlan, model: spec.Model, roles: Set[str]) -> int:
    """Bytes of what is not quantised, the floats of roles as float16."""
    halved = {vector.role for vector in vector_specs(model)}
    total = 0
    for step in plan.steps:
        if step.label in roles:
            continue
        if step.label == "embed":
            total += 2 * model.hidden * model.vocab
        else:
            total += step.nbytes if step.label not in halved else step.nbytes // 2
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
    """A hidden folder with the whole model in it, which gets its name when the block ends.

    `said` becomes config.json's quantization_config.
    """
    plan = conversion_plan(frozen, source, roles)
    with atomic_dir(target, overwrite=overwrite) as hidden:
        weights = save(hidden, _model_tensors(plan, frozen.spec, roles, matrices), shard_bytes=shard_bytes)
        with report_write_errors(target):
            _side_files(frozen, source, plan, quantization_config).write_to(hidden)
            for path in weights:
                shutil.copymode(hidden / CONFIG_FILE, path)
        yield hidden


def check_disk_space(folder: Path, needed: int) -> None:
    """A disk that is too small is known before the work begins."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: the job takes about {needed / 2**20:,.0f} MiB of disk, and {free / 2**20:,.0f} MiB "
            "are free. Make room, or choose another disk."
        )


def check_float16_range(plan: ConversionPlan, model: spec.Model, roles: Set[str]) -> None:
    """`InputError` names the first tensor that is to be kept and cannot be; better now than at the end."""
    halved = _float16_labels(plan, model, roles)
    for step in plan.steps:
        if step.label in halved:
            for name, tensor in step.make_tensors():
                _to_float16(name, tensor)


def _float16_labels(plan: ConversionPlan, model: spec.Model, roles: Set[str]) -> set[str]:
    """What is neither quantised nor copied as it is."""
    return {"embed", *(vector.role for vector in vector_specs(model)), *plan.actions} - set(roles)


def _model_tensors(
    plan: ConversionPlan, model: spec.Model, roles: Set[str], matrices: StoredTensors
) -> Iterator[tuple[str, Tensor]]:
    halved = _float16_labels(plan, model, roles)
    for step in plan.steps:
        if step.label in roles:
            yield from matrices(step.label).items()
        elif step.label in halved:
            for name, tensor in step.make_tensors():
                yield name, _to_float16(name, tensor)
        else:
            yield from step.make_tensors()
    if "head" in roles and all(step.label != "head" for step in plan.steps):
        yield from matrices("head").items()  # of a model whose head was its embedding


def _to_float16(name: str, tensor: Tensor) -> Tensor:
    """The float16 that readers expect."""
    if not tensor.is_floating_point():
        return tensor
    half = tensor.half()
    if not bool(torch.isfinite(half).all()):
        if bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} holds numbers that float16 cannot: this model cannot be stored in it.")
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
