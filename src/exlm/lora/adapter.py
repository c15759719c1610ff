"""`Lora`, an adapter installed in a loaded model, and the modules that apply adapters to rows of a batch.

Installing an adapter replaces each module it changes by one that adds low-rank products for the rows that
name an adapter in `batch.adapters`. Each row's product is computed separately, so it does not depend on the
other rows. Removing the last adapter of a module restores the original, so a model without adapters has
only its own modules. `InstallLora` and `RemoveLora` are data and callables, so that a tensor-parallel model
can send each rank its shard.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import spec
from ..errors import CheckpointError, InputError, NotLoaded, UnsafeFile
from ..kernels.interface import LinearFn, MoeFn
from ..kernels.reference import ReferenceBackend
from ..memory import memory_errors
from ..nn import Batch, Embedding, Expert, Experts, Linear, LoraRef
from .peft_files import LoraWeights, PeftConfig, PeftReader

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

_adapter_ids = itertools.count(1)

LoraWeightsById = dict[int, LoraWeights]
"""Adapter id → its weights for one matrix."""


def _active_weights(lora_weights: LoraWeightsById, batch: Batch) -> Iterator[tuple[int, LoraWeights, float]]:
    """Each row with the weights of each adapter that it names, and the scale."""
    for row, active in enumerate(batch.adapters):
        for adapter, scale in active:
            if (weights := lora_weights.get(adapter)) is not None:
                yield row, weights, scale


class LoraLinear(Linear):
    """A linear layer with the weights of adapters."""

    def __init__(self, inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, inner.out_features)
        self.inner = inner
        self.lora_weights: LoraWeightsById = {}

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """The inner layer's output, with the adapters of each row added."""
        y = self.inner.forward(x, batch)
        for row, weights, scale in _active_weights(self.lora_weights, batch):
            y[row] += weights(x[row], scale)
        return y


class LoraEmbedding(Embedding):
    """An embedding with the weights of adapters."""

    def __init__(self, inner: Embedding) -> None:
        super().__init__(inner.lookup, inner.vocab, inner.positions, inner.scale, inner.dtype)
        self.inner = inner
        self.lora_weights: LoraWeightsById = {}

    def table_rows(self, batch: Batch) -> Tensor:
        """The inner embedding's vectors, with the adapters of each row added."""
        x = self.inner.table_rows(batch)
        for row, weights, scale in _active_weights(self.lora_weights, batch):
            x[row] += weights.lookup(batch.ids[row].clamp(0, self.vocab - 1), scale)
        return x


ExpertsKernelFactory = Callable[[list[LinearFn], list[LinearFn], list[LinearFn], Tensor | None], MoeFn]
"""The gate (none for experts without), up and down matrices of every expert, and the selection bias → a kernel that
runs them."""


