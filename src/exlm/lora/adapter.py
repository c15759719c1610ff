"""A LoRA adapter: what users hold. It is installed in a loaded model and used by those who name it.

Installing puts an adapted module in the place of each module it touches; the last adapter that leaves puts
the module itself back. A model without adapters contains nothing of this.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from .. import spec
from ..errors import CheckpointError, InputError, NotLoaded, UnsafeFile
from ..memory import memory_errors
from ..nn import LoraRef
from .apply import InstallLora, ModuleChange, RemoveLora, module_role_of
from .peft_files import PeftConfig, PeftReader

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

_adapter_ids = itertools.count(1)


class AdaptableModules(Protocol):
    """Modules in their places, wherever those are."""

    def replace(self, role: str, change: ModuleChange) -> None:
        """Put what `change` makes of a role's module in its place."""
        ...


class ModelHandle(NamedTuple):
    """A loaded model, laid open."""

    modules: AdaptableModules
    spec: spec.Model  # the whole, also where this process has a part of it
    device: Callable[[str], torch.device]  # where a role's module takes its numbers
    dtype: torch.dtype


class AdaptableModel(Protocol):
    """What an adapter must know of a model."""

    def model_handle(self) -> ModelHandle:
        """Its modules, description, devices and precision; NotLoaded if it has none."""
        ...


class Lora:
    """A PEFT adapter in a loaded model.

    It changes only the rows that name it (`loras=` of a job or a call), with a `strength` of 1 as it was
    trained, which may be changed between jobs. Any number of adapters may be installed at once, and come and
    go between steps. It is gone when `unload()` is called or the model is unloaded.
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
            raise InputError(
                f"An adapter goes into a Model, found {type(model).__name__}: of an LLM, into llm.model."
            )
        handle = model.model_handle()
        self.model = model
        self.lora_config_path, self.lora_path = str(lora_config_path), str(lora_path)
        self._strength = checked_scale(lora_scaling)
        config_path, weights_path = (Path(os.path.expanduser(path)) for path in (lora_config_path, lora_path))
        config = PeftConfig.read(config_path)
        self.lora_r, self.lora_alpha, self._scaling = config.r, config.alpha, config.default_scaling
        if weights_path.suffix in (".bin", ".pt", ".pth"):
            raise _pickle_error(weights_path)
        reader = PeftReader(weights_path, config, handle.spec, handle.device, handle.dtype)
        with memory_errors(lambda: f"{weights_path}: the adapter could not be loaded"):
            weights_by_role = reader.read()
        self.number = next(_adapter_ids)
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
        """Which file, and how strongly."""
        return f"Lora({self.lora_path!r}, lora_scaling={self.strength:g})"

    @property
    def strength(self) -> float:
        """What its changes are multiplied by; 1 is as it was trained."""
        return self._strength

    @strength.setter
    def strength(self, wanted: float) -> None:
        self._strength = checked_scale(wanted)

    @property
    def lora_scaling(self) -> float:
        """The strength times alpha / r (rsLoRA: alpha / √r), as the archived library has it."""
        return self._strength * self._scaling

    @lora_scaling.setter
    def lora_scaling(self, wanted: float) -> None:
        if wanted != self.lora_scaling:  # assigning what it is changes no bit
            self._strength = checked_scale(wanted) / self._scaling

    @property
    def loaded(self) -> bool:
        """Whether it can be used: false once it, or the model, was unloaded."""
        return self._modules is not None and self._modules() is not None

    def installed(self, net: object) -> bool:
        """Whether it is in these modules."""
        return self._modules is not None and self._modules() is net

    def unload(self) -> None:
        """Take it out of the model; harmless the second time, or when the model is gone."""
        modules = self._modules() if self._modules is not None else None
        self._modules = None
        if modules is not None:
            for role in dict.fromkeys(map(module_role_of, self.roles)):
                modules.replace(role, RemoveLora(self.number, role))


def resolve_loras(modules: object, loras: Any) -> list[tuple[Lora, float]]:
    """What is asked for as `loras`, None, an adapter, or a list of them: adapters and their strengths.

    Each may come with a strength of its own, as a pair (adapter, strength), instead of its `strength`.
    """
    if loras is None:
        return []
    several = isinstance(loras, list | tuple) and not (len(loras) == 2 and isinstance(loras[1], int | float))
    out = []
    for one in loras if several else [loras]:
        lora, scale = one if isinstance(one, tuple) and len(one) == 2 else (one, None)
        if not isinstance(lora, Lora):
            raise InputError(f"loras must be adapters (exlm.Lora), found {type(lora).__name__}.")
        if not lora.installed(modules):
            raise NotLoaded(
                f"{lora!r} is not installed in this model: load it again, Lora.from_directory(…)."
            )
        out.append((lora, checked_scale(lora.strength if scale is None else scale)))
    return out


def active_loras(modules: object, loras: Any) -> tuple[LoraRef, ...]:
    """What is asked for as `loras`, ready for a row of a batch."""
    return tuple(LoraRef(lora.number, scale) for lora, scale in resolve_loras(modules, loras))


def checked_scale(value: Any) -> float:
    """A factor for an adapter: any finite number."""
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
