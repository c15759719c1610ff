"""Modules that make one model of many ranks' shares: each wraps one and knows the group, nothing more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..nn import Batch, Embedding, Experts, Linear
from .group import Group
from .shard import ranges


class Net(Protocol):
    """Modules in their places."""

    def replace(self, role: str, change: Callable[[Any], Any]) -> None:
        """Put what `change` makes of a role's module in its place."""
        ...


class Summed(Linear):
    """A matrix that is cut by inputs: the ranks' answers add up."""

    def __init__(self, group: Group, inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, inner.out_features)
        self.group, self.inner = group, inner

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, this rank's inputs) → (rows, tokens, all outputs)."""
        return self.group.sum(self.inner.forward(x, batch))


class SummedExperts(Experts):
    """Experts that are cut by width: the ranks' answers add up."""

    def __init__(self, group: Group, inner: Experts) -> None:
        super().__init__(inner.kernel, inner.experts)
        self.group, self.inner = group, inner

    def forward(self, x: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """The sum over all ranks."""
        return self.group.sum(self.inner.forward(x, logits, batch))


class Gathered(Linear):
    """A matrix that is cut by outputs: rank 0 gets all of them, the others see their own."""

    def __init__(self, group: Group, sizes: list[int], inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, sum(sizes))
        self.group, self.sizes, self.inner = group, sizes, inner

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, inputs) → (rows, tokens, all outputs) on rank 0."""
        own = self.inner.forward(x, batch)
        parts = self.group.gather(F.pad(own, (0, max(self.sizes) - own.shape[-1])))
        if not parts:
            return own
        return torch.cat([part[..., :size] for part, size in zip(parts, self.sizes, strict=True)], -1)


class Sent(Embedding):
    """The embedding, on the one rank that has it: its answer goes to all others."""

    def __init__(self, group: Group, inner: Embedding) -> None:
        super().__init__(inner.lookup, inner.vocab, inner.positions, inner.scale, inner.dtype)
        self.group, self.inner = group, inner

    def forward(self, batch: Batch) -> Tensor:
        """(rows, tokens) → (rows, tokens, hidden)."""
        return self.group.broadcast(self.inner.forward(batch).contiguous())


class Received(Embedding):
    """The embedding as the other ranks see it: what rank 0 sends."""

    def __init__(self, group: Group, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(_absent, 0, None, 1.0, dtype)
        self.group, self.hidden = group, hidden

    def forward(self, batch: Batch) -> Tensor:
        """(rows, tokens) → (rows, tokens, hidden)."""
        return self.group.broadcast(
            torch.empty(*batch.ids.shape, self.hidden, dtype=self.dtype, device=self.group.device)
        )


def join(net: Net, model: spec.Model, group: Group) -> None:
    """Wrap what a rank computes only a part of; `model` is the whole one."""
    for i, layer in enumerate(model.layers):
        net.replace(f"layers.{i}.attn.o", partial(Summed, group))
        if isinstance(layer.mlp, spec.Moe):
            net.replace(f"layers.{i}.mlp.experts", partial(SummedExperts, group))
        else:
            net.replace(f"layers.{i}.mlp.down", partial(Summed, group))
    sizes = [stop - start for start, stop in ranges(model.vocab, group.size)]
    net.replace("head", partial(Gathered, group, sizes))


def _absent(ids: Tensor) -> Tensor:
    raise AssertionError("only rank 0 has the embedding")
