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
from ..checkpoint import Checkpoint, GgufCheckpoint, Source, save
from ..config import FrozenConfig
from ..errors import CheckpointError, InputError
from ..model.convert_files import CONFIG, QUANTIZATION, Files, folder_files, gguf_files
from ..model.convert_folder import FolderPlanner
from ..model.convert_gguf import GgufPlanner
from ..model.convert_plan import Plan, vectors
from ..model.new_folder import new_folder, writing

CARD = "README.md"
SLACK = 2**20


class Matrices(Protocol):
    """Where the stored tensors of quantised matrices come from."""

    def __call__(self, role: str) -> Mapping[str, Tensor]:
        """Tensors by the name the model's files give them."""
        ...


def planned(frozen: FrozenConfig, source: Source, roles: Set[str]) -> Plan:
    """What the source holds, as a folder of safetensors would have it; nothing is read yet.

    A head that is not among the roles to be quantised becomes floats: what the source has packed is in a form
    that readers of the new one do not know.
    """
    if isinstance(source, GgufCheckpoint):
        return GgufPlanner(source, frozen.spec, "dense").plan()
    assert isinstance(source, Checkpoint)
    to = "safetensors" if "head" in roles else "dense"
    return FolderPlanner(source, frozen.spec, to, frozen.quantization).plan()


def kept_bytes(plan: Plan, model: spec.Model, roles: Set[str]) -> int:
    """Bytes of what is not quantised, the floats of roles as float16."""
    halved = {vector.role for vector in vectors(model)}
    total = 0
    for step in plan.steps:
        if step.what in roles:
            continue
        if step.what == "embed":
            total += 2 * model.hidden * model.vocab
        else:
            total += step.nbytes if step.what not in halved else step.nbytes // 2
    return total


@contextmanager
def new_model(
    target: Path,
    frozen: FrozenConfig,
    source: Source,
    roles: Set[str],
    matrices: Matrices,
    said: Mapping[str, Any],
    *,
    shard_bytes: int,
    overwrite: bool,
) -> Iterator[Path]:
    """A hidden folder with the whole model in it, which gets its name when the block ends.

    `said` becomes config.json's quantization_config.
    """
    plan = planned(frozen, source, roles)
    with new_folder(target, overwrite=overwrite) as hidden:
        weights = save(hidden, _tensors(plan, frozen.spec, roles, matrices), shard_bytes=shard_bytes)
        with writing(target):
            _files(frozen, source, plan, said).put(hidden)
            for path in weights:
                shutil.copymode(hidden / CONFIG, path)
        yield hidden


def check_space(folder: Path, needed: int) -> None:
    """A disk that is too small is known before the work begins."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: the job takes about {needed / 2**20:,.0f} MiB of disk, and {free / 2**20:,.0f} MiB "
            "are free. Make room, or choose another disk."
        )


def check_kept(plan: Plan, model: spec.Model, roles: Set[str]) -> None:
    """`InputError` names the first tensor that is to be kept and cannot be; better now than at the end."""
    halved = _halved(plan, model, roles)
    for step in plan.steps:
        if step.what in halved:
            for name, tensor in step.make():
                _half(name, tensor)


def _halved(plan: Plan, model: spec.Model, roles: Set[str]) -> set[str]:
    """What is neither quantised nor copied as it is."""
    return {"embed", *(vector.role for vector in vectors(model)), *plan.fates} - set(roles)


def _tensors(
    plan: Plan, model: spec.Model, roles: Set[str], matrices: Matrices
) -> Iterator[tuple[str, Tensor]]:
    halved = _halved(plan, model, roles)
    for step in plan.steps:
        if step.what in roles:
            yield from matrices(step.what).items()
        elif step.what in halved:
            for name, tensor in step.make():
                yield name, _half(name, tensor)
        else:
            yield from step.make()
    if "head" in roles and all(step.what != "head" for step in plan.steps):
        yield from matrices("head").items()  # of a model whose head was its embedding


def _half(name: str, tensor: Tensor) -> Tensor:
    """The float16 that readers expect."""
    if not tensor.is_floating_point():
        return tensor
    half = tensor.half()
    if not bool(torch.isfinite(half).all()):
        if bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} holds numbers that float16 cannot: this model cannot be stored in it.")
        raise InputError(f"{name} of the source holds NaN or infinity. Download the model again.")
    return half


def _files(frozen: FrozenConfig, source: Source, plan: Plan, said: Mapping[str, Any]) -> Files:
    if isinstance(source, GgufCheckpoint):
        files = gguf_files(source.files, source.has("head"))
    else:
        files = folder_files(frozen.path, plan, frozen.quantization)
    config = json.loads(files.written[CONFIG])
    config["quantization_config"] = dict(said)
    written = {**files.written, CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}
    copied = {name: path for name, path in files.copied.items() if name not in QUANTIZATION}
    if CARD in copied:
        copied["README-source.md"] = copied.pop(CARD)
    return Files(written, copied)
