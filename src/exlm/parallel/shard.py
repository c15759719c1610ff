"""One rank's shard of a model: its spec, the slices of matrices it has, and weight sources that read them.

Tensor parallel cuts attention by heads, an MLP (each expert's too) by width, the head by vocabulary; norms
and routers are replicated. A rank's queries need the keys they attend to, so shards are whole groups of
query heads with their kv head (GQA); with more ranks than kv heads, a group is cut and its kv head
replicated. A matrix is read whole and then cut, so that every format can be sharded. Pipeline parallel
gives each rank some layers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import spec
from ..checkpoint import WeightSource
from ..checkpoint.source import Shape, WeightFiles
from ..errors import Unsupported
from ..formats import DenseWeight, PackedWeight, Weight
from ..spec.model import matrices

Range = tuple[int, int]

AUTOSPLIT = "model.load_autosplit(cache), which gives each device whole layers in one process."
"""The remedy where a model cannot be divided among processes."""

ALIGNMENTS = 128, 32, 1
"""Widths are cut at multiples of the first of these numbers that gives each rank at least one."""

_ROLE = re.compile(r"layers\.(\d+)\.(?:attn\.([qkvo])|mlp\.(?:experts\.\d+\.)?(gate|up|down)|attn\.([qk])_norm)")


class MatrixSlice(NamedTuple):
    """A range of a matrix's inputs (dim 0) or outputs (dim 1)."""

    dim: int
    start: int
    stop: int


class RankHeads(NamedTuple):
    """The ranges of query and kv heads that a rank has."""

    q: Range
    kv: Range


