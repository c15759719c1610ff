"""The spans of embeddings in a list of ids, and the M-RoPE positions of all its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..tokenizer import EMBEDDING_INDEX
from .embeddings import MMEmbedding


class EmbeddingSpan(NamedTuple):
    """A run of consecutive ids of one embedding."""

    start: int  # index of the run's first id in the list
    offset: int  # index of that id's vector in the embedding
    length: int
    embedding: MMEmbedding

    @property
    def vectors(self) -> Tensor:
        """The vectors of the run, (length, hidden)."""
        return self.embedding.embeddings[self.offset : self.offset + self.length]


def embedding_spans(ids: Sequence[int], embeddings: Sequence[MMEmbedding]) -> Iterator[EmbeddingSpan]:
    """The spans of embeddings in `ids`, in order; InputError for an id that none of the embeddings has."""
    index = 0
    while index < len(ids):
        if ids[index] < EMBEDDING_INDEX:
            index += 1
            continue
        embedding = _embedding_of(ids[index], embeddings)
        offset = ids[index] - embedding.first_index
        stop = index + 1
        while stop < len(ids) and stop - index < embedding.length - offset and ids[stop] == ids[index] + stop - index:
            stop += 1
        yield EmbeddingSpan(index, offset, stop - index, embedding)
        index = stop


def mrope_positions(ids: Sequence[int], embeddings: Sequence[MMEmbedding], start: int = 0) -> Tensor:
    """M-RoPE positions (3, ids) of frame, row and column; the first id is at `start`.

    The positions of text increase in all three at once. An image with a grid starts at the next position, and
    the text after it starts one past the largest position of the image.
    """
    out = torch.arange(start, start + len(ids)).repeat(3, 1)
    for span in embedding_spans(ids, embeddings):
        grid = span.embedding.grid
        if grid is None:
            continue
        first, last = (index - span.embedding.first_index for index in span.embedding.get_vision_token_range())
        begin, end = max(span.offset, first), min(span.offset + span.length, last)
        if begin >= end:
            continue
        grid_start, grid_stop = span.start + begin - span.offset, span.start + end - span.offset
        cell_index = torch.arange(begin - first, end - first)
        _, rows, columns = grid
        cells = torch.stack((cell_index // (rows * columns), cell_index // columns % rows, cell_index % columns))
        out[:, grid_start:grid_stop] = out[:, grid_start : grid_start + 1] + cells
        if grid_stop < len(ids):
            out[:, grid_stop:] += int(out[:, grid_start:grid_stop].max()) + 1 - int(out[0, grid_stop])
    return out


def _embedding_of(token_id: int, embeddings: Sequence[MMEmbedding]) -> MMEmbedding:
    for embedding in embeddings:
        if embedding.first_index <= token_id < embedding.first_index + embedding.length:
            return embedding
    known = ", ".join(f"{one.first_index} to {one.first_index + one.length - 1}" for one in embeddings)
    raise InputError(
        f"Id {token_id} stands for an injected embedding, but none was given that owns it (given: "
        f"{known or 'none'}). Pass the embedding it came from in embeddings=."
    )
