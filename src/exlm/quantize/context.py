"""One quantisation under way: what it was asked, what it reads, where it keeps its steps.

`pipeline` says which steps there are; here are the things every step needs.
"""

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
from ..checkpoint.tensor_index import key_at
from ..config import Config, FrozenConfig
from ..convert.plan import ConversionPlan
from ..errors import Unsupported
from ..formats import PackedWeight, exl2
from ..formats import gptq as gptq_format
from ..formats.host_buffers import trim_heap
from ..nn import Batch
from ..spec.weight_roles import Matrix, matrices
from ..tokenizer import Tokenizer
from . import calibration as calibrate
from .config import QuantConfig
from .layer_loader import LayerLoader, make_batch
from .measurement import quantized_matrices
from .memory import PASS_TOKENS
from .output import conversion_plan
from .step_store import StepStore

Progress = Callable[[int, int, str], object]
"""(units done, units in all, what is being done)."""

MAX_SAMPLING_BYTES = 2 * 10**9
"""Bytes up to which a model may be loaded whole, to write some of its calibration text itself."""

DEFAULT_ROWS, MIN_CPU_ROWS, CPU_WEIGHT_ROWS = 128, 48, 86 * 10**8
"""Rows that are usual, and on a processor: the fewest, and as many as times the weights make this."""

SAMPLING_WEIGHT_ROWS = 22 * 10**8
"""Rows it may then write, times its weights: writing is slow where weights are many."""


@dataclass
class QuantContext:
    """A job and everything it works on."""

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
        """What is quantised."""
        return self.frozen.spec

    @property
    def depth(self) -> int:
        """Layers."""
        return len(self.model.layers)

    @property
    def matrices(self) -> dict[str, Matrix]:
        """By role, those that are quantised; the head only where the format has one."""
        found = {m.role: m for m in quantized_matrices(self.model)}
        if self.config.method == "exl2":
            found["head"] = next(m for m in matrices(self.model) if m.role == "head")
        return found

    @property
    def plan(self) -> ConversionPlan:
        """What becomes of everything the source holds."""
        return conversion_plan(self.frozen, self.source, self.matrices.keys())

    def advance(self, units: int, what: str) -> None:
        """Tell that so many units are done; what the C library kept of them goes back to the system."""
        trim_heap()
        self.done += units
        self.progress(min(self.done, self.total), self.total, what)

    def calibration_ids(self) -> Tensor:
        """(rows, length) the ids everything is calibrated with, made once."""
        if not self.store.has("ids"):
            self.store.save("ids", {"ids": make_calibration_ids(self.model_config, self.config, self.loader)})
        return self.store.load("ids")["ids"]

    def batches(self) -> list[Batch]:
        """The calibration as forward passes."""
        ids = self.calibration_ids()
        at_once = max(1, PASS_TOKENS // ids.shape[1])
        device = self.loader.backends.device
        return [make_batch(ids[a : a + at_once].to(device)) for a in range(0, len(ids), at_once)]

    def file_tensors(self, role: str, weight: PackedWeight) -> dict[str, Tensor]:
        """A matrix's tensors by their names in the new model."""
        place = self.model.names.locations_of(role)[0]
        tensors = exl2.write(weight) if self.config.method == "exl2" else gptq_format.write(weight)
        return {key_at(place, suffix): tensor for suffix, tensor in tensors.items()}


def check_shapes(wanted: Mapping[str, Matrix], method: str) -> None:
    """`Unsupported` names the first matrix the format cannot hold."""
    for role, m in wanted.items():
        unit = exl2.ALIGNMENT if method == "exl2" else 8
        if m.in_features % unit:
            raise Unsupported(
                f"{role} has {m.in_features} inputs, and {method.upper()} holds multiples of {unit} only."
            )
        if method == "gptq" and m.out_features % unit:
            raise Unsupported(
                f"{role} has {m.out_features} outputs, and GPTQ holds multiples of {unit} only."
            )


def default_rows(model: spec.Model, device: torch.device) -> int:
    """Rows of calibration where nobody says how many: on a processor reading is what takes long."""
    if device.type != "cpu":
        return DEFAULT_ROWS
    weights = sum(m.in_features * m.out_features for m in matrices(model))
    return max(MIN_CPU_ROWS, min(DEFAULT_ROWS, CPU_WEIGHT_ROWS // weights))


def num_sampled_rows(model: spec.Model, wishes: QuantConfig) -> int:
    """Rows the model may write itself, in the place of as many of the built-in text."""
    weights = sum(m.in_features * m.out_features for m in matrices(model))
    return (
        SAMPLING_WEIGHT_ROWS // weights
        if wishes.calibration == "builtin" and 4 * weights <= MAX_SAMPLING_BYTES
        else 0
    )


def make_calibration_ids(config: Config, wishes: QuantConfig, shop: LayerLoader) -> Tensor:
    tokenizer = Tokenizer(config)
    length = min(wishes.length, config.max_seq_len)
    if wishes.calibration != "builtin":
        found = calibrate.read_documents(Path(wishes.calibration).expanduser())
        text = calibrate.pack_rows(found, tokenizer, wishes.rows, length, wishes.calibration)
        text = calibrate.check_vocab(text, config)
        return calibrate.prepend_bos(text, config, tokenizer)
    own = min(num_sampled_rows(config.spec, wishes), wishes.rows * 3 // 4)
    text = calibrate.check_vocab(calibrate.builtin_rows(tokenizer, wishes.rows - own, length), config)
    text = calibrate.prepend_bos(text, config, tokenizer)
    if not own:
        return text
    piece = min(calibrate.SAMPLE_LENGTH, length)
    starts = calibrate.sample_prompts(text, -(-own * length // piece), tokenizer.bos_token_id)
    banned = [i for i in tokenizer.eos_token_ids if 0 <= i < config.vocab_size]
    ids = calibrate.sample_rows(shop, starts, piece, banned, wishes.seed).flatten()
    return torch.cat((text, ids[: own * length].view(own, length)))


def job_facts(
    wishes: QuantConfig,
    frozen: FrozenConfig,
    source: WeightSource,
    measurement: str | None,
    device: torch.device,
) -> dict[str, Any]:
    """What must be the same for a job to go on."""
    files = {}
    for path in source.files.paths:
        seen = path.stat()
        files[str(path)] = [seen.st_size, seen.st_mtime_ns]
    return {
        **wishes.fingerprint(),
        "source": files,
        "config.json": _digest(frozen.path / "config.json"),
        "calibration text": _digest(Path(wishes.calibration).expanduser()),
        "measurement": measurement,
        "device": device.type,
    }


def _digest(file: Path) -> str | None:
    """What tells a file's content from others; None where there is no file: who needs it will say so."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return None