class LoraExperts(Experts):
    """The experts of a layer with the weights of adapters on some of their matrices.

    Rows without adapters go through the inner kernel together. For each other row a kernel of adapted
    matrices is built.
    """

    def __init__(self, inner: Experts, make_kernel: ExpertsKernelFactory) -> None:
        super().__init__(inner.kernel, inner.experts, inner.selection_bias)
        self.inner = inner
        self.make_kernel = make_kernel
        # adapter id → (expert, matrix name) → weights
        self.lora_weights: dict[int, dict[tuple[int, str], LoraWeights]] = {}

    def forward(self, x: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """The inner experts' output; rows with adapters go through adapted experts instead."""
        active_by_row = [
            tuple(one for one in active if one.adapter_id in self.lora_weights) for active in batch.adapters
        ]
        if not any(active_by_row):
            return self.inner.forward(x, logits, batch)
        out = torch.empty_like(x)
        if base_rows := [row for row, active in enumerate(active_by_row) if not active]:
            out[base_rows] = self.inner.forward(x[base_rows], logits[base_rows], batch)
        for row, active in enumerate(active_by_row):
            if active:
                gate, up, down = (self._adapted_matrices(name, active) for name in Expert._fields)
                kernel = self.make_kernel(gate, up, down, self.selection_bias)
                out[row] = kernel(x[row : row + 1], logits[row : row + 1])[0]
        return out

    def _adapted_matrices(self, name: str, active: Iterable[LoraRef]) -> list[LinearFn]:
        """The gate, up or down matrix of every expert that has one, with these adapters added."""
        out: list[LinearFn] = []
        for index, expert in enumerate(self.experts):
            linear: Linear | None = getattr(expert, name)
            if linear is None:
                continue
            found = [(self.lora_weights[adapter].get((index, name)), scale) for adapter, scale in active]
            weights = [(one, scale) for one, scale in found if one is not None]
            out.append(partial(_add_lora, linear.kernel, weights) if weights else linear.kernel)
        return out


def _add_lora(kernel: LinearFn, weights: Iterable[tuple[LoraWeights, float]], x: Tensor) -> Tensor:
    y = kernel(x)
    for one, scale in weights:
        y = y + one(x, scale)
    return y


EXPERT_MATRIX = re.compile(r"(layers\.(\d+)\.mlp\.experts)\.(\d+)\.(\w+)")


@dataclass(frozen=True, eq=False)
class InstallLora:
    """Adds an adapter's weights to the matrix of a role; a callable from module to adapted module."""

    adapter_id: int
    role: str
    weights: LoraWeights
    moe: spec.Moe | None = None  # of the layer, for a matrix of an expert

    @classmethod
    def for_model(cls, model: spec.Model, adapter_id: int, role: str, weights: LoraWeights) -> InstallLora:
        """The change for one matrix of a model."""
        found = EXPERT_MATRIX.fullmatch(role)
        mlp = model.layers[int(found[2])].mlp if found else None
        return cls(adapter_id, role, weights, mlp if isinstance(mlp, spec.Moe) else None)

    @property
    def module_role(self) -> str:
        return module_role_of(self.role)

    def to(self, device: torch.device) -> InstallLora:
        return replace(self, weights=LoraWeights(*(tensor.to(device) for tensor in self.weights)))

    def __call__(self, inner: Any) -> Any:
        """The adapted module of `inner`, which may be adapted already."""
        if (found := EXPERT_MATRIX.fullmatch(self.role)) and self.moe is not None:
            adapted = inner
            if not isinstance(inner, LoraExperts):
                backend = ReferenceBackend(self.weights.up.device, self.weights.up.dtype)
                adapted = LoraExperts(inner, partial(backend.moe, self.moe))
            adapted.lora_weights.setdefault(self.adapter_id, {})[int(found[3]), found[4]] = self.weights
            return adapted
        wrapper = LoraEmbedding if self.role == "embed" else LoraLinear
        adapted = inner if isinstance(inner, wrapper) else wrapper(inner)
        adapted.lora_weights[self.adapter_id] = self.weights
        return adapted


@dataclass(frozen=True)
class RemoveLora:
    """Removes an adapter's weights from the module of a role; a callable from module to module."""

    adapter_id: int
    role: str

    @property
    def module_role(self) -> str:
        return self.role

    def to(self, device: torch.device) -> RemoveLora:
        return self

    def __call__(self, adapted: Any) -> Any:
        """The module without this adapter; the inner module, if it was the last one."""
        del adapted.lora_weights[self.adapter_id]
        return adapted if adapted.lora_weights else adapted.inner


ModuleChange = InstallLora | RemoveLora


def module_role_of(role: str) -> str:
    """The role of the module that is replaced for a role: all experts of a layer are one module."""
    found = EXPERT_MATRIX.fullmatch(role)
    return found[1] if found else role


class AdaptableModules(Protocol):
    """The modules of a loaded model, in one process or several."""

    def replace(self, role: str, change: ModuleChange) -> None: ...


class ModelHandle(NamedTuple):
    """The parts of a loaded model that installing an adapter needs."""

    modules: AdaptableModules
    spec: spec.Model  # of the whole model, also with tensor or pipeline parallelism
    device: Callable[[str], torch.device]  # by role: the device of the module's weights
    dtype: torch.dtype


class AdaptableModel(Protocol):
    """A model that adapters can be installed in."""

    def model_handle(self) -> ModelHandle: ...


class Lora:
    """A PEFT adapter in a loaded model.

    It changes only the rows that name it (`loras=` of a job or a call). A `strength` of 1 applies it as it
    was trained; the strength may be changed between jobs. Several adapters may be installed at once, and be
    installed and removed between steps. `unload()`, or unloading the model, removes it.
    """

    def __init__(
        self,
        model: AdaptableModel,
        lora_config_path: str | os.PathLike[str],
        lora_path: str | os.PathLike[str],
        lora_scaling: float = 1.0,
    ) -> None:
        """Read the adapter's two files, check them against the model, and install it.

        `lora_scaling` is its strength; the attribute of that name is the strength times alpha / r.
        """
        if not hasattr(model, "model_handle"):
            raise InputError(f"An adapter goes into a Model, found {type(model).__name__}: of an LLM, into llm.model.")
        handle = model.model_handle()
        self.model = model
        self.lora_config_path, self.lora_path = str(lora_config_path), str(lora_path)
        self._strength = _checked_strength(lora_scaling)
        config_path, weights_path = (Path(os.path.expanduser(path)) for path in (lora_config_path, lora_path))
        config = PeftConfig.read(config_path)
        self.lora_r, self.lora_alpha, self._scaling = config.r, config.alpha, config.default_scaling
        if weights_path.suffix in (".bin", ".pt", ".pth"):
            raise _pickle_error(weights_path)
        reader = PeftReader(weights_path, config, handle.spec, handle.device, handle.dtype)
        with memory_errors(lambda: f"{weights_path}: the adapter could not be loaded"):
            weights_by_role = reader.read()
        self.number = next(_adapter_ids)  # its id in `LoraRef` and in the hash of cached pages
        self.roles = tuple(weights_by_role)
        self._modules: weakref.ref[AdaptableModules] | None = weakref.ref(handle.modules)
        for role, weights in weights_by_role.items():
            change = InstallLora.for_model(handle.spec, self.number, role, weights)
            handle.modules.replace(change.module_role, change)

    @classmethod
    def from_directory(
        cls, model: AdaptableModel, directory: str | os.PathLike[str], lora_scaling: float = 1.0
    ) -> Lora:
        """The adapter in a folder: adapter_config.json and adapter_model.safetensors."""
        folder = Path(os.path.expanduser(directory))
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"No LoRA found in {folder}: expected {CONFIG} and {WEIGHTS}.")
        if not (folder / WEIGHTS).is_file():
            if (folder / PICKLE).is_file():
                raise _pickle_error(folder / PICKLE)
            raise CheckpointError(f"No LoRA found in {folder}: {CONFIG} is there, {WEIGHTS} is not.")
        return cls(model, folder / CONFIG, folder / WEIGHTS, lora_scaling)

    def __repr__(self) -> str:
        """The file and the strength."""
        return f"Lora({self.lora_path!r}, lora_scaling={self.strength:g})"

    @property
    def strength(self) -> float:
        """The factor on its changes; 1 is as it was trained."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._strength = _checked_strength(value)

    @property
    def lora_scaling(self) -> float:
        """The strength times alpha / r (rsLoRA: alpha / √r), as in exllamav2."""
        return self._strength * self._scaling

    @lora_scaling.setter
    def lora_scaling(self, value: float) -> None:
        if value != self.lora_scaling:  # assigning the present value must not change a bit of the strength
            self._strength = _checked_strength(value) / self._scaling

    @property
    def loaded(self) -> bool:
        """Whether it can be used: false after it or the model was unloaded."""
        return self._modules is not None and self._modules() is not None

    def installed(self, modules: object) -> bool:
        """Whether it is installed in these modules."""
        return self._modules is not None and self._modules() is modules

    def unload(self) -> None:
        """Remove it from the model; does nothing if it, or the model, is unloaded already."""
        modules = self._modules() if self._modules is not None else None
        self._modules = None
        if modules is not None:
            for role in dict.fromkeys(map(module_role_of, self.roles)):
                modules.replace(role, RemoveLora(self.number, role))


def resolve_loras(modules: object, loras: Any) -> list[tuple[Lora, float]]:
    """The adapters and strengths of a `loras` argument: None, an adapter, or a list of adapters.

    A pair (adapter, strength) overrides the adapter's own `strength`.
    """
    if loras is None:
        return []
    is_pair = isinstance(loras, list | tuple) and len(loras) == 2 and isinstance(loras[1], int | float)
    is_list = isinstance(loras, list | tuple) and not is_pair
    out = []
    for entry in loras if is_list else [loras]:
        lora, strength = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        if not isinstance(lora, Lora):
            raise InputError(f"loras must be adapters (exlm.Lora), found {type(lora).__name__}.")
        if not lora.installed(modules):
            raise NotLoaded(f"{lora!r} is not installed in this model: load it again, Lora.from_directory(…).")
        out.append((lora, lora.strength if strength is None else _checked_strength(strength)))
    return out


def active_loras(modules: object, loras: Any) -> tuple[LoraRef, ...]:
    """The adapters of a `loras` argument as references for a row of a batch."""
    return tuple(LoraRef(lora.number, strength) for lora, strength in resolve_loras(modules, loras))


def _checked_strength(value: Any) -> float:
    """A strength or scaling as float; InputError unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"An adapter's scaling must be a finite number, found {value!r}.")
    return float(value)


def _pickle_error(path: Path) -> UnsafeFile:
    folder = os.path.abspath(path.parent)
    return UnsafeFile(
        f"{path} is a pickle, which can run code when it is opened; exlm reads {WEIGHTS} only. If you trust "
        f'it, convert it:\npython -c "import torch; from safetensors.torch import save_file as s; '
        f's(torch.load({str(path)!r}, weights_only=True), {os.path.join(folder, WEIGHTS)!r})"'
    )
