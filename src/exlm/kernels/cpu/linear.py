"""Products with packed matrices, and single columns of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import Blocks
from .library import Library, check


class PackedLinear:
    """x @ W + bias for any number of rows; a row's answer is the same bits whatever its company."""

    def __init__(self, library: Library, blocks: Blocks) -> None:
        self.blocks = blocks
        self._product = library.product
        self._address = blocks.address
        self._outputs = blocks.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs), float32."""
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], self._outputs)
        rows = x.numel() // self.blocks.in_features
        check(self._product(self._address, x.data_ptr(), rows, y.data_ptr(), torch.get_num_threads()))
        return y


class PackedLookup:
    """Columns of a packed matrix as vectors, in the precision its format defines."""

    def __init__(self, library: Library, blocks: Blocks, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self._columns = library.columns
        self._dtype = dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """(rows, tokens) ids → (rows, tokens, inputs)."""
        ids = ids.long().contiguous()
        out = torch.empty(*ids.shape, self.blocks.in_features)
        self._columns(self.blocks.address, ids.data_ptr(), ids.numel(), out.data_ptr())
        return out.to(self._dtype)
