"""Which backend runs what. Chosen while loading; every refusal is kept so that `explain()` can say why.

Nothing falls back silently: a backend that declines gives a reason; if all decline, the model does not load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ..errors import Unsupported
from .backend import Backend
from .reference import ReferenceBackend

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """What one part of the model got, and why not something faster."""

    role: str
    backend: str
    detail: str
    declined: tuple[str, ...] = ()


@dataclass
class Chain:
    """The backends of one device in order of preference, and a record of who took what."""

    backends: Sequence[Backend]
    choices: list[Choice] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where all of them compute."""
        return self.backends[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The precision all of them compute in."""
        return self.backends[0].dtype

    def bind(self, role: str, detail: str, ask: Callable[[Backend], T]) -> T:
        """The first backend's answer to `ask`, remembered under the role."""
        declined: list[str] = []
        for backend in self.backends:
            try:
                bound = ask(backend)
            except Unsupported as reason:
                declined.append(f"{backend.name}: {reason}")
                continue
            self.choices.append(Choice(role, backend.name, detail, tuple(declined)))
            return bound
        raise Unsupported(f"{role} ({detail}) cannot run on {self.device}: {'; '.join(declined)}.")

    def explain(self) -> str:
        """One line for each part: who runs it, and who declined with which reason."""
        lines = []
        for choice in self.choices:
            why = f"  (declined: {'; '.join(choice.declined)})" if choice.declined else ""
            lines.append(f"{choice.role}: {choice.backend}, {choice.detail}{why}")
        return "\n".join(lines)


def choose(device: torch.device, dtype: torch.dtype) -> Chain:
    """The backends for a device; plain torch is always among them."""
    return Chain([ReferenceBackend(device, dtype)])
