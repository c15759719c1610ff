"""Modules that make one model of many ranks' shares: each wraps one and knows the group, nothing more.

They stay outermost: what changes a module later changes the one inside, whose answer is then joined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..kernels.interface import QKNormFn
from ..nn import Batch, Embedding, Experts, Linear
from .group import Group
from .shard import first_of_head, ranges


class Net(Protocol):
    """Modules in their places."""

    def replace(self, role: str, change: Callable[[Any], Any]) -> None:
        """Put what `change` makes of a role's module in its place."""
        ...


class RankCombiner:
    """Something that joins the ranks' parts of one module, around this rank's own."""

    inner: Any


class Summed(RankCombiner, Linear):
    """A matrix that is cut by inputs: the ranks' answers add up."""

    def __init__(self, group: Group, inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, inner.out_features)
        self.group, self.inner = group, inner

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, this rank's inputs) → (rows, tokens, all outputs)."""
        return self.group.sum(self.inner.forward(x, batch))


class SummedExperts(RankCombiner, Experts):
    """Experts that are cut by width: the ranks' answers add up."""

    def __init__(self, group: Group, inner: Experts) -> None:
        super().__init__(inner.kernel, inner.experts)
        self.group, self.inner = group, inner

    def forward(self, x: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """The sum over all ranks."""
        return self.group.sum(self.inner.forward(x, logits, batch))


class Gathered(RankCombiner, Linear):
    """A matrix that is cut by outputs: rank 0 gets all of them, the others see their own."""

    def __init__(self, group: Group, sizes: list[int], inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, sum(sizes))
        self.group, self.sizes, self.inner = group, sizes, inner

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, inputs) → (rows, tokens, all outputs) on rank 0."""
        own: Tensor = self.inner.forward(x, batch)
        parts = self.group.gather(F.pad(own, (0, max(self.sizes) - own.shape[-1])))
        if not parts:
            return own
        return torch.cat([part[..., :size] for part, size in zip(parts, self.sizes, strict=True)], -1)


class SharedNorm:
    """Queries and keys normalised over all heads, of which this rank has some.

    The inner norm takes the root mean square of this rank's heads; what is left is a factor for each token. A
    key/value head that several ranks have counts on one of them.
    """

    def __init__(
        self, group: Group, attn: spec.Attention, eps: float, counted: bool, inner: QKNormFn
    ) -> None:
        """`attn` is the whole model's; `counted` says whether the keys of this rank are counted."""
        self.group, self.eps, self.counted, self.inner = group, eps, counted, inner
        self.widths = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, tokens, heads, head_dim) each."""
        squares = [part.float().square().sum((-2, -1)) for part in (q, k)]  # (rows, tokens) each
        totals = self.group.sum(torch.stack((squares[0], squares[1] * self.counted)))
        both = zip(self.inner(q, k), squares, totals, self.widths, strict=True)
        q, k = (self._rescaled(*each) for each in both)
        return q, k

    def _rescaled(self, x: Tensor, own: Tensor, total: Tensor, width: int) -> Tensor:
        """What was normalised by the squares of its own heads, as by those of all."""
        here = own / (x.shape[-2] * x.shape[-1]) + self.eps
        factor = (here / (total / width + self.eps)).sqrt()
        return (x * factor[..., None, None]).to(x.dtype)


class BroadcastEmbedding(RankCombiner, Embedding):
    """The embedding, on the one rank that has it: its answer goes to all others."""

    def __init__(self, group: Group, inner: Embedding) -> None:
        super().__init__(inner.lookup, inner.vocab, inner.positions, inner.scale, inner.dtype)
        self.group, self.inner = group, inner

    def forward(self, batch: Batch) -> Tensor:
        """(rows, tokens) → (rows, tokens, hidden)."""
        return self.group.broadcast(self.inner.forward(batch).contiguous())


class ReceivedEmbedding(Embedding):
    """The embedding as the other ranks see it: what rank 0 sends."""

    def __init__(self, group: Group, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(_absent, 0, None, 1.0, dtype)
        self.group, self.hidden = group, hidden

    def forward(self, batch: Batch) -> Tensor:
        """(rows, tokens) → (rows, tokens, hidden)."""
        return self.group.broadcast(
            torch.empty(*batch.ids.shape, self.hidden, dtype=self.dtype, device=self.group.device)
        )


def combine_ranks(net: Net, model: spec.Model, group: Group) -> None:
    """Wrap what a rank computes only a part of; `model` is the whole one."""
    for i, layer in enumerate(model.layers):
        net.replace(f"layers.{i}.attn.o", partial(Summed, group))
        if (qk := layer.attn.qk_norm) is not None and qk.scope == "all":
            counted = first_of_head(layer.attn, group.rank, group.size)
            shared = partial(SharedNorm, group, layer.attn, qk.norm.eps, counted)
            net.replace(f"layers.{i}.attn.norm", shared)
        if isinstance(layer.mlp, spec.Moe):
            net.replace(f"layers.{i}.mlp.experts", partial(SummedExperts, group))
        else:
            net.replace(f"layers.{i}.mlp.down", partial(Summed, group))
    sizes = [stop - start for start, stop in ranges(model.vocab, group.size)]
    net.replace("head", partial(Gathered, group, sizes))


def _absent(ids: Tensor) -> Tensor:
    raise AssertionError("only rank 0 has the embedding")
