"""Matrices: Linear, the token embedding and the LM head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.interface import AddNormFn, EmbeddingFn, LinearFn
from .batch import Batch


class Linear:
    """y = x @ W + bias; LoRA and tensor parallel replace or wrap it."""

    def __init__(self, kernel: LinearFn, in_features: int, out_features: int) -> None:
        self.kernel = kernel
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """(rows, tokens, in_features) → (rows, tokens, out_features)."""
        return self.kernel(x)


class Embedding:
    """Token embedding, with learned positions and a factor where the family has them."""

    def __init__(
        self, lookup: EmbeddingFn, vocab: int, positions: Tensor | None, scale: float, dtype: torch.dtype
    ) -> None:
        self.lookup = lookup
        self.vocab = vocab
        self.positions = positions
        self.scale = scale
        self.dtype = dtype  # of the residual stream

    def forward(self, batch: Batch) -> Tensor:
        """(rows, tokens) → (rows, tokens, hidden); negative ids are padding and read row 0.

        Injected vectors (images) replace embeddings and are not scaled; learned positions are added to both.
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
        """Each token's row of the table, not scaled."""
        return self.lookup(batch.ids.clamp(0, self.vocab - 1)).to(self.dtype)


class Head:
    """Final norm, LM head, scale and softcap."""

    def __init__(self, norm: AddNormFn, linear: Linear, scale: float, softcap: float | None) -> None:
        self.norm = norm
        self.linear = linear
        self.scale = scale
        self.softcap = softcap

    def forward(self, x: Tensor, pending_residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """The residual stream → (rows, tokens, vocabulary) float32 logits, and the state before the norm."""
        state, normed = self.norm(x, pending_residual)
        return self.scale_logits(self.linear.forward(normed, batch)), state

    def scale_logits(self, output: Tensor) -> Tensor:
        """Apply scale and softcap to the matrix's output, in float32."""
        logits = output.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
