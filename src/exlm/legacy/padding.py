"""Rows of ids: the padded tensors of the old calls on one side, ids without padding on the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import InputError


class TruncationWarning(UserWarning):
    """A prompt was cut from the left so that the reply has room; the message says by how much."""


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Rows as one tensor (rows, longest), padded on the left."""
    longest = max(map(len, rows), default=0)
    table = [[pad] * (longest - len(row)) + list(row) for row in rows]
    return torch.tensor(table, dtype=torch.long).reshape(len(rows), longest)


def id_lists(ids: Tensor | Sequence[int]) -> list[list[int]]:
    """Rows of ids as lists, from a tensor or a list of one row or several."""
    try:
        table = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Expected ids in a tensor or a list, found {ids!r:.80}.") from error
    if table.dim() not in (1, 2) or (table.is_floating_point() and table.numel()):
        raise InputError(f"Expected whole numbers in rows, found {table.dtype} {tuple(table.shape)}.")
    found: list[list[int]] = (table if table.dim() == 2 else table[None]).tolist()
    return found


def strip_padding(ids: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None) -> list[Tensor]:
    """The rows of ids (rows, n), each (1, its own length).

    Padding is on the left; `mask` hides it (0 or minus infinity, or True and False), `offsets` are minus its
    length in each row. Where both are given the offsets say what is padding: a mask made by its id hides the
    same id in a prompt too, such as a BOS or an EOS between turns that pads as well.
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
    """The padding of each row."""
    padding = [-int(offset) for offset in offsets.flatten().tolist()]
    if len(padding) != len(ids) or any(not 0 <= shift < ids.shape[1] for shift in padding):
        raise InputError(
            f"position_offsets must be minus the padding of each of {len(ids)} rows, found "
            f"{[-shift for shift in padding]}."
        )
    return padding


def _visible_mask(mask: Tensor, rows: int, width: int) -> Tensor:
    """Which tokens a mask shows (rows, width); those it does not speak of are shown."""
    if mask.dim() != 2 or len(mask) != rows or mask.shape[1] > width:
        raise InputError(f"input_mask must be ({rows}, at most {width}), found {tuple(mask.shape)}.")
    visible = mask if mask.dtype is torch.bool else mask > -1.0
    rest = torch.ones(rows, width - mask.shape[1], dtype=torch.bool, device=mask.device)
    return torch.cat((visible, rest), 1)


def _check_mask_matches_offsets(ids: Tensor, visible: Tensor, padding: list[int]) -> None:
    """Refuse a mask that shows padding, or hides more than one id: then it is not the padding it hides."""
    shows_padding = any(bool(row[:shift].any()) for row, shift in zip(visible, padding, strict=True))
    if shows_padding or len(set(ids[~visible.to(ids.device)].tolist())) > 1:
        hidden = (~visible).sum(1).tolist()
        raise InputError(f"input_mask hides {hidden} tokens, but position_offsets speak of {padding}.")


def _padding_from_mask(visible: Tensor) -> list[int]:
    """How many tokens a mask hides at the beginning of each row; it may hide no others."""
    counts: list[int] = (~visible).sum(1).tolist()
    for row, count in zip(visible, counts, strict=True):
        if count == len(row) or bool(row[:count].any()):
            raise InputError("input_mask may hide only padding on the left, not tokens of the prompt.")
    return counts
