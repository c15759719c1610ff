"""What a sequence brings besides its ids: adapters, injected embeddings, positions in three planes.

It is made once, when a prompt is known, and travels with the sequence; a generator carries it unopened.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import spec
from ..errors import InputError, NotLoaded
from ..lora import Lora
from ..multimodal import EMBEDDING_INDEX, MMEmbedding, embedding_spans, mrope_positions
from ..nn import LoraRef, VectorSpan

EMBED_HERE = "{{EMBED_HERE}}"
"""Where a prompt wants vectors that have no alias of their own."""


@dataclass(frozen=True, eq=False)
class SequenceExtras:
    """The extras of one sequence."""

    adapters: tuple[LoraRef, ...] = ()
    embeddings: tuple[MMEmbedding, ...] = ()
    loras: tuple[Lora, ...] = ()  # whose the adapters are
    mrope_positions: Tensor | None = None  # (3, prompt) where the prompt's tokens stand; None: where they are

    @property
    def salt(self) -> bytes:
        """What makes keys and values differ for equal ids; embeddings do not, their ids are unique."""
        return b"".join(struct.pack("<qd", *one) for one in self.adapters)

    def unloaded_error(self) -> NotLoaded | None:
        """What to tell the owner of a sequence whose adapter was unloaded meanwhile."""
        for lora in self.loras:
            if not lora.loaded:
                return NotLoaded(f"{lora!r} was unloaded while a job used it.")
        return None

    def vector_spans(self, row: int, ids: Sequence[int]) -> Iterator[VectorSpan]:
        """The vectors to lay over these ids of a batch's row."""
        if self.embeddings and max(ids) >= EMBEDDING_INDEX:
            for run in embedding_spans(ids, self.embeddings):
                yield VectorSpan(row, run.start, run.vectors)

    def mrope_slice(self, start: int, stop: int) -> Tensor:
        """(3, stop - start) where these tokens stand; what is sampled follows the prompt in all planes."""
        if self.mrope_positions is None:
            return torch.arange(start, stop).repeat(3, 1)
        prompt_length = self.mrope_positions.shape[1]
        offset = int(self.mrope_positions.max()) + 1 - prompt_length
        sampled = torch.arange(max(start, prompt_length), max(stop, prompt_length)).repeat(3, 1) + offset
        return torch.cat((self.mrope_positions[:, start:stop], sampled), 1)


def check_embeddings(embeddings: Any, hidden_size: int) -> tuple[MMEmbedding, ...]:
    """Injected embeddings as they were asked for: None, one, or a list."""
    if embeddings is None:
        return ()
    embedding_list = list(embeddings) if isinstance(embeddings, list | tuple) else [embeddings]
    for one in embedding_list:
        if not isinstance(one, MMEmbedding):
            raise InputError(
                f"embeddings must be MMEmbedding objects, found {type(one).__name__}: wrap vectors as "
                "MMEmbedding(model, vectors) and put its text_alias, or its ids, into the prompt."
            )
        if one.embeddings.shape[1] != hidden_size:
            raise InputError(
                f"Embedding {one.text_alias!r} has vectors of {one.embeddings.shape[1]} numbers, but the "
                f"model's hidden size is {hidden_size}: it was made for another model."
            )
    return tuple(embedding_list)


def check_ids(ids: Sequence[int], embeddings: Sequence[MMEmbedding], vocab_size: int) -> None:
    """Refuse ids that are neither tokens nor an embedding's."""
    if not ids or max(ids) < vocab_size:
        return
    invalid = next((number for number in ids if vocab_size <= number < EMBEDDING_INDEX), None)
    if invalid is not None:
        raise InputError(
            f"Token id {invalid} is outside the vocabulary of {vocab_size}. Was the text encoded with "
            "another model's tokenizer?"
        )
    for _ in embedding_spans(ids, embeddings):
        pass


def uses_mrope(model: spec.Model) -> bool:
    """Whether positions have three planes in this model."""
    return any(layer.attn.rope is not None and layer.attn.rope.mrope_sections for layer in model.layers)


def prompt_mrope_positions(
    model: spec.Model, ids: Sequence[int], embeddings: Sequence[MMEmbedding], start: int = 0
) -> Tensor | None:
    """(3, ids) positions where pictures make them differ from the plain ones; None elsewhere."""
    pictures = any(one.thw_grid is not None for one in embeddings)
    return mrope_positions(ids, embeddings, start) if pictures and uses_mrope(model) else None
