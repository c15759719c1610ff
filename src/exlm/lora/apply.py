"""What takes the place of the modules an adapter touches: the module, and a small change for some rows.

Each row's change is computed by itself, so it is the same whatever the other rows of the batch do. Which
adapters are at work on a row arrives with the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..kernels import interface as b
from ..kernels.reference import ReferenceBackend
from ..nn import Batch, Embedding, Expert, Experts, Linear, LoraRef


class LoraWeights(NamedTuple):
    """A matrix of low rank, to be added to another; the adapter's own factor is in `up`."""

    down: Tensor  # (rank, in_features)
    up: Tensor  # (rank, out_features)

    def __call__(self, x: Tensor, scale: float) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        return (F.linear(x, self.down) * scale) @ self.up

    def lookup(self, ids: Tensor, scale: float) -> Tensor:
        """The same for unit vectors: (tokens,) → (tokens, out_features)."""
        return (self.down[:, ids].T * scale) @ self.up

    def shard(self, dim: int, start: int, stop: int) -> LoraWeights:
        """The change of a part of the matrix: of some inputs (dim 0) or of some outputs (dim 1)."""
        if dim == 0:
            return LoraWeights(self.down[:, start:stop].contiguous(), self.up)
        return LoraWeights(self.down, self.up[:, start:stop].contiguous())


LoraWeightsById = dict[int, LoraWeights]  # by the adapter's number


class AdaptedLinear(Linear):
    """A matrix with adapters beside it."""

    def __init__(self, inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, inner.out_features)
        self.inner = inner
        self.lora_weights: LoraWeightsById = {}

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """The inner matrix's answer, changed for the rows that use an adapter."""
        y = self.inner.forward(x, batch)
        for row, active in enumerate(batch.adapters):
            for adapter, scale in active:
                if (weights := self.lora_weights.get(adapter)) is not None:
                    y[row] += weights(x[row], scale)
        return y


class AdaptedEmbedding(Embedding):
    """A table of vectors with adapters beside it."""

    def __init__(self, inner: Embedding) -> None:
        super().__init__(inner.lookup, inner.vocab, inner.positions, inner.scale, inner.dtype)
        self.inner = inner
        self.lora_weights: LoraWeightsById = {}

    def table_rows(self, batch: Batch) -> Tensor:
        """The inner table's vectors, changed for the rows that use an adapter."""
        x = self.inner.table_rows(batch)
        for row, active in enumerate(batch.adapters):
            for adapter, scale in active:
                if (weights := self.lora_weights.get(adapter)) is not None:
                    x[row] += weights.lookup(batch.ids[row].clamp(0, self.vocab - 1), scale)
        return x


ExpertsKernelFactory = Callable[[list[b.LinearFn], list[b.LinearFn], list[b.LinearFn]], b.MoeFn]
"""gate, up and down of every expert → a kernel of them."""


class AdaptedExperts(Experts):
    """A layer's experts with adapters beside some of their matrices.

    Rows without one go through the inner kernel together; for each other row a kernel of changed matrices is
    bound.
    """

    def __init__(self, inner: Experts, make_kernel: ExpertsKernelFactory) -> None:
        super().__init__(inner.kernel, inner.experts)
        self.inner = inner
        self.make_kernel = make_kernel
        self.lora_weights: dict[
            int, dict[tuple[int, str], LoraWeights]
        ] = {}  # adapter → expert and part → change

    def forward(self, x: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """The inner experts' answers, those of rows that use an adapter by changed experts."""
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
                kernel = self.make_kernel(*(self._adapted_matrices(part, active) for part in Expert._fields))
                out[row] = kernel(x[row : row + 1], logits[row : row + 1])[0]
        return out

    def _adapted_matrices(self, matrix: str, active: Iterable[LoraRef]) -> list[b.LinearFn]:
        """One matrix of every expert, as these adapters have it."""
        out: list[b.LinearFn] = []
        for number, expert in enumerate(self.experts):
            linear: Linear = getattr(expert, matrix)
            found = [(self.lora_weights[adapter].get((number, matrix)), scale) for adapter, scale in active]
            weights = [(one, scale) for one, scale in found if one is not None]
            out.append(partial(_add_lora, linear.kernel, weights) if weights else linear.kernel)
        return out


def _add_lora(kernel: b.LinearFn, weights: Iterable[tuple[LoraWeights, float]], x: Tensor) -> Tensor:
    y = kernel(x)
    for one, scale in weights:
        y = y + one(x, scale)
    return y


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
                adapted = AdaptedExperts(inner, partial(backend.moe, self.moe))
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
