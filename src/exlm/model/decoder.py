"""The assembled net: embedding, blocks, head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..kernels.backend import KeyValues
from ..nn import Batch, Embedding, Head
from ..nn.block import BlockLike


@dataclass
class Decoder:
    """Every module of a loaded model, in order."""

    embedding: Embedding
    blocks: list[BlockLike]
    head: Head

    def forward(self, batch: Batch, layers: Sequence[KeyValues]) -> tuple[Tensor | None, Tensor]:
        """Logits for the positions the batch asks for, or None; and the state before the head."""
        x = self.embedding.forward(batch)
        for block, kv in zip(self.blocks, layers, strict=True):
            x = block.forward(x, batch, kv)
        if batch.outputs == "none":
            return None, x
        if batch.outputs == "last":
            x = x[:, -1:]
        return self.head.forward(x), x
