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
from .modules import AdaptedEmbedding, AdaptedExperts, AdaptedLinear, Pair

_EXPERT = re.compile(r"(layers\.(\d+)\.mlp\.experts)\.(\d+)\.(\w+)")


@dataclass(frozen=True, eq=False)
class Install:
    """A pair goes in beside the matrix of a role."""

    number: int  # the adapter's
    role: str
    pair: Pair
    moe: spec.Moe | None = None  # the layer's, if the matrix is an expert's

    @classmethod
    def into(cls, model: spec.Model, number: int, role: str, pair: Pair) -> Install:
        """The change of one matrix of a model."""
        found = _EXPERT.fullmatch(role)
        mlp = model.layers[int(found[2])].mlp if found else None
        return cls(number, role, pair, mlp if isinstance(mlp, spec.Moe) else None)

    @property
    def place(self) -> str:
        """The role of the module that is replaced."""
        return place(self.role)

    def to(self, device: torch.device) -> Install:
        """The same with its numbers on another device."""
        return replace(self, pair=Pair(*(half.to(device) for half in self.pair)))

    def __call__(self, inner: Any) -> Any:
        """The adapted module for `inner`, which may be one already."""
        if (found := _EXPERT.fullmatch(self.role)) and self.moe is not None:
            adapted = inner
            if not isinstance(inner, AdaptedExperts):
                backend = ReferenceBackend(self.pair.up.device, self.pair.up.dtype)
                adapted = AdaptedExperts(inner, partial(backend.experts, self.moe))
            adapted.pairs.setdefault(self.number, {})[int(found[3]), found[4]] = self.pair
            return adapted
        kind = AdaptedEmbedding if self.role == "embed" else AdaptedLinear
        adapted = inner if isinstance(inner, kind) else kind(inner)
        adapted.pairs[self.number] = self.pair
        return adapted


@dataclass(frozen=True)
class Remove:
    """An adapter leaves the module of a role."""

    number: int
    role: str

    @property
    def place(self) -> str:
        """The role of the module that is replaced."""
        return self.role

    def to(self, device: torch.device) -> Remove:
        """Itself: it has no numbers."""
        return self

    def __call__(self, adapted: Any) -> Any:
        """The module without this adapter: the one inside, if it was the last."""
        del adapted.pairs[self.number]
        return adapted if adapted.pairs else adapted.inner


Change = Install | Remove


def place(role: str) -> str:
    """The module to be replaced for a role: experts are adapted a layer at a time."""
    found = _EXPERT.fullmatch(role)
    return found[1] if found else role
