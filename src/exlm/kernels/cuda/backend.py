"""The CUDA backend: packed matrices in float16, and nothing else.

A few rows are multiplied straight from codes; for many, the matrix is unpacked and multiplied as any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MissingExtra, Unsupported
from ...formats import PackedWeight, Weight
from .. import backend as b
from .linear import ALIKE, Product, expanded
from .program import Workshop, bindings
from .tiles import BLOCK, Tiles, arrange

FEW = 4 * ALIKE
"""Rows up to which reading the codes again for every ALIKE of them is cheaper than unpacking the matrix."""


class PackedLinear:
    """x @ W + bias for any number of rows."""

    def __init__(self, workshop: Workshop, tiles: Tiles) -> None:
        self._workshop = workshop
        self._tiles = tiles
        self._product = Product(workshop, [tiles])
        self._index: Tensor | None = None
        if tiles.source is not None:
            self._index = torch.where(tiles.source < 0, tiles.in_features, tiles.source).long()

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        rows = x.reshape(-1, x.shape[-1])
        y = self._few(rows) if len(rows) <= FEW else self._many(rows)
        return y.view(*x.shape[:-1], self._tiles.out_features)

    def _few(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), self._tiles.out_features, dtype=rows.dtype, device=rows.device)
        for start in range(0, len(rows), ALIKE):
            self._product(rows[start : start + ALIKE], [out[start : start + ALIKE]])
        return out

    def _many(self, rows: Tensor) -> Tensor:
        tiles = self._tiles
        if self._index is not None:
            rows = F.pad(rows, (0, 1)).index_select(1, self._index)
        elif padding := tiles.blocks * BLOCK - tiles.in_features:
            rows = F.pad(rows, (0, padding))
        matrix = expanded(self._workshop, tiles)[: tiles.out_features]
        if tiles.factor == 1.0:
            return F.linear(rows, matrix, tiles.bias)
        y = F.linear(rows, matrix) * tiles.factor
        return y if tiles.bias is None else y + tiles.bias


class CudaBackend:
    """Packed matrices on one GPU; everything else is declined."""

    name = "cuda"

    def __init__(self, device: torch.device, dtype: torch.dtype, folder: Path) -> None:
        if dtype is not torch.float16:
            raise Unsupported(f"computes in float16, not in {str(dtype).removeprefix('torch.')}")
        try:
            bindings()
        except MissingExtra as reason:
            raise Unsupported(str(reason)) from reason
        self.device = device
        self.dtype = dtype
        self._workshop = Workshop(device, folder)

    def linear(self, weight: Weight) -> b.Linear:
        """Packed weights, rearranged."""
        if not isinstance(weight, PackedWeight):
            raise Unsupported("only packed matrices")
        (tiles,) = arrange(weight)
        return PackedLinear(self._workshop, tiles)

    def _declined(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("only packed matrices")

    embedding = norm = add_norm = activation = gated = rotation = attention = experts = _declined
