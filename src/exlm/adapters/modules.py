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
from ..nn import Active, Batch, Embedding, Expert, Experts, Linear


class Pair(NamedTuple):
    """A matrix of low rank, to be added to another; the adapter's own factor is in `up`."""

    down: Tensor  # (rank, in_features)
    up: Tensor  # (rank, out_features)

    def __call__(self, x: Tensor, scale: float) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        return (F.linear(x, self.down) * scale) @ self.up

    def vectors(self, ids: Tensor, scale: float) -> Tensor:
        """The same for unit vectors: (tokens,) → (tokens, out_features)."""
        return (self.down[:, ids].T * scale) @ self.up

    def part(self, dim: int, start: int, stop: int) -> Pair:
        """The change of a part of the matrix: of some inputs (dim 0) or of some outputs (dim 1)."""
        if dim == 0:
            return Pair(self.down[:, start:stop].contiguous(), self.up)
        return Pair(self.down, self.up[:, start:stop].contiguous())


Pairs = dict[int, Pair]  # by the adapter's number


class AdaptedLinear(Linear):
    """A matrix with adapters beside it."""

    def __init__(self, inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, inner.out_features)
        self.inner = inner
        self.pairs: Pairs = {}

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """The inner matrix's answer, changed for the rows that use an adapter."""
        y = self.inner.forward(x, batch)
        for row, active in enumerate(batch.adapters):
            for adapter, scale in active:
                if (pair := self.pairs.get(adapter)) is not None:
                    y[row] += pair(x[row], scale)
        return y


class AdaptedEmbedding(Embedding):
    """A table of vectors with adapters beside it."""

    def __init__(self, inner: Embedding) -> None:
        super().__init__(inner.lookup, inner.vocab, inner.positions, inner.scale, inner.dtype)
        self.inner = inner
        self.pairs: Pairs = {}

    def stored(self, batch: Batch) -> Tensor:
        """The inner table's vectors, changed for the rows that use an adapter."""
        x = self.inner.stored(batch)
        for row, active in enumerate(batch.adapters):
            for adapter, scale in active:
                if (pair := self.pairs.get(adapter)) is not None:
                    x[row] += pair.vectors(batch.ids[row].clamp(0, self.vocab - 1), scale)
        return x


Bind = Callable[[list[b.Linear], list[b.Linear], list[b.Linear]], b.Experts]
"""gate, up and down of every expert → a kernel of them."""


class AdaptedExperts(Experts):
    """A layer's experts with adapters beside some of their matrices.

    Rows without one go through the inner kernel together; for each other row a kernel of changed matrices is
    bound.
    """

    def __init__(self, inner: Experts, bind: Bind) -> None:
        super().__init__(inner.kernel, inner.experts)
        self.inner = inner
        self.bind = bind
        self.pairs: dict[int, dict[tuple[int, str], Pair]] = {}  # adapter → expert and part → change

    def forward(self, x: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """The inner experts' answers, those of rows that use an adapter by changed experts."""
        used = [tuple(one for one in active if one.adapter in self.pairs) for active in batch.adapters]
        if not any(used):
            return self.inner.forward(x, logits, batch)
        out = torch.empty_like(x)
        if plain := [row for row, active in enumerate(used) if not active]:
            out[plain] = self.inner.forward(x[plain], logits[plain], batch)
        for row, active in enumerate(used):
            if active:
                kernel = self.bind(*(self._changed(part, active) for part in Expert._fields))
                out[row] = kernel(x[row : row + 1], logits[row : row + 1])[0]
        return out

    def _changed(self, part: str, active: Iterable[Active]) -> list[b.Linear]:
        """One matrix of every expert, as these adapters have it."""
        out: list[b.Linear] = []
        for number, expert in enumerate(self.experts):
            linear: Linear = getattr(expert, part)
            found = [(self.pairs[adapter].get((number, part)), scale) for adapter, scale in active]
            pairs = [(pair, scale) for pair, scale in found if pair is not None]
            out.append(partial(_sum, linear.kernel, pairs) if pairs else linear.kernel)
        return out


def _sum(kernel: b.Linear, pairs: Iterable[tuple[Pair, float]], x: Tensor) -> Tensor:
    y = kernel(x)
    for pair, scale in pairs:
        y = y + pair(x, scale)
    return y
