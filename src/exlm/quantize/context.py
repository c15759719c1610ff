"""`QuantContext`: what every step of a quantisation needs, and the facts that tell one job from another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import spec
from ..checkpoint import WeightSource
from ..checkpoint.tensor_index import tensor_key
from ..config import Config, FrozenConfig
from ..convert.plan import ConversionPlan
from ..errors import Unsupported
from ..formats import PackedWeight, exl2
from ..formats import gptq as gptq_format
from ..formats.host_buffers import trim_heap
from ..spec.weight_roles import Matrix, matrices
from .allocation import HEAD_RECIPES, quantized_matrices
from .config import QuantConfig
from .layer_loader import LayerLoader
from .output import conversion_plan, unquantized_bytes
from .step_store import StepStore

Progress = Callable[[int, int, str], object]
"""(units done, units in all, what is being done)."""


@dataclass
class QuantContext:
    """The source, the configuration, the step store and the progress of one job."""

    model_config: Config
    frozen: FrozenConfig
    source: WeightSource
    loader: LayerLoader
    store: StepStore
    config: QuantConfig
    progress: Progress
    done: int = 0
    total: int = 1

    @property
    def model(self) -> spec.Model:
        """The source model."""
        return self.frozen.spec

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.model.layers)

    @property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices to quantise, by role; the head only for EXL2."""
        found = {m.role: m for m in quantized_matrices(self.model)}
        if self.config.method == "exl2":
            found["head"] = next(m for m in matrices(self.model) if m.role == "head")
        return found

    @property
    def num_weights(self) -> int:
        """The weights that bits are allocated to."""
        return sum(m.in_features * m.out_features for m in quantized_matrices(self.model))

    @property
    def plan(self) -> ConversionPlan:
        """How everything in the source gets into the new folder."""
        return conversion_plan(self.frozen, self.source, self.matrices.keys())

    @property
    def fixed_bits(self) -> int:
        """The bits of everything that none are allocated to: the head, and what is not quantised."""
        head = HEAD_RECIPES[self.config.head_bits].bits(self.matrices["head"])
        return head + 8 * unquantized_bytes(self.plan, self.model, self.matrices.keys())

    def advance(self, units: int, what: str) -> None:
        """Report so many more units of progress, and return freed memory to the system."""
        trim_heap()
        self.done += units
        self.progress(min(self.done, self.total), self.total, what)

    def file_tensors(self, role: str, weight: PackedWeight) -> dict[str, Tensor]:
        """A quantised matrix's tensors by their names in the new model."""
        location = self.model.names.locations_of(role)[0]
        tensors = exl2.write(weight) if self.config.method == "exl2" else gptq_format.write(weight)
        return {tensor_key(location, suffix): tensor for suffix, tensor in tensors.items()}


def check_shapes(wanted: Mapping[str, Matrix], method: str) -> None:
    """`Unsupported` names the first matrix whose shape the format cannot store."""
    for role, m in wanted.items():
        unit = exl2.ALIGNMENT if method == "exl2" else 8
        if m.in_features % unit:
            raise Unsupported(
                f"{role} has {m.in_features} inputs, and {method.upper()} stores multiples of {unit} only."
            )
        if method == "gptq" and m.out_features % unit:
            raise Unsupported(
                f"{role} has {m.out_features} outputs, and GPTQ stores multiples of {unit} only."
            )


def job_facts(
    config: QuantConfig,
    frozen: FrozenConfig,
    source: WeightSource,
    measurement: str | None,
    device: torch.device,
) -> dict[str, Any]:
    """What job.json records; an unfinished job continues only if all of it is the same.

    `measurement` is the digest of a measurement that was given.
    """
    files = {}
    for path in source.files.paths:
        stat = path.stat()
        files[str(path)] = [stat.st_size, stat.st_mtime_ns]
    return {
        **config.fingerprint(),
        "source": files,
        "config.json": _digest(frozen.path / "config.json"),
        "calibration text": _digest(Path(config.calibration).expanduser()),
        "measurement": measurement,
        "device": device.type,
    }


def _digest(file: Path) -> str | None:
    """The SHA-256 of a file; None if it cannot be read, which the step that needs it reports."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return None
