"""The arguments of a forward pass: tensors that differ at every step, and integers that the host reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels.interface import AttnMetadata, StateSlots

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(AttnMetadata):
    """New tokens of some rows, their attention metadata, and the outputs wanted."""

    ids: Tensor  # (rows, tokens)
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
            page_table=self.page_table.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            state_slots=self.state_slots and StateSlots(*(slots.to(device) for slots in self.state_slots)),
            vector_spans=tuple(replace(s, vectors=s.vectors.to(device)) for s in self.vector_spans),
        )
