"""The modules that apply adapters to rows of a batch, and the changes that install and remove them.

An adapted module takes the place of the module it wraps and adds low-rank products for the rows that name an
adapter in `batch.adapters`. Each row's product is computed separately, so it does not depend on the other
rows. Changes are data and callables, so that a tensor-parallel model can send each rank its shard.
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
from ..kernels.interface import LinearFn, MoeFn
from ..kernels.reference import ReferenceBackend
from ..nn import Batch, Embedding, Expert, Experts, Linear, LoraRef


class LoraWeights(NamedTuple):
    """The low-rank matrices A (`down`) and B (`up`) beside one matrix; `up` includes alpha / rank."""

    down: Tensor  # (rank, in_features)
    up: Tensor  # (rank, out_features)

    def __call__(self, x: Tensor, scale: float) -> Tensor:
        """x · A · B · scale: (…, in_features) → (…, out_features)."""
        return (F.linear(x, self.down) * scale) @ self.up

    def lookup(self, ids: Tensor, scale: float) -> Tensor:
        """The same for one-hot vectors of token ids: (tokens,) → (tokens, out_features)."""
        return (self.down[:, ids].T * scale) @ self.up

    def shard(self, dim: int, start: int, stop: int) -> LoraWeights:
        """The weights of a shard of the matrix: a range of inputs (dim 0) or of outputs (dim 1)."""
        if dim == 0:
            return LoraWeights(self.down[:, start:stop].contiguous(), self.up)
        return LoraWeights(self.down, self.up[:, start:stop].contiguous())


LoraWeightsById = dict[int, LoraWeights]  # by adapter id


class LoraLinear(Linear):
    """A linear layer with the weights of adapters."""

    def __init__(self, inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, inner.out_features)
        self.inner = inner
        self.lora_weights: LoraWeightsById = {}

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """The inner layer's output, with the adapters of each row added."""
        y = self.inner.forward(x, batch)
        for row, active in enumerate(batch.adapters):
            for adapter, scale in active:
                if (weights := self.lora_weights.get(adapter)) is not None:
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
        for row, active in enumerate(batch.adapters):
            for adapter, scale in active:
                if (weights := self.lora_weights.get(adapter)) is not None:
                    x[row] += weights.lookup(batch.ids[row].clamp(0, self.vocab - 1), scale)
        return x


ExpertsKernelFactory = Callable[[list[LinearFn], list[LinearFn], list[LinearFn]], MoeFn]
"""The gate, up and down matrices of every expert → a kernel that runs them."""


class LoraExperts(Experts):
    """The experts of a layer with the weights of adapters on some of their matrices.

    Rows without adapters go through the inner kernel together. For each other row a kernel of adapted
    matrices is built.
    """

    def __init__(self, inner: Experts, make_kernel: ExpertsKernelFactory) -> None:
        super().__init__(inner.kernel, inner.experts)
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
                kernel = self.make_kernel(*(self._adapted_matrices(name, active) for name in Expert._fields))
                out[row] = kernel(x[row : row + 1], logits[row : row + 1])[0]
        return out

    def _adapted_matrices(self, name: str, active: Iterable[LoraRef]) -> list[LinearFn]:
        """The gate, up or down matrix of every expert, with these adapters added."""
        out: list[LinearFn] = []
        for index, expert in enumerate(self.experts):
            linear: Linear = getattr(expert, name)
            found = [(self.lora_weights[adapter].get((index, name)), scale) for adapter, scale in active]
            weights = [(one, scale) for one, scale in found if one is not None]
            out.append(partial(_add_lora, linear.kernel, weights) if weights else linear.kernel)
        return out


def _add_lora(kernel: LinearFn, weights: Iterable[tuple[LoraWeights, float]], x: Tensor) -> Tensor:
    y = kernel(x)
    for one, scale in weights:
        y = y + one(x, scale)
    return y


_EXPERT = re.compile(r"(layers\.(\d+)\.mlp\.experts)\.(\d+)\.(\w+)")


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
        found = _EXPERT.fullmatch(role)
        mlp = model.layers[int(found[2])].mlp if found else None
        return cls(adapter_id, role, weights, mlp if isinstance(mlp, spec.Moe) else None)

    @property
    def module_role(self) -> str:
        """The role of the module that is replaced."""
        return module_role_of(self.role)

    def to(self, device: torch.device) -> InstallLora:
        """The same with its weights on another device."""
        return replace(self, weights=LoraWeights(*(tensor.to(device) for tensor in self.weights)))

    def __call__(self, inner: Any) -> Any:
        """The adapted module of `inner`, which may be adapted already."""
        if (found := _EXPERT.fullmatch(self.role)) and self.moe is not None:
            adapted = inner
            if not isinstance(inner, LoraExperts):
                backend = ReferenceBackend(self.weights.up.device, self.weights.up.dtype)
                adapted = LoraExperts(inner, partial(backend.moe, self.moe))
            adapted.lora_weights.setdefault(self.adapter_id, {})[int(found[3]), found[4]] = self.weights
            return adapted
        kind = LoraEmbedding if self.role == "embed" else LoraLinear
        adapted = inner if isinstance(inner, kind) else kind(inner)
        adapted.lora_weights[self.adapter_id] = self.weights
        return adapted


@dataclass(frozen=True)
class RemoveLora:
    """Removes an adapter's weights from the module of a role; a callable from module to module."""

    adapter_id: int
    role: str

    @property
    def module_role(self) -> str:
        """The role of the module that is replaced."""
        return self.role

    def to(self, device: torch.device) -> RemoveLora:
        """Itself: it has no weights."""
        return self

    def __call__(self, adapted: Any) -> Any:
        """The module without this adapter; the inner module, if it was the last one."""
        del adapted.lora_weights[self.adapter_id]
        return adapted if adapted.lora_weights else adapted.inner


ModuleChange = InstallLora | RemoveLora


def module_role_of(role: str) -> str:
    """The role of the module that is replaced for a role: all experts of a layer are one module."""
    found = _EXPERT.fullmatch(role)
    return found[1] if found else role
