"""The base classes of filters, which decide token by token what may come next.

Programs and integrations subclass `Filter`, whose methods are exllamav2's. exlm's own filters subclass
`MaskFilter` and give packed bitmasks. `stack` decides how the filters of a job work together.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, Self, TypeAlias

import torch

from ..errors import InputError
from .token_sets import Bitmask, bitmask_ids, codec_of

HealingPrefix: TypeAlias = str | Sequence[str] | None
"""With token healing, the end of the prompt, which the first token repeats; else None or an empty text."""

NextTokens: TypeAlias = tuple[Collection[int] | None, Collection[int]]
"""The allowed tokens (None for all of them), and those that end the generation when sampled."""


class Filter:
    """The base class of filters: override `begin`, `feed` and `next`.

    A filter serves one job at a time. Any object with these three methods works as a filter; it need not
    subclass this.
    """

    allow_return_type_list = True
    sequence_str: str = ""
    background_result: Future[Any] | None = None

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Keep the model and the tokenizer."""
        self.model = model
        self.tokenizer = tokenizer
        self.sequence_str = ""
        self.background_result = None

    def begin(self, prefix_str: Any) -> None:
        """Start, or start again. The text of the first token begins with `prefix_str`, if any."""
        raise NotImplementedError

    def feed(self, token: Any) -> None:
        """Take the token that was sampled, an id in a tensor (1, 1)."""
        raise NotImplementedError

    def next(self) -> NextTokens:
        """The allowed tokens and the end tokens of this step."""
        raise NotImplementedError

    def use_background_worker(self) -> bool:
        """Whether `next` (or `prepare_logit_mask`) should run in a background thread."""
        return False

    def can_mask_logits(self) -> bool:
        """Whether `mask_logits` may be used instead of `next`."""
        return False

    def prepare_logit_mask(self) -> bool:
        """Compute what `mask_logits` needs; True if that succeeded."""
        raise NotImplementedError

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (vocabulary,) with minus infinity for each token that is not allowed."""
        raise NotImplementedError

    def background_next(self, pool: Executor) -> None:
        """Call `next` in the pool; `get_next` returns the result."""
        self._submit(pool, mask=False)

    def background_prepare_logit_mask(self, pool: Executor) -> None:
        """Call `prepare_logit_mask` in the pool; `get_next` returns the result."""
        self._submit(pool, mask=True)

    def background_drop(self) -> None:
        """Wait for the background call and drop its result."""
        pending, self.background_result = self.background_result, None
        if pending is not None and not pending.cancel():
            pending.exception()

    def get_next(self, mask: bool = False) -> Any:
        """The background call's result, else `next()`, or `prepare_logit_mask()` with `mask`."""
        pending, self.background_result = self.background_result, None
        if pending is not None:
            return pending.result()
        return self.prepare_logit_mask() if mask else self.next()

    def clone(self, c: Any = None) -> Any:
        """A copy in the same state; given an object `c`, copy only the base class's attributes onto it."""
        if c is None:
            c = copy.copy(self)
        c.model = self.model
        c.tokenizer = self.tokenizer
        c.sequence_str = self.sequence_str
        c.background_result = None
        return c

    def _submit(self, pool: Executor, mask: bool) -> None:
        if self.background_result is not None:
            raise InputError(f"{type(self).__name__} already has a result pending: call get_next() first.")
        self.background_result = pool.submit(self.prepare_logit_mask if mask else self.next)


class FilterMask(NamedTuple):
    """The allowed tokens (None for all of them), and those that end the generation when sampled."""

    mask: Bitmask | None
    end_ids: frozenset[int] = frozenset()


class MaskFilter(Filter):
    """A filter whose masks are packed bits, as wide as the tokenizer; `feed` takes plain ints as well.

    Each job works on a fresh copy, so one filter may be passed to many jobs.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Keep the tokenizer's codec; the model is not used and may be None."""
        super().__init__(model, tokenizer)
        self.codec = codec_of(tokenizer)

    def fresh_copy(self) -> Self:
        """A copy for another job: at its start, and sharing nothing that changes."""
        copied: Self = self.clone()
        copied.begin("")
        return copied

    def next_mask(self) -> FilterMask:
        """The mask of this step; it is empty only after a token that the filter had not allowed."""
        raise NotImplementedError

    def next(self) -> tuple[set[int] | None, set[int]]:
        """The allowed tokens and the end tokens of this step, as sets."""
        mask, end_ids = self.next_mask()
        return None if mask is None else set(bitmask_ids(mask).tolist()), set(end_ids)


def prefix_text(prefix: HealingPrefix) -> str:
    """The prefix as text; exllamav2 passes a list with one element per sequence."""
    if prefix is None or isinstance(prefix, str):
        return prefix or ""
    if len(prefix) != 1:
        raise InputError(f"Filters work on one sequence at a time, found a batch of {len(prefix)}.")
    return prefix[0]
