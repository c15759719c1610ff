"""Weight sources of one rank: a part of every matrix (tensor parallel), or some layers (pipeline parallel).

A matrix is read whole and then cut, so that every format can be sharded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .. import spec
from ..checkpoint import WeightSource
from ..checkpoint.source import WeightSourceWrapper
from ..checkpoint.tensor_index import Shape
from ..formats import DenseWeight, PackedWeight, Weight
from ..spec.weight_roles import matrices
from .shard import MatrixSlice, slice_of


class ShardedSource(WeightSourceWrapper):
    """A source that gives one rank's parts of all matrices.

    It has a head of its own even if the model ties it to the embedding: the head is cut, the embedding is
    not.
    """

    def __init__(self, inner: WeightSource, model: spec.Model, rank: int, size: int) -> None:
        super().__init__(inner)
        self.model, self.rank, self.size = model, rank, size
        self._whole = {matrix.role: matrix for matrix in matrices(model)}

    def has(self, role: str) -> bool:
        """Whether the files hold this role; the head is always there."""
        return role == "head" or self.inner.has(role)

    def tensor(
        self,
        role: str,
        shape: Shape | tuple[Shape, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        suffix: str = "weight",
        finite: bool = False,
    ) -> Tensor:
        """A float tensor; a q or k norm with a scale for each head is cut to this rank's heads."""
        cut = slice_of(self.model, role, self.rank, self.size)
        if cut is None:
            return super().tensor(role, shape, dtype=dtype, device=device, suffix=suffix, finite=finite)
        attn = self.model.layers[int(role.split(".")[1])].attn
        heads, d = attn.heads if role.endswith("q_norm") else attn.kv_heads, attn.head_dim
        wide = attn.qk_norm is not None and attn.qk_norm.scope == "all"
        shapes: tuple[Shape, ...] = ((heads * d,),) if wide else ((d,), (heads, d))
        whole = self.inner.tensor(role, shapes, dtype=dtype, device=device, suffix=suffix, finite=finite)
        if whole.dim() == 1 and not wide:
            return whole
        shard = whole.view(heads, d)[cut.start : cut.stop].clone()
        return shard.flatten() if wide else shard

    def weight(
        self,
        role: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device,
        fallback: str | None = None,
    ) -> Weight:
        """This rank's part of a matrix."""
        cut = slice_of(self.model, role, self.rank, self.size)
        if cut is None:
            return super().weight(
                role, in_features, out_features, bias=bias, dtype=dtype, device=device, fallback=fallback
            )
        _, wide, high, bias = self._whole[role]
        tied = "embed" if role == "head" and self.model.head.tied else fallback
        whole = self.inner.weight(role, wide, high, bias=bias, dtype=dtype, device=device, fallback=tied)
        return part(whole, cut, keep_bias=self.rank == 0)


def part(weight: Weight, cut: MatrixSlice, *, keep_bias: bool) -> Weight:
    """A copy of a part of a matrix; a row-parallel matrix keeps its bias on one rank only."""
    (piece,) = weight.split(cut.dim, [(cut.start, cut.stop)])
    drop_bias = cut.dim == 0 and not keep_bias
    if isinstance(piece, DenseWeight):
        bias = None if drop_bias or piece.bias is None else piece.bias.clone()
        return DenseWeight(piece.data.clone(memory_format=torch.contiguous_format), bias)
    if isinstance(piece, PackedWeight) and drop_bias:
        return replace(piece, bias=None)
    return piece


class LayersSource(WeightSourceWrapper):
    """A source that counts layers from `first` on."""

    def __init__(self, inner: WeightSource, first: int) -> None:
        super().__init__(inner)
        self.first = first

    def has(self, role: str) -> bool:
        """Whether the files hold this role."""
        return super().has(self._whole(role))

    def describe(self, role: str, fallback: str | None = None) -> tuple[str, int]:
        """The stored form."""
        return super().describe(self._whole(role), fallback)

    def tensor(
        self,
        role: str,
        shape: Shape | tuple[Shape, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        suffix: str = "weight",
        finite: bool = False,
    ) -> Tensor:
        """A float tensor that is no matrix to multiply with."""
        whole = self._whole(role)
        return super().tensor(whole, shape, dtype=dtype, device=device, suffix=suffix, finite=finite)

    def weight(
        self,
        role: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device,
        fallback: str | None = None,
    ) -> Weight:
        """A matrix to multiply with."""
        return super().weight(
            self._whole(role),
            in_features,
            out_features,
            bias=bias,
            dtype=dtype,
            device=device,
            fallback=fallback,
        )

    def _whole(self, role: str) -> str:
        """The role's name in the whole model."""
        match role.split(".", 2):
            case ["layers", layer, rest]:
                return f"layers.{int(layer) + self.first}.{rest}"
        return role
