"""Filter: the protocol by which something decides, token by token, what may come next.

`Filter` is the base class that integrations subclass; `MaskFilter` is what exlm's own filters are, and
answers in packed bits. How the filters of a job work together is decided in `stack`, not here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, Self, TypeAlias

import torch

from ..errors import InputError
from .bitmask import Bitmask, to_ids
from .token_trie import codec_of

HealingPrefix: TypeAlias = str | Sequence[str] | None
"""Text that the first token will repeat before anything new: none, or the end of a prompt being healed."""

NextTokens: TypeAlias = tuple[Collection[int] | None, Collection[int]]
"""The tokens that pass (None for all of them), and those that end the generation if they are chosen."""


class Filter:
    """The base class of filters: override `begin`, `feed` and `next`.

    A filter belongs to one job at a time. Filters that need no base class work as well, as long as they have
    those three methods.
    """

    allow_return_type_list = True
    sequence_str: str = ""
    background_result: Future[Any] | None = None

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Remember what the filter is for."""
        self.model = model
        self.tokenizer = tokenizer
        self.sequence_str = ""
        self.background_result = None

    def begin(self, prefix_str: Any) -> None:
        """Start, or start again; the first token will begin with the prefix (see `Prefix`), if any."""
        raise NotImplementedError

    def feed(self, token: Any) -> None:
        """Take the token that was chosen, an id in a tensor (1, 1)."""
        raise NotImplementedError

    def next(self) -> NextTokens:
        """What may come now."""
        raise NotImplementedError

    def use_background_worker(self) -> bool:
        """Whether `next` (or `prepare_logit_mask`) is worth another thread and may run in one."""
        return False

    def can_mask_logits(self) -> bool:
        """Whether `mask_logits` may be used instead of `next`."""
        return False

    def prepare_logit_mask(self) -> bool:
        """Compute what `mask_logits` needs; True when it is ready."""
        raise NotImplementedError

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (vocabulary,) with minus infinity where a token must not come."""
        raise NotImplementedError

    def background_next(self, pool: Executor) -> None:
        """Let the pool call `next`; `get_next` returns the result."""
        self._submit(pool, mask=False)

    def background_prepare_logit_mask(self, pool: Executor) -> None:
        """Let the pool call `prepare_logit_mask`."""
        self._submit(pool, mask=True)

    def background_drop(self) -> None:
        """Wait for a result in the making and forget it."""
        pending, self.background_result = self.background_result, None
        if pending is not None and not pending.cancel():
            pending.exception()

    def get_next(self, mask: bool = False) -> Any:
        """The result in the making, or `next()`; with `mask`, `prepare_logit_mask()`."""
        pending, self.background_result = self.background_result, None
        if pending is not None:
            return pending.result()
        return self.prepare_logit_mask() if mask else self.next()

    def clone(self, c: Any = None) -> Any:
        """A filter in the same state; onto a given object only the base class's attributes are copied."""
        if c is None:
            c = copy.copy(self)
        c.model = self.model
        c.tokenizer = self.tokenizer
        c.sequence_str = self.sequence_str
        c.background_result = None
        return c

    def _submit(self, pool: Executor, mask: bool) -> None:
        if self.background_result is not None:
            raise InputError(
                f"{type(self).__name__} already has a result in the making: call get_next() first."
            )
        self.background_result = pool.submit(self.prepare_logit_mask if mask else self.next)


class FilterMask(NamedTuple):
    """The tokens that pass (None for all of them), and those that end the generation if chosen."""

    mask: Bitmask | None
    end_ids: frozenset[int] = frozenset()


class MaskFilter(Filter):
    """A filter that answers in packed bits, as wide as the tokenizer; `feed` takes numbers too.

    Jobs work on a renewed one each, so one may be given to many jobs.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Only the tokenizer is used; the model may be None."""
        super().__init__(model, tokenizer)
        self.codec = codec_of(tokenizer)

    def renewed(self) -> Self:
        """The same filter for another job: at its start, and sharing nothing that changes."""
        copied: Self = self.clone()
        copied.begin("")
        return copied

    def answer(self) -> FilterMask:
        """What may come now; never empty by itself unless the filter was fed what it did not allow."""
        raise NotImplementedError

    def next(self) -> tuple[set[int] | None, set[int]]:
        """What may come now."""
        mask, end_ids = self.answer()
        return None if mask is None else set(to_ids(mask).tolist()), set(end_ids)


def prefix_text(prefix: HealingPrefix) -> str:
    """The prefix as a text; of the list that a batch brings, its only element."""
    if prefix is None or isinstance(prefix, str):
        return prefix or ""
    if len(prefix) != 1:
        raise InputError(f"Filters work on one sequence at a time, found a batch of {len(prefix)}.")
    return prefix[0]
