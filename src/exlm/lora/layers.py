"""What takes the place of the modules an adapter touches: the module, and a small change for some rows.

Each row's change is computed by itself, so it is the same whatever the other rows of the batch do. Which
adapters are at work on a row arrives with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import backend as b
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


ExpertsKernelFactory = Callable[[list[b.Linear], list[b.Linear], list[b.Linear]], b.Experts]
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

    def _adapted_matrices(self, matrix: str, active: Iterable[LoraRef]) -> list[b.Linear]:
        """One matrix of every expert, as these adapters have it."""
        out: list[b.Linear] = []
        for number, expert in enumerate(self.experts):
            linear: Linear = getattr(expert, matrix)
            found = [(self.lora_weights[adapter].get((number, matrix)), scale) for adapter, scale in active]
            weights = [(one, scale) for one, scale in found if one is not None]
            out.append(partial(_add_lora, linear.kernel, weights) if weights else linear.kernel)
        return out


def _add_lora(kernel: b.Linear, weights: Iterable[tuple[LoraWeights, float]], x: Tensor) -> Tensor:
    y = kernel(x)
    for one, scale in weights:
        y = y + one(x, scale)
    return y
