"""The arguments of a forward pass: tensors for what varies by step, ints for what the host must know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Outputs = Literal["all", "last", "none"]


@dataclass(frozen=True, slots=True)
class VectorSpan:
    """Vectors that replace a row's embeddings from token `start` of this batch on (an image)."""

    row: int
    start: int
    vectors: Tensor  # (tokens, hidden)


class LoraRef(NamedTuple):
    """A LoRA that is active for a row, and its scale."""

    adapter_id: int  # unique in this process
    scale: float


@dataclass(frozen=True, slots=True)
class Batch:
    """(rows, tokens) ids, each row's place in the KV cache, and the outputs wanted."""

    ids: Tensor  # (rows, tokens)
    positions: Tensor  # (rows, tokens), or (3, rows, tokens) for M-RoPE
    past_lens: Tensor  # (rows,) tokens already in the cache
    pages: Tensor  # (rows, width) page table
    max_kv_len: int  # largest past + tokens of any row
    uniform: bool  # every row's past is max_kv_len - tokens, and no key is masked
    mask: Tensor | None = None  # (rows, max_kv_len) False hides a key
    vector_spans: tuple[VectorSpan, ...] = ()
    adapters: tuple[tuple[LoraRef, ...], ...] = ()  # the LoRAs of each row; () if no row has any
    outputs: Outputs = "all"

    def to(self, device: torch.device) -> Batch:
        """The batch on another device; itself if it is there already."""
        if self.ids.device == device:
            return self
        return replace(
            self,
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            past_lens=self.past_lens.to(device),
            pages=self.pages.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            vector_spans=tuple(replace(s, vectors=s.vectors.to(device)) for s in self.vector_spans),
        )
