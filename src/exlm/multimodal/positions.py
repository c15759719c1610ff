"""Where embeddings stand among ids, and where their tokens stand in three planes of positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..tokenizer import EMBEDDING_INDEX
from .embeddings import MMEmbedding


class EmbeddingSpan(NamedTuple):
    """A run of ids that belong to one embedding."""

    start: int  # the index of the run's first id
    offset: int  # which of the embedding's vectors that is
    length: int
    embedding: MMEmbedding

    @property
    def vectors(self) -> Tensor:
        """(length, hidden)."""
        return self.embedding.embeddings[self.offset : self.offset + self.length]


def embedding_spans(ids: Sequence[int], embeddings: Sequence[MMEmbedding]) -> Iterator[EmbeddingSpan]:
    """The runs of embedded ids, from left to right; an id of none of the embeddings is an error."""
    index = 0
    while index < len(ids):
        if ids[index] < EMBEDDING_INDEX:
            index += 1
            continue
        found = _embedding_of(ids[index], embeddings)
        offset = ids[index] - found.first_index
        stop = index + 1
        while (
            stop < len(ids)
            and stop - index < found.length - offset
            and ids[stop] == ids[index] + stop - index
        ):
            stop += 1
        yield EmbeddingSpan(index, offset, stop - index, found)
        index = stop


def mrope_positions(ids: Sequence[int], embeddings: Sequence[MMEmbedding], start: int = 0) -> Tensor:
    """(3, ids) positions of frame, row and column, the first id at `start`.

    Text moves on in all three at once. A picture with a grid begins at the next free position; what follows
    it begins behind the largest one it used.
    """
    out = torch.arange(start, start + len(ids)).repeat(3, 1)
    for span in embedding_spans(ids, embeddings):
        grid = span.embedding.grid
        if grid is None:
            continue
        first, last = (
            index - span.embedding.first_index for index in span.embedding.get_vision_token_range()
        )
        begin, end = max(span.offset, first), min(span.offset + span.length, last)
        if begin >= end:
            continue
        grid_start, grid_stop = span.start + begin - span.offset, span.start + end - span.offset
        cell_index = torch.arange(begin - first, end - first)
        _, rows, columns = grid
        cells = torch.stack(
            (cell_index // (rows * columns), cell_index // columns % rows, cell_index % columns)
        )
        out[:, grid_start:grid_stop] = out[:, grid_start : grid_start + 1] + cells
        out[:, grid_stop:] += (
            int(out[:, grid_start:grid_stop].max()) + 1 - int(out[0, grid_stop])
            if grid_stop < len(ids)
            else 0
        )
    return out


def _embedding_of(token_id: int, embeddings: Sequence[MMEmbedding]) -> MMEmbedding:
    for one in embeddings:
        if one.first_index <= token_id < one.first_index + one.length:
            return one
    known = ", ".join(f"{one.first_index} to {one.first_index + one.length - 1}" for one in embeddings)
    raise InputError(
        f"Id {token_id} stands for an injected embedding, but none was given that owns it (given: "
        f"{known or 'none'}). Pass the embedding it came from in embeddings=."
    )
