"""Tensor-parallel sharding: a model's description → the description of one rank's shard. Pure, no tensors.

Attention is cut by heads, an MLP (each expert's too) by width, the head by vocabulary; norms and routers are
replicated. A rank's queries need the keys they attend to, so shards are whole groups of query heads with
their kv head (GQA); with more ranks than kv heads, a group is cut and its kv head replicated.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from .. import spec
from ..errors import Unsupported

Range = tuple[int, int]

UNITS = 128, 32, 1
"""Widths are cut at multiples of the first of these numbers that gives each rank at least one."""

_ROLE = re.compile(
    r"layers\.(\d+)\.(?:attn\.([qkvo])|mlp\.(?:experts\.\d+\.)?(gate|up|down)|attn\.([qk])_norm)"
)


class MatrixSlice(NamedTuple):
    """A part of a matrix: inputs (dim 0) or outputs (dim 1), from one to another."""

    dim: int
    start: int
    stop: int


class Heads(NamedTuple):
    """A rank's heads."""

    q: Range
    kv: Range


def ranges(length: int, size: int) -> list[Range]:
    """A length in as many parts of whole units as there are ranks, the first ones larger."""
    unit = next(unit for unit in UNITS if length // unit >= size or unit == 1)
    whole = length // unit
    starts = [min(length, unit * (whole // size * r + min(r, whole % size))) for r in range(size)]
    return list(zip(starts, [*starts[1:], length], strict=True))


def split_evenly(count: int, parts: int) -> list[Range]:
    """A count in parts, the first ones larger by one where it does not divide."""
    starts = [count // parts * p + min(p, count % parts) for p in range(parts)]
    return list(zip(starts, [*starts[1:], count], strict=True))


def heads(attn: spec.Attention, rank: int, size: int) -> Heads:
    """A rank's query heads, and the kv heads that they attend to."""
    group = attn.heads // attn.kv_heads
    if size <= attn.kv_heads:
        start, stop = split_evenly(attn.kv_heads, size)[rank]
        return Heads((start * group, stop * group), (start, stop))
    sharing = split_evenly(size, attn.kv_heads)  # the ranks of each kv head
    kv = next(i for i, (first, last) in enumerate(sharing) if first <= rank < last)
    first, last = sharing[kv]
    start, stop = split_evenly(group, last - first)[rank - first]
    return Heads((kv * group + start, kv * group + stop), (kv, kv + 1))


def first_of_head(attn: spec.Attention, rank: int, size: int) -> bool:
    """Whether a rank is the first of those that replicate its kv heads."""
    return rank == 0 or heads(attn, rank - 1, size).kv != heads(attn, rank, size).kv


def shard(model: spec.Model, rank: int, size: int) -> spec.Model:
    """The description of a rank's shard: fewer heads and narrower MLPs, the rest unchanged."""

    def narrow(layer: spec.Layer) -> spec.Layer:
        q, kv = heads(layer.attn, rank, size)
        start, stop = ranges(layer.mlp.width, size)[rank]
        return replace(
            layer,
            attn=replace(layer.attn, heads=q[1] - q[0], kv_heads=kv[1] - kv[0]),
            mlp=replace(layer.mlp, width=stop - start),
        )

    return replace(model, layers=tuple(narrow(layer) for layer in model.layers))


def slice_of(model: spec.Model, role: str, rank: int, size: int) -> MatrixSlice | None:
    """A rank's part of a tensor; None if it is replicated. Slices of head norms count heads."""
    if role == "head":
        return MatrixSlice(1, *ranges(model.vocab, size)[rank])
    found = _ROLE.fullmatch(role)
    if found is None:
        return None
    layer = model.layers[int(found[1])]
    q, kv = heads(layer.attn, rank, size)
    if part := found[4]:
        return MatrixSlice(0, *(q if part == "q" else kv))
    if part := found[2]:
        start, stop = kv if part in "kv" else q
        return MatrixSlice(0 if part == "o" else 1, start * layer.attn.head_dim, stop * layer.attn.head_dim)
    return MatrixSlice(0 if found[3] == "down" else 1, *ranges(layer.mlp.width, size)[rank])


def check_shardable(model: spec.Model, size: int) -> None:
    """Raise `Unsupported` for a model that cannot be sharded among so many ranks."""
    remedy = "Use fewer ranks, or model.load_autosplit(cache), which gives each device whole layers."
    for i, layer in enumerate(model.layers):
        if size > layer.attn.heads:
            raise Unsupported(
                f"Layer {i} has {layer.attn.heads} heads, too few to share among {size} ranks. {remedy}"
            )
        if size > layer.mlp.width or size > model.vocab:
            raise Unsupported(f"Layer {i} is too narrow to share among {size} ranks. {remedy}")
        qk = layer.attn.qk_norm
        if qk is not None and qk.scope == "all" and qk.norm.kind != "rms":
            raise Unsupported(
                f"Layer {i} takes the mean of all heads together, which a rank that has some cannot. {remedy}"
            )
