"""Assign modules to devices by their sizes. Pure functions, without torch and files.

Each device gets consecutive modules, so that the hidden state is transferred once between devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import DoesNotFit

GB = 1 << 30
MB = 1 << 20


@dataclass(frozen=True)
class ModuleMemory:
    """Memory of one module, in bytes."""

    name: str
    weights: int
    cache: int = 0
    workspace: int = 0  # while it runs; a device needs only its largest module's
    shared: int = 0  # weights that are the first module's too: free on its device


@dataclass(frozen=True)
class DeviceCapacity:
    """A device and its usable bytes."""

    name: str
    free: int


@dataclass(frozen=True)
class DeviceLoad:
    """Memory of the modules on one device."""

    weights: int = 0
    cache: int = 0
    workspace: int = 0
    num_modules: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.workspace

    def with_module(self, module: ModuleMemory, has_first: bool) -> DeviceLoad:
        """With one more module; `has_first`: the model's first module is on this device."""
        return DeviceLoad(
            self.weights + module.weights + (0 if has_first else module.shared),
            self.cache + module.cache,
            max(self.workspace, module.workspace),
            self.num_modules + 1,
        )


def place_modules(
    modules: Sequence[ModuleMemory], capacities: Sequence[DeviceCapacity], remedy: str
) -> list[int]:
    """Each module's device number; each device is filled before the next is used.

    This finds a placement whenever there is one. If there is none, the error says what does not fit and
    gives the `remedy`.
    """
    placement: list[int] = []
    device_index, load = 0, DeviceLoad()
    for module in modules:
        while (
            grown := load.with_module(
                module, has_first=device_index == (placement[0] if placement else device_index)
            )
        ).total > capacities[device_index].free:
            device_index, load = device_index + 1, DeviceLoad()
            if device_index == len(capacities):
                raise _does_not_fit(modules, placement, capacities, remedy)
        load = grown
        placement.append(device_index)
    return placement


def device_loads(
    modules: Sequence[ModuleMemory], placement: Sequence[int], num_devices: int
) -> list[DeviceLoad]:
    """Each device's load under a placement."""
    out = [DeviceLoad()] * num_devices
    for module, device_index in zip(modules, placement, strict=True):
        out[device_index] = out[device_index].with_module(module, has_first=device_index == placement[0])
    return out


def _does_not_fit(
    modules: Sequence[ModuleMemory], placed: Sequence[int], capacities: Sequence[DeviceCapacity], remedy: str
) -> DoesNotFit:
    missing = modules[len(placed)]
    total_load = device_loads(modules, [0] * len(modules), 1)[0]
    available = ", ".join(f"{capacity.name} {format_bytes(capacity.free)}" for capacity in capacities)
    return DoesNotFit(
        f"Insufficient memory for model and cache: {len(placed)} of {len(modules)} modules fit, "
        f"{missing.name} does not. All together need {format_bytes(total_load.total)} (weights "
        f"{format_bytes(total_load.weights)}, cache "
        f"{format_bytes(total_load.cache)}, workspace {format_bytes(total_load.workspace)}); "
        f"usable are {available}. {remedy}"
    )


def format_bytes(count: int) -> str:
    """Bytes as GB or MB."""
    return f"{count / GB:,.2f} GB" if count >= GB // 10 else f"{count / MB:,.1f} MB"
