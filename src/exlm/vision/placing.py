"""Where embeddings stand among ids, and where their tokens stand in three planes of positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..text import EMBEDDING_INDEX
from .embedding import MMEmbedding


class Placed(NamedTuple):
    """A run of ids that belong to one embedding."""

    start: int  # the index of the run's first id
    offset: int  # which of the embedding's vectors that is
    length: int
    embedding: MMEmbedding

    @property
    def vectors(self) -> Tensor:
        """(length, hidden)."""
        return self.embedding.embeddings[self.offset : self.offset + self.length]


def place(ids: Sequence[int], embeddings: Sequence[MMEmbedding]) -> Iterator[Placed]:
    """The runs of embedded ids, from left to right; an id of none of the embeddings is an error."""
    at = 0
    while at < len(ids):
        if ids[at] < EMBEDDING_INDEX:
            at += 1
            continue
        found = _owner(ids[at], embeddings)
        offset = ids[at] - found.first_index
        stop = at + 1
        while stop < len(ids) and stop - at < found.length - offset and ids[stop] == ids[at] + stop - at:
            stop += 1
        yield Placed(at, offset, stop - at, found)
        at = stop


def planes(ids: Sequence[int], embeddings: Sequence[MMEmbedding], start: int = 0) -> Tensor:
    """(3, ids) positions of frame, row and column, the first id at `start`.

    Text moves on in all three at once. A picture with a grid begins at the next free position; what follows
    it begins behind the largest one it used.
    """
    out = torch.arange(start, start + len(ids)).repeat(3, 1)
    for run in place(ids, embeddings):
        grid = run.embedding.grid
        if grid is None:
            continue
        first, last = (index - run.embedding.first_index for index in run.embedding.get_vision_token_range())
        begin, end = max(run.offset, first), min(run.offset + run.length, last)
        if begin >= end:
            continue
        at, stop = run.start + begin - run.offset, run.start + end - run.offset
        k = torch.arange(begin - first, end - first)
        _, rows, columns = grid
        cells = torch.stack((k // (rows * columns), k // columns % rows, k % columns))
        out[:, at:stop] = out[:, at : at + 1] + cells
        out[:, stop:] += int(out[:, at:stop].max()) + 1 - int(out[0, stop]) if stop < len(ids) else 0
    return out


def _owner(number: int, embeddings: Sequence[MMEmbedding]) -> MMEmbedding:
    for one in embeddings:
        if one.first_index <= number < one.first_index + one.length:
            return one
    known = ", ".join(f"{one.first_index} to {one.first_index + one.length - 1}" for one in embeddings)
    raise InputError(
        f"Id {number} stands for an injected embedding, but none was given that owns it (given: "
        f"{known or 'none'}). Pass the embedding it came from in embeddings=."
    )
