"""A forward pass whose rows have a cache each: they began at different times and go on side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..kvcache import CacheBase
from .inputs import check_cache_room


def forward_per_row_caches(
    forward: Callable[..., Any],
    ids: Tensor,
    caches: Sequence[CacheBase],
    input_mask: Tensor | None,
    position_offsets: Tensor | None,
    positions: Tensor | None,
    **options: Any,
) -> Any:
    """What `forward` says for each row with its own cache: one row after the other, joined again."""
    if not isinstance(caches, list | tuple) or not all(isinstance(one, CacheBase) for one in caches):
        raise InputError(f"cache must be a cache or a list of caches, found {type(caches).__name__}.")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(caches) != len(ids) or len(ids) == 0:
        found = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"A list of {len(caches)} caches needs as many rows of input_ids, found {found}.")
    if len(set(map(id, caches))) < len(caches):
        raise InputError("A list of caches has one for each row; one of them is in it twice.")
    for cache in caches:
        check_cache_room(cache, 1, ids.shape[1])  # all of them first: no row goes on without the others
    outputs = [
        forward(
            ids[i : i + 1],
            cache,
            input_mask=None if input_mask is None else input_mask[i : i + 1],
            position_offsets=None if position_offsets is None else position_offsets[i : i + 1],
            positions=None if positions is None else positions[..., i : i + 1, :],
            **options,
        )
        for i, cache in enumerate(caches)
    ]
    if any(output is None for output in outputs):
        return None
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(column) for column in zip(*outputs, strict=True))
    return torch.cat(outputs)