def aligned_ranges(length: int, size: int) -> list[Range]:
    """`length` cut at aligned places into one range for each rank; the last takes what is not aligned."""
    unit = next(unit for unit in ALIGNMENTS if length // unit >= size or unit == 1)
    starts = [unit * start for start, _ in split_evenly(length // unit, size)]
    return list(zip(starts, [*starts[1:], length], strict=True))


def split_evenly(count: int, parts: int) -> list[Range]:
    """`count` in `parts` consecutive ranges; if it does not divide evenly, the first ones are longer by one."""
    starts = [count // parts * p + min(p, count % parts) for p in range(parts)]
    return list(zip(starts, [*starts[1:], count], strict=True))


def heads_of_rank(attn: spec.Attention, rank: int, size: int) -> RankHeads:
    """A rank's query heads, and the kv heads that they attend to."""
    group = attn.heads // attn.kv_heads
    if size <= attn.kv_heads:
        start, stop = split_evenly(attn.kv_heads, size)[rank]
        return RankHeads((start * group, stop * group), (start, stop))
    replicas = split_evenly(size, attn.kv_heads)  # the ranks of each kv head
    kv = next(i for i, (first, last) in enumerate(replicas) if first <= rank < last)
    first, last = replicas[kv]
    start, stop = split_evenly(group, last - first)[rank - first]
    return RankHeads((kv * group + start, kv * group + stop), (kv, kv + 1))


def is_first_kv_replica(attn: spec.Attention, rank: int, size: int) -> bool:
    """Whether a rank is the first of those that replicate its kv heads."""
    return rank == 0 or heads_of_rank(attn, rank - 1, size).kv != heads_of_rank(attn, rank, size).kv


def shardable_parts(layer: spec.Layer) -> tuple[spec.Attention, spec.Mlp | spec.Moe]:
    """The attention and the MLP of a layer that `check_shardable` accepts."""
    assert isinstance(layer.mixer, spec.Attention)
    assert layer.mlp is not None
    return layer.mixer, layer.mlp


def shard_spec(model: spec.Model, rank: int, size: int) -> spec.Model:
    """The spec of a rank's shard: fewer heads and narrower MLPs, the rest unchanged."""

    def narrow(layer: spec.Layer) -> spec.Layer:
        attn, mlp = shardable_parts(layer)
        q, kv = heads_of_rank(attn, rank, size)
        start, stop = aligned_ranges(mlp.width, size)[rank]
        return replace(
            layer,
            mixer=replace(attn, heads=q[1] - q[0], kv_heads=kv[1] - kv[0]),
            mlp=replace(mlp, width=stop - start),
        )

    return replace(model, layers=tuple(narrow(layer) for layer in model.layers))


def slice_of_rank(model: spec.Model, role: str, rank: int, size: int) -> MatrixSlice | None:
    """A rank's slice of a tensor; None if it is replicated. Slices of head norms count heads."""
    if role == "head":
        return MatrixSlice(1, *aligned_ranges(model.vocab, size)[rank])
    found = _ROLE.fullmatch(role)
    if found is None:
        return None
    attn, mlp = shardable_parts(model.layers[int(found[1])])
    q, kv = heads_of_rank(attn, rank, size)
    if part := found[4]:
        return MatrixSlice(0, *(q if part == "q" else kv))
    if part := found[2]:
        start, stop = kv if part in "kv" else q
        return MatrixSlice(0 if part == "o" else 1, start * attn.head_dim, stop * attn.head_dim)
    return MatrixSlice(0 if found[3] == "down" else 1, *aligned_ranges(mlp.width, size)[rank])


def check_shardable(model: spec.Model, size: int) -> None:
    """Raise `Unsupported` for a model that cannot be sharded among so many ranks."""
    remedy = f"Use fewer ranks, or {AUTOSPLIT}"
    for i, layer in enumerate(model.layers):
        if (part := _unshardable_part(layer)) is not None:
            raise Unsupported(f"Layer {i} has {part}, which tensor parallel does not shard. Use {AUTOSPLIT}")
        attn, mlp = shardable_parts(layer)
        if size > attn.heads:
            raise Unsupported(f"Layer {i} has {attn.heads} heads, too few to share among {size} ranks. {remedy}")
        if size > mlp.width or size > model.vocab:
            raise Unsupported(f"Layer {i} is too narrow to share among {size} ranks. {remedy}")
        qk = attn.qk_norm
        if qk is not None and qk.scope == "all" and qk.norm.kind != "rms":
            raise Unsupported(
                f"Layer {i} needs the mean of all heads together (LayerNorm), which a rank with only some of them "
                f"cannot compute. {remedy}"
            )


def _unshardable_part(layer: spec.Layer) -> str | None:
    """The part of a layer that has no rule for its slices."""
    mixer, mlp = layer.mixer, layer.mlp
    if layer.state is not None:
        return "a recurrent mixer"
    if isinstance(mixer, spec.LatentAttention):
        return "latent attention"
    if isinstance(mixer, spec.Attention) and mixer.gated:
        return "gated attention"
    if isinstance(mlp, spec.Moe) and mlp.shared is not None:
        return "a shared expert"
    return "only a mixer or only an MLP" if mixer is None or mlp is None else None


def check_pipelined(model: spec.Model) -> None:
    """Raise `Unsupported` for a recurrent model: batches reach other ranks without state slots."""
    if model.is_recurrent:
        layer = next(i for i, layer in enumerate(model.layers) if layer.state is not None)
        raise Unsupported(
            f"Layer {layer} keeps a recurrent state, and pipeline parallel does not tell its processes where states "
            f"are. Use {AUTOSPLIT}"
        )


class RankSource:
    """Base of one rank's weight sources: reads `inner`, the whole model's, by the role's name there."""

    def __init__(self, inner: WeightSource) -> None:
        self.inner = inner

    @property
    def files(self) -> WeightFiles:
        return self.inner.files

    def has(self, role: str) -> bool:
        return self.inner.has(self.model_role(role))

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        return self.inner.describe(self.model_role(role), fallback)

    def unused(self) -> list[str]:
        return self.inner.unused()

    def tensor(self, role: str, shape: Shape | tuple[Shape, ...], **options: Any) -> Tensor:
        return self.inner.tensor(self.model_role(role), shape, **options)

    def weight(self, role: str, in_features: int, out_features: int, **options: Any) -> Weight:
        return self.inner.weight(self.model_role(role), in_features, out_features, **options)

    def model_role(self, role: str) -> str:
        """The role's name in the whole model."""
        return role


class LayerRangeSource(RankSource):
    """The layers of one pipeline stage: its layer 0 is layer `first` of the model."""

    def __init__(self, inner: WeightSource, first: int) -> None:
        super().__init__(inner)
        self.first = first

    def model_role(self, role: str) -> str:
        match role.split(".", 2):
            case ["layers", layer, rest]:
                return f"layers.{int(layer) + self.first}.{rest}"
        return role


class ShardedSource(RankSource):
    """One tensor-parallel rank's slices of all matrices.

    It has a head even if the model ties the head to the embedding: the head is cut, the embedding is not.
    """

    def __init__(self, inner: WeightSource, model: spec.Model, rank: int, size: int) -> None:
        super().__init__(inner)
        self.model, self.rank, self.size = model, rank, size
        self._matrices = {matrix.role: matrix for matrix in matrices(model)}

    def has(self, role: str) -> bool:
        return role == "head" or self.inner.has(role)

    def tensor(self, role: str, shape: Shape | tuple[Shape, ...], **options: Any) -> Tensor:
        """A float tensor; a q or k norm with a scale for each head is cut to this rank's heads."""
        part = slice_of_rank(self.model, role, self.rank, self.size)
        if part is None:
            return super().tensor(role, shape, **options)
        attn, _ = shardable_parts(self.model.layers[int(role.split(".")[1])])
        heads, d = attn.heads if role.endswith("q_norm") else attn.kv_heads, attn.head_dim
        wide = attn.qk_norm is not None and attn.qk_norm.scope == "all"
        shapes: tuple[Shape, ...] = ((heads * d,),) if wide else ((d,), (heads, d))
        whole = self.inner.tensor(role, shapes, **options)
        if whole.dim() == 1 and not wide:
            return whole
        shard = whole.view(heads, d)[part.start : part.stop].clone()
        return shard.flatten() if wide else shard

    def weight(self, role: str, in_features: int, out_features: int, **options: Any) -> Weight:
        """This rank's slice of a matrix, whose sizes are the slice's."""
        part = slice_of_rank(self.model, role, self.rank, self.size)
        if part is None:
            return super().weight(role, in_features, out_features, **options)
        _, wide, high, bias = self._matrices[role]
        options |= {"bias": bias}
        if role == "head" and self.model.head.tied:
            options |= {"fallback": "embed"}
        return slice_weight(self.inner.weight(role, wide, high, **options), part, keep_bias=self.rank == 0)


def slice_weight(weight: Weight, part: MatrixSlice, *, keep_bias: bool) -> Weight:
    """A copy of a slice of a matrix; a row-parallel matrix keeps its bias on one rank only."""
    (piece,) = weight.split(part.dim, [(part.start, part.stop)])
    drop_bias = part.dim == 0 and not keep_bias
    if isinstance(piece, DenseWeight):
        bias = None if drop_bias or piece.bias is None else piece.bias.clone()
        return DenseWeight(piece.data.clone(memory_format=torch.contiguous_format), bias)
    if isinstance(piece, PackedWeight) and drop_bias:
        return replace(piece, bias=None)
    return piece
