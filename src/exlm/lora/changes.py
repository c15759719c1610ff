"""An adapter going into a model or out of it: one value for each module it touches.

Calling a change with a module gives the module that takes its place. Changes are data, so that a model in
several processes can hand each of them what is its own; who has which module is not known here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .. import spec
from ..kernels.reference import ReferenceBackend
from .layers import AdaptedEmbedding, AdaptedExperts, AdaptedLinear, LoraWeights

_EXPERT = re.compile(r"(layers\.(\d+)\.mlp\.experts)\.(\d+)\.(\w+)")


@dataclass(frozen=True, eq=False)
class InstallLora:
    """A pair goes in beside the matrix of a role."""

    adapter_id: int  # the adapter's
    role: str
    weights: LoraWeights
    moe: spec.Moe | None = None  # the layer's, if the matrix is an expert's

    @classmethod
    def for_model(cls, model: spec.Model, adapter_id: int, role: str, weights: LoraWeights) -> InstallLora:
        """The change of one matrix of a model."""
        found = _EXPERT.fullmatch(role)
        mlp = model.layers[int(found[2])].mlp if found else None
        return cls(adapter_id, role, weights, mlp if isinstance(mlp, spec.Moe) else None)

    @property
    def module_role(self) -> str:
        """The role of the module that is replaced."""
        return module_role_of(self.role)

    def to(self, device: torch.device) -> InstallLora:
        """The same with its numbers on another device."""
        return replace(self, weights=LoraWeights(*(tensor.to(device) for tensor in self.weights)))

    def __call__(self, inner: Any) -> Any:
        """The adapted module for `inner`, which may be one already."""
        if (found := _EXPERT.fullmatch(self.role)) and self.moe is not None:
            adapted = inner
            if not isinstance(inner, AdaptedExperts):
                backend = ReferenceBackend(self.weights.up.device, self.weights.up.dtype)
                adapted = AdaptedExperts(inner, partial(backend.experts, self.moe))
            adapted.lora_weights.setdefault(self.adapter_id, {})[int(found[3]), found[4]] = self.weights
            return adapted
        kind = AdaptedEmbedding if self.role == "embed" else AdaptedLinear
        adapted = inner if isinstance(inner, kind) else kind(inner)
        adapted.lora_weights[self.adapter_id] = self.weights
        return adapted


@dataclass(frozen=True)
class RemoveLora:
    """An adapter leaves the module of a role."""

    adapter_id: int
    role: str

    @property
    def module_role(self) -> str:
        """The role of the module that is replaced."""
        return self.role

    def to(self, device: torch.device) -> RemoveLora:
        """Itself: it has no numbers."""
        return self

    def __call__(self, adapted: Any) -> Any:
        """The module without this adapter: the one inside, if it was the last."""
        del adapted.lora_weights[self.adapter_id]
        return adapted if adapted.lora_weights else adapted.inner


ModuleChange = InstallLora | RemoveLora


def module_role_of(role: str) -> str:
    """The module to be replaced for a role: experts are adapted a layer at a time."""
    found = _EXPERT.fullmatch(role)
    return found[1] if found else role
