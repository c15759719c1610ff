"""`Lora`, an adapter installed in a loaded model, and the `loras` argument of calls and jobs.

Installing an adapter replaces each module it changes by an adapted one. Removing the last adapter of a module
restores the original, so a model without adapters has only its own modules.
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
    """The modules of a loaded model, in one process or several."""

    def replace(self, role: str, change: ModuleChange) -> None:
        """Replace the module of a role by `change(module)`."""
        ...


class ModelHandle(NamedTuple):
    """The parts of a loaded model that installing an adapter needs."""

    modules: AdaptableModules
    spec: spec.Model  # of the whole model, also with tensor or pipeline parallelism
    device: Callable[[str], torch.device]  # by role: the device of the module's weights
    dtype: torch.dtype


class AdaptableModel(Protocol):
    """A model that adapters can be installed in."""

    def model_handle(self) -> ModelHandle:
        """Its modules, spec, devices and dtype; NotLoaded before it is loaded."""
        ...


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
            raise InputError(
                f"An adapter goes into a Model, found {type(model).__name__}: of an LLM, into llm.model."
            )
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
    def strength(self, wanted: float) -> None:
        self._strength = _checked_strength(wanted)

    @property
    def lora_scaling(self) -> float:
        """The strength times alpha / r (rsLoRA: alpha / √r), as in exllamav2."""
        return self._strength * self._scaling

    @lora_scaling.setter
    def lora_scaling(self, wanted: float) -> None:
        if wanted != self.lora_scaling:  # assigning the present value must not change a bit of the strength
            self._strength = _checked_strength(wanted) / self._scaling

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
            raise NotLoaded(
                f"{lora!r} is not installed in this model: load it again, Lora.from_directory(…)."
            )
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
