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
from .edits import restrict


class Constraint:
    """What filters allow next, and which tokens would end the text."""

    def __init__(self, filters: Sequence[Any], eos: int | None = None) -> None:
        """Ask the filters. `eos` is the token to insist on as soon as they allow it, None for none."""
        masking = bool(filters) and all(_can_mask(each) for each in filters)
        self._maskers: Sequence[Any] = filters if masking else ()
        self._passes: set[int] | None = None
        self._ends: set[int] = set()
        for each in self._maskers:
            if not (each.get_next(mask=True) if hasattr(each, "get_next") else each.prepare_logit_mask()):
                raise InputError(
                    "Attempting to use precomputed logit mask, but filter is not precomputing mask."
                )
        for each in () if masking else filters:
            passes, ends = each.get_next() if hasattr(each, "get_next") else each.next()
            self._ends |= set(ends or ())
            if passes is not None:
                self._passes = set(passes) if self._passes is None else self._passes & set(passes)
        if self._passes is not None and not self._passes:
            raise InputError("Filter excluded all tokens: what the filters allow has nothing in common.")
        if eos is not None and self._passes is not None and eos in self._passes:
            self._passes = {eos}

    def apply(self, x: Tensor) -> None:
        """Exclude from logits (vocab,), in place, what the filters do not allow."""
        for each in self._maskers:
            masked = each.mask_logits(x)
            x.copy_(
                torch.nn.functional.pad(masked, (0, max(0, len(x) - len(masked))), value=-torch.inf)[: len(x)]
            )
        if self._passes is not None:
            restrict(x, self._passes)

    def ended_by(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self._ends


def _can_mask(each: Any) -> bool:
    return hasattr(each, "can_mask_logits") and bool(each.can_mask_logits())
