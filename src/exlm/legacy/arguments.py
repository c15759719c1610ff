"""Arguments of exllamav2's generators, converted to those of jobs.

Padded id tensors with masks become rows without padding, and `input_embeddings` tensors `MMEmbedding`s;
`ban_tokens` and filters have several forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..model import Model
from ..model.inputs import EMBED_HERE
from ..multimodal import EMBEDDING_INDEX, MMEmbedding
from ..sampling import Settings


class TruncationWarning(UserWarning):
    """A prompt was truncated from the left to leave room for the completion; the message says by how much."""


def id_lists(ids: Tensor | Sequence[int]) -> list[list[int]]:
    """Rows of ids as lists, from a tensor or a list of one row or several."""
    try:
        table = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Expected ids in a tensor or a list, found {ids!r:.80}.") from error
    if table.dim() not in (1, 2) or (table.is_floating_point() and table.numel()):
        raise InputError(f"Expected whole numbers in rows, found {table.dtype} {tuple(table.shape)}.")
    rows: list[list[int]] = (table if table.dim() == 2 else table[None]).tolist()
    return rows


def strip_padding(ids: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None) -> list[Tensor]:
    """The rows of ids (rows, n), each (1, its own length).

    Padding is on the left. `mask` is False or minus infinity there, `offsets` are minus its length.
    With both, the offsets decide: a mask made by comparing with the padding id also hides that id within a
    prompt, where it may be a BOS or an EOS between turns.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"input_ids must be an integer tensor of (rows, tokens), found {found}.")
    visible = None if mask is None else _visible_mask(mask, *ids.shape)
    if offsets is not None:
        padding = _padding_from_offsets(offsets, ids)
        if visible is not None:
            _check_mask_matches_offsets(ids, visible, padding)
    else:
        padding = [0] * len(ids) if visible is None else _padding_from_mask(visible)
    return [ids[row : row + 1, num_padding:] for row, num_padding in enumerate(padding)]


def _padding_from_offsets(offsets: Tensor, ids: Tensor) -> list[int]:
    """The number of padding ids of each row."""
    padding = [-int(offset) for offset in offsets.flatten().tolist()]
    if len(padding) != len(ids) or any(not 0 <= count < ids.shape[1] for count in padding):
        raise InputError(
            f"position_offsets must be minus the padding of each of {len(ids)} rows, found "
            f"{[-count for count in padding]}."
        )
    return padding


def _visible_mask(mask: Tensor, rows: int, width: int) -> Tensor:
    """Which tokens a mask leaves visible, as bool (rows, width); tokens beyond the mask are visible."""
    if mask.dim() != 2 or len(mask) != rows or mask.shape[1] > width:
        raise InputError(f"input_mask must be ({rows}, at most {width}), found {tuple(mask.shape)}.")
    visible = mask if mask.dtype is torch.bool else mask > -1.0
    rest = torch.ones(rows, width - mask.shape[1], dtype=torch.bool, device=mask.device)
    return torch.cat((visible, rest), 1)


def _check_mask_matches_offsets(ids: Tensor, visible: Tensor, padding: list[int]) -> None:
    """Refuse a mask that leaves padding visible or hides more than one id, which cannot be the padding id."""
    shows_padding = any(bool(row[:count].any()) for row, count in zip(visible, padding, strict=True))
    if shows_padding or len(set(ids[~visible.to(ids.device)].tolist())) > 1:
        hidden = (~visible).sum(1).tolist()
        raise InputError(f"input_mask hides {hidden} tokens, but position_offsets are minus {padding}.")


def _padding_from_mask(visible: Tensor) -> list[int]:
    """How many tokens a mask hides at the start of each row; hiding others is an error."""
    counts: list[int] = (~visible).sum(1).tolist()
    for row, count in zip(visible, counts, strict=True):
        if count == len(row) or bool(row[:count].any()):
            raise InputError("input_mask may hide only padding on the left, not tokens of the prompt.")
    return counts


def embed_in_texts(model: Model, given: Any, prompts: Sequence[str]) -> list[tuple[str, list[MMEmbedding]]]:
    """Each prompt with its embeddings.

    A tensor (prompts, n, hidden) becomes one embedding for each prompt; its alias replaces EMBED_HERE and
    the whitespace around it. `MMEmbedding`s are unchanged: the prompts contain their aliases.
    """
    if not isinstance(given, Tensor):
        return [(prompt, _embedding_list(given)) for prompt in prompts]
    embeddings = _embeddings_from_vectors(model, given, len(prompts))
    out = []
    for prompt, embedding in zip(prompts, embeddings, strict=True):
        before, *rest = prompt.split(EMBED_HERE)
        if len(rest) != 1:
            raise InputError(
                f"A prompt with input_embeddings must contain {EMBED_HERE} exactly once, found {len(rest)}."
            )
        out.append((before.rstrip() + embedding.text_alias + rest[0].lstrip(), [embedding]))
    return out


def embed_in_ids(model: Model, given: Any, ids: Tensor) -> tuple[Tensor, list[MMEmbedding]]:
    """Ids (rows, n) with their embeddings.

    A tensor (rows, n, hidden) becomes one embedding for each row, and the id 10⁹ + i, which stands for vector
    i in exllamav2's calls, becomes the id of that vector.
    """
    if not isinstance(given, Tensor):
        return ids, _embedding_list(given)
    embeddings = _embeddings_from_vectors(model, given, len(ids))
    rows = []
    for row, embedding in zip(ids, embeddings, strict=True):
        last = EMBEDDING_INDEX + embedding.length - 1
        if not EMBEDDING_INDEX <= int(row.max()) <= last:
            raise InputError(
                f"input_ids must hold {EMBEDDING_INDEX} to {last} where the {embedding.length} vectors of "
                f"input_embeddings belong; the highest id is {int(row.max())}."
            )
        rows.append(torch.where(row >= EMBEDDING_INDEX, row + (embedding.first_index - EMBEDDING_INDEX), row))
    return torch.stack(rows), embeddings


def banned_token_set(tokens: Any) -> frozenset[int]:
    """`ban_tokens` as a set: any iterable of ids, such as a list or a tensor."""
    try:
        return frozenset(map(index, () if tokens is None else tokens))
    except TypeError as error:
        raise InputError(f"ban_tokens must be a list of token ids, found {tokens!r:.80}.") from error


def filter_arguments(settings: Settings, filters: Sequence[Any] | None, prefer_eos: bool) -> dict[str, Any]:
    """A job's filter arguments: those of the call, or `settings.filters`, which early scripts set."""
    if not isinstance(settings, Settings):
        raise InputError(f"gen_settings must be Settings, found {type(settings).__name__}.")
    return {
        "filters": settings.filters if filters is None else filters,
        "filter_prefer_eos": prefer_eos or settings.filter_prefer_eos,
    }


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
