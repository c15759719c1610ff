"""Tensor-parallel modules: each wraps one module of a rank's shard and combines the ranks' outputs.

They stay outermost: a module that is replaced later, as by a LoRA, is replaced inside of them.
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
from .comm import Group
from .shard import aligned_ranges, is_first_kv_replica, shardable_parts


class ReplaceableModules(Protocol):
    """What `combine_ranks` needs of a decoder."""

    def replace(self, role: str, change: Callable[[Any], Any]) -> None: ...


class RankCombiner:
    """Marks a module that combines the ranks' outputs; `inner` is this rank's own module."""

    inner: Any


class RowParallelLinear(RankCombiner, Linear):
    """A row-parallel matrix, cut by inputs: an all-reduce adds the ranks' outputs."""

    def __init__(self, group: Group, inner: Linear) -> None:
        super().__init__(inner.kernel, inner.in_features, inner.out_features)
        self.group, self.inner = group, inner

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, this rank's inputs) → (rows, tokens, all outputs)."""
        return self.group.sum(self.inner.forward(x, batch))


class RowParallelExperts(RankCombiner, Experts):
    """Experts cut by width: an all-reduce adds the ranks' outputs."""

    def __init__(self, group: Group, inner: Experts) -> None:
        super().__init__(inner.kernel, inner.experts, inner.selection_bias)
        self.group, self.inner = group, inner

    def forward(self, x: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, hidden) on every rank."""
        return self.group.sum(self.inner.forward(x, logits, batch))


class GatheredHead(RankCombiner, Linear):
    """The head, cut by vocabulary: rank 0 gathers all logits, other ranks return their own."""

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


class ShardedQKNorm:
    """RMS norm of q and k over all heads, of which this rank has some.

    The inner norm divides by the root mean square of this rank's heads; a factor for each token corrects
    that to the root mean square of all. A kv head that several ranks have is counted on one of them.
    """

    def __init__(self, group: Group, attn: spec.Attention, eps: float, counts_keys: bool, inner: QKNormFn) -> None:
        """`attn` is the whole model's; `counts_keys`: whether this rank is the one that counts its kv heads."""
        self.group, self.eps, self.counts_keys, self.inner = group, eps, counts_keys, inner
        self.widths = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, tokens, heads, head_dim) each."""
        squares = [part.float().square().sum((-2, -1)) for part in (q, k)]  # (rows, tokens) each
        totals = self.group.sum(torch.stack((squares[0], squares[1] * self.counts_keys)))
        parts = zip(self.inner(q, k), squares, totals, self.widths, strict=True)
        q, k = (self._rescaled(*each) for each in parts)
        return q, k

    def _rescaled(self, x: Tensor, own: Tensor, total: Tensor, width: int) -> Tensor:
        """x divided by the root mean square of all ranks' heads, not of this rank's."""
        own_mean = own / (x.shape[-2] * x.shape[-1]) + self.eps
        factor = (own_mean / (total / width + self.eps)).sqrt()
        return (x * factor[..., None, None]).to(x.dtype)


class BroadcastEmbedding(RankCombiner, Embedding):
    """The embedding on rank 0, which broadcasts its output."""

    def __init__(self, group: Group, inner: Embedding) -> None:
        super().__init__(inner.lookup, inner.vocab, inner.positions, inner.scale, inner.dtype)
        self.group, self.inner = group, inner

    def forward(self, batch: Batch) -> Tensor:
        """(rows, tokens) → (rows, tokens, hidden)."""
        return self.group.broadcast(self.inner.forward(batch).contiguous())


class ReceivedEmbedding(Embedding):
    """The embedding on other ranks: receives rank 0's output."""

    def __init__(self, group: Group, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(_no_table, 0, None, 1.0, dtype)
        self.group, self.hidden = group, hidden

    def forward(self, batch: Batch) -> Tensor:
        """(rows, tokens) → (rows, tokens, hidden)."""
        return self.group.broadcast(
            torch.empty(*batch.ids.shape, self.hidden, dtype=self.dtype, device=self.group.device)
        )


def combine_ranks(decoder: ReplaceableModules, model: spec.Model, group: Group) -> None:
    """Wrap each module whose output is spread over ranks; `model` describes the whole model."""
    for i, layer in enumerate(model.layers):
        attn, mlp = shardable_parts(layer)
        decoder.replace(f"layers.{i}.attn.o", partial(RowParallelLinear, group))
        if (qk := attn.qk_norm) is not None and qk.scope == "all":
            counts_keys = is_first_kv_replica(attn, group.rank, group.size)
            sharded_norm = partial(ShardedQKNorm, group, attn, qk.norm.eps, counts_keys)
            decoder.replace(f"layers.{i}.attn.norm", sharded_norm)
        if isinstance(mlp, spec.Moe):
            decoder.replace(f"layers.{i}.mlp.experts", partial(RowParallelExperts, group))
        else:
            decoder.replace(f"layers.{i}.mlp.down", partial(RowParallelLinear, group))
    sizes = [stop - start for start, stop in aligned_ranges(model.vocab, group.size)]
    decoder.replace("head", partial(GatheredHead, group, sizes))


def _no_table(ids: Tensor) -> Tensor:
    raise AssertionError("only rank 0 has the embedding")
