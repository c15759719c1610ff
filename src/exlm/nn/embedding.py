"""Token ids to vectors, with injected vectors laid over them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import interface as b
from .batch import Batch


class Embedding:
    """A table of vectors, perhaps a table of positions, and a factor."""

    def __init__(
        self, lookup: b.EmbeddingFn, vocab: int, positions: Tensor | None, scale: float, dtype: torch.dtype
    ) -> None:
        self.lookup = lookup
        self.vocab = vocab
        self.positions = positions
        self.scale = scale
        self.dtype = dtype  # of the residual stream

    def forward(self, batch: Batch) -> Tensor:
        """(rows, tokens) → (rows, tokens, hidden); ids below zero are padding and read row 0.

        Injected vectors are taken as they are, not multiplied; learned positions are added to them as well.
        """
        x = self.table_rows(batch)
        if self.scale != 1.0:
            x = x * self.scale
        for span in batch.vector_spans:
            x[span.row, span.start : span.start + len(span.vectors)] = span.vectors.to(self.dtype)
        if self.positions is not None:
            x = x + F.embedding(batch.positions, self.positions).to(self.dtype)
        return x

    def table_rows(self, batch: Batch) -> Tensor:
        """Each token's row of the table, before any factor."""
        return self.lookup(batch.ids.clamp(0, self.vocab - 1)).to(self.dtype)
