"""Vectors in place of tokens, as the old calls take them: made into embeddings that a job can bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import EMBEDDING_INDEX, InputError, MMEmbedding, Model

EMBED_HERE = "{{EMBED_HERE}}"
"""Where a prompt wants its vectors."""


def embed_in_texts(model: Model, given: Any, prompts: Sequence[str]) -> list[tuple[str, list[MMEmbedding]]]:
    """Each prompt and the embeddings it may name.

    Vectors (prompts, n, hidden) become an embedding for each prompt, named in the place the prompt marks for
    it; whitespace next to the mark goes. Embeddings that exist are named by the prompts themselves.
    """
    if not isinstance(given, Tensor):
        return [(prompt, _embedding_list(given)) for prompt in prompts]
    embeddings = _embeddings_from_vectors(model, given, len(prompts))
    out = []
    for prompt, one in zip(prompts, embeddings, strict=True):
        before, *rest = prompt.split(EMBED_HERE)
        if len(rest) != 1:
            raise InputError(
                f"A prompt with input_embeddings must contain {EMBED_HERE} exactly once, found {len(rest)}."
            )
        out.append((before.rstrip() + one.text_alias + rest[0].lstrip(), [one]))
    return out


def embed_in_ids(model: Model, given: Any, ids: Tensor) -> tuple[Tensor, list[MMEmbedding]]:
    """Ids (rows, n) and the embeddings they may hold.

    Vectors (rows, n, hidden) become an embedding for each row, and 10⁹ + i in it, the old number of vector i,
    becomes its new number.
    """
    if not isinstance(given, Tensor):
        return ids, _embedding_list(given)
    embeddings = _embeddings_from_vectors(model, given, len(ids))
    rows = []
    for row, one in zip(ids, embeddings, strict=True):
        last = EMBEDDING_INDEX + one.length - 1
        if not EMBEDDING_INDEX <= int(row.max()) <= last:
            raise InputError(
                f"input_ids must hold {EMBEDDING_INDEX} to {last} where the {one.length} vectors of "
                f"input_embeddings belong; the highest id is {int(row.max())}."
            )
        rows.append(torch.where(row >= EMBEDDING_INDEX, row + (one.first_index - EMBEDDING_INDEX), row))
    return torch.stack(rows), embeddings


def _embeddings_from_vectors(model: Model, vectors: Tensor, rows: int) -> list[MMEmbedding]:
    if vectors.dim() != 3 or len(vectors) != rows:
        raise InputError(
            f"input_embeddings must be ({rows}, n, {model.config.hidden_size}), found {tuple(vectors.shape)}."
        )
    return [MMEmbedding(model, row) for row in vectors]


def _embedding_list(given: Any) -> list[MMEmbedding]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
