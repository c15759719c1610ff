"""Embeddings that take the place of tokens in a prompt: images, or anything else that was encoded elsewhere.

`MMEmbedding` takes vectors in the model's hidden size and reserves token ids that no other embedding has, so
that the prefix cache treats them like tokens; it is immutable, since cached pages are found by its ids. The functions
give the spans of embeddings in a list of ids, and M-RoPE positions. `model` and the public package import this module;
`model` writes the vectors into a batch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .errors import InputError
from .tokenizer import EMBEDDING_INDEX

__all__ = ["EMBEDDING_INDEX", "EmbeddingSpan", "MMEmbedding", "embedding_spans", "mrope_positions"]


class HasHiddenSize(Protocol):
    @property
    def hidden_size(self) -> int: ...


class HasConfig(Protocol):
    """The part of a model that an embedding needs."""

    @property
    def config(self) -> HasHiddenSize: ...


class MMEmbedding:
    """Vectors that take the place of tokens wherever `text_alias` occurs in a prompt.

    `embeddings` is (length, hidden_size), scaled like the model's residual stream; it is copied. `thw_grid`
    (frames, rows and columns of patches, which may be merged k by k) gives an image its positions in models
    with M-RoPE; the first `pre_tokens` and last `post_tokens` vectors are text around the image. Each
    object has ids that no other in the process has, so prompts share cached pages only if they use the same object.
    """

    _next_id: ClassVar[int] = EMBEDDING_INDEX
    _id_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        model: HasConfig,
        embeddings: Tensor,
        text_alias: str | None = None,
        thw_grid: Sequence[int] | None = None,
        pre_tokens: int = 0,
        post_tokens: int = 0,
    ) -> None:
        self.model = model
        self.embeddings = _checked_vectors(embeddings, model.config.hidden_size)
        self.length = len(self.embeddings)
        for name, count in (("pre_tokens", pre_tokens), ("post_tokens", post_tokens)):
            if not isinstance(count, int):
                raise InputError(f"{name} must be a whole number, found {count!r}.")
        self.pre_tokens, self.post_tokens = pre_tokens, post_tokens
        if min(pre_tokens, post_tokens) < 0 or pre_tokens + post_tokens >= self.length:
            raise InputError(
                f"{pre_tokens} tokens before and {post_tokens} after a picture leave none of {self.length}."
            )
        self.thw_grid = None if thw_grid is None else _checked_grid(thw_grid, self.length - pre_tokens - post_tokens)
        with self._id_lock:
            self.first_index = MMEmbedding._next_id
            MMEmbedding._next_id += self.length
        self.text_alias = f"<$EMB_{self.first_index}$>" if text_alias is None else text_alias
        if not isinstance(self.text_alias, str) or not self.text_alias:
            raise InputError(
                f"An embedding's text_alias must be a text, found {text_alias!r}: leave it out to get one."
            )
        self.metadata: dict[str, Any] = {}

    def get_ids(self) -> list[int]:
        """Its ids, in order."""
        return list(range(self.first_index, self.first_index + self.length))

    def get_ids_tensor(self) -> Tensor:
        """Its ids as a tensor (1, length)."""
        return torch.tensor([self.get_ids()])

    def get_vision_token_range(self) -> tuple[int, int]:
        """The range of the image's ids, without the text around it: the first, and one past the last."""
        first = self.first_index
        return first + self.pre_tokens, first + self.length - self.post_tokens

    def get_size_in_bytes(self) -> int:
        """The size of the vectors in bytes."""
        return self.embeddings.nbytes

    @property
    def grid(self) -> tuple[int, int, int] | None:
        """Frames, rows and columns of vectors: `thw_grid` after patches are merged."""
        if self.thw_grid is None:
            return None
        frames, rows, columns = self.thw_grid
        first, last = self.get_vision_token_range()
        merge_size = _merge_size(self.thw_grid, last - first)
        return frames, rows // merge_size, columns // merge_size


def _checked_vectors(vectors: object, width: int) -> Tensor:
    if not isinstance(vectors, Tensor):
        raise InputError(f"embeddings must be a tensor of (length, {width}), found {type(vectors).__name__}.")
    if vectors.dim() == 3 and vectors.shape[0] == 1:
        vectors = vectors[0]
    if vectors.dim() != 2 or vectors.shape[1] != width or not len(vectors):
        raise InputError(
            "Embedding dimension doesn't match model hidden dimension: expected shape (length, "
            f"{width}), found {tuple(vectors.shape)}."
        )
    if not vectors.is_floating_point():
        raise InputError(f"embeddings must be floats, found {vectors.dtype}.")
    if not bool(vectors.isfinite().all()):
        raise InputError("embeddings hold NaN or infinite numbers.")
    return vectors.detach().clone()


def _checked_grid(thw_grid: Sequence[int], count: int) -> tuple[int, int, int]:
    sizes = thw_grid.tolist() if isinstance(thw_grid, Tensor) else thw_grid
    items = sizes if isinstance(sizes, Iterable) else ()
    grid = tuple(size.item() if isinstance(size, Tensor) and not size.dim() else size for size in items)
    is_valid = len(grid) == 3 and all(isinstance(size, Integral) and size >= 1 for size in grid)
    if not is_valid or not _merge_size(grid, count):
        raise InputError(
            f"thw_grid must be three sizes whose product, rows and columns possibly merged, is {count} (the "
            f"vectors without pre_tokens and post_tokens), found {sizes!r}."
        )
    frames, rows, columns = grid
    return int(frames), int(rows), int(columns)


def _merge_size(grid: tuple[int, ...], count: int) -> int:
    """The side k of the k × k patches that one vector stands for; 0 if none fits."""
    frames, rows, columns = map(int, grid)
    side = math.isqrt(frames * rows * columns // count) if count else 0
    fits = side and rows % side == columns % side == 0 and frames * rows * columns == count * side**2
    return side if fits else 0


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
