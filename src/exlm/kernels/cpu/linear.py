"""Products with packed matrices, and single columns of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .bindings import Library, check
from .packed import PackedMatrix


class PackedLinear:
    """x @ W + bias for any number of rows; a row's answer is the same bits whatever its company."""

    def __init__(self, library: Library, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self._product = library.linear
        self._address = matrix.address
        self._outputs = matrix.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs), float32."""
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], self._outputs)
        rows = x.numel() // self.matrix.in_features
        check(self._product(self._address, x.data_ptr(), rows, y.data_ptr(), torch.get_num_threads()))
        return y


class PackedEmbedding:
    """Columns of a packed matrix as vectors, in the precision its format defines."""

    def __init__(self, library: Library, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        self.matrix = matrix
        self._columns = library.columns
        self._dtype = dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """(rows, tokens) ids → (rows, tokens, inputs)."""
        ids = ids.long().contiguous()
        out = torch.empty(*ids.shape, self.matrix.in_features)
        self._columns(self.matrix.address, ids.data_ptr(), ids.numel(), out.data_ptr())
        return out.to(self._dtype)
