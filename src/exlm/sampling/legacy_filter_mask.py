"""Constraint: what several filters together allow at one place of a text, for the direct call.

Generators prepare what their jobs' filters allow themselves, while the device works. Here filters are asked
on the spot, in the two ways the old library asked them: for sets of ids, or to mask logits themselves.
Anything with their methods is a filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .logits_processors import apply_allowed


class SampleFilterMask:
    """What filters allow next, and which tokens would end the text."""

    def __init__(self, filters: Sequence[Any], eos: int | None = None) -> None:
        """Ask the filters. `eos` is the token to insist on as soon as they allow it, None for none."""
        all_can_mask = bool(filters) and all(_supports_masks(each) for each in filters)
        self._masking_filters: Sequence[Any] = filters if all_can_mask else ()
        self._allowed_ids: set[int] | None = None
        self._end_ids: set[int] = set()
        for each in self._masking_filters:
            if not (each.get_next(mask=True) if hasattr(each, "get_next") else each.prepare_logit_mask()):
                raise InputError(
                    "Attempting to use precomputed logit mask, but filter is not precomputing mask."
                )
        for each in () if all_can_mask else filters:
            allowed, ends = each.get_next() if hasattr(each, "get_next") else each.next()
            self._end_ids |= set(ends or ())
            if allowed is not None:
                self._allowed_ids = (
                    set(allowed) if self._allowed_ids is None else self._allowed_ids & set(allowed)
                )
        if self._allowed_ids is not None and not self._allowed_ids:
            raise InputError("Filter excluded all tokens: what the filters allow has nothing in common.")
        if eos is not None and self._allowed_ids is not None and eos in self._allowed_ids:
            self._allowed_ids = {eos}

    def apply(self, x: Tensor) -> None:
        """Exclude from logits (vocab,), in place, what the filters do not allow."""
        for each in self._masking_filters:
            masked = each.mask_logits(x)
            x.copy_(
                torch.nn.functional.pad(masked, (0, max(0, len(x) - len(masked))), value=-torch.inf)[: len(x)]
            )
        if self._allowed_ids is not None:
            apply_allowed(x, self._allowed_ids)

    def ends_text(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self._end_ids


def _supports_masks(each: Any) -> bool:
    return hasattr(each, "can_mask_logits") and bool(each.can_mask_logits())
