"""Everything one forward pass is given: what varies by step is a tensor, what the host must know an int."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Outputs = Literal["all", "last", "none"]


@dataclass(frozen=True, slots=True)
class VectorSpan:
    """Vectors laid over a row's embeddings from token `start` of this batch on."""

    row: int
    start: int
    vectors: Tensor  # (tokens, hidden)


class LoraRef(NamedTuple):
    """An adapter at work on a row, and how strongly."""

    adapter_id: int  # its number, unique in this process
    scale: float


@dataclass(frozen=True, slots=True)
class Batch:
    """A rectangle of tokens, where each row stands, and which answers are wanted."""

    ids: Tensor  # (rows, tokens)
    positions: Tensor  # (rows, tokens), or (3, rows, tokens)
    past_lens: Tensor  # (rows,) tokens in the cache already
    pages: Tensor  # (rows, width)
    max_kv_len: int  # largest past + tokens of any row
    uniform: bool  # every row's past is longest - tokens, and nothing is hidden
    mask: Tensor | None = None  # (rows, longest) False hides a key
    vector_spans: tuple[VectorSpan, ...] = ()
    adapters: tuple[tuple[LoraRef, ...], ...] = ()  # for each row; () if no row has any
    outputs: Outputs = "all"

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; itself if it is there already."""
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
