"""`FilterStack`: combines the filters of one job into one mask per step.

It intersects the masks of the filters, decides when EOS is forced, and computes masks in background threads
for the filters that ask for it. It accepts filters written for other libraries: they need no base class, take
tensors (1, 1), and may return sets, lists, token lists or masked logits. The sampler applies the mask.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ExlmError, InputError
from ..tokenizer import Codec
from .filter import FilterMask, HealingPrefix, MaskFilter
from .token_sets import (
    BITS_PER_WORD,
    Bitmask,
    bitmask_contains,
    bitmask_count,
    bitmask_from_bools,
    bitmask_from_ids,
    bitmask_ids,
    codec_of,
    resize_bitmask,
)

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 4

ALLOWS_ALL = FilterMask(None)

MAX_WHITESPACE_RUN = 16
"""Whitespace tokens in a row that an external filter may allow while its text is incomplete. Small models
would repeat whitespace until `max_new_tokens`; newlines and an indentation need fewer tokens than this."""


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that may be sampled next.

    `mask` is None when there is no constraint. A token in `end_ids` ends the generation; its text belongs to
    the completion. `forced_id` is the only allowed token, if there is just one.
    """

    mask: Bitmask | None
    end_ids: frozenset[int] = frozenset()
    forced_id: int | None = None


UNCONSTRAINED = AllowedTokens(None)


class FilterStack:
    """The filters of one job; used by one thread at a time.

    Call `begin`, then `allowed` and `feed` for each token, and `close` at the end; `start_background` may
    come before `allowed`. Errors are `ExlmError`s and concern this job only.

    An EOS that is forced, because nothing else is allowed or because of `prefer_eos`, is an end token.
    """

    def __init__(
        self, filters: Iterable[Any] | None, tokenizer: Any, prefer_eos: bool = False, *, width: int | None = None
    ) -> None:
        """`prefer_eos` forces EOS as soon as the filters allow it.

        `width` is the vocabulary size of the model, where that differs from the tokenizer's.
        """
        checked = _checked_filters(filters)
        self.prefer_eos = prefer_eos
        self._codec = codec = codec_of(tokenizer) if checked else None
        self._width = (codec.size if codec else 0) if width is None else width
        self._eos_ids = [n for n in codec.eos_ids if 0 <= n < self._width] if codec else []
        self._names = [type(item).__name__ for item in checked]
        self._filters = (
            [
                item.fresh_copy() if isinstance(item, MaskFilter) else _ExternalFilter(item, self._width, codec)
                for item in checked
            ]
            if codec
            else []
        )
        self._in_background = [member.use_background_worker() for member in self._filters]
        self._futures: list[Future[FilterMask] | None] = [None] * len(checked)
        self._fed_ids: list[int] = []
        self._allowed: AllowedTokens | None = None

    def __bool__(self) -> bool:
        """Whether there is any filter."""
        return bool(self._filters)

    def begin(self, prefix: HealingPrefix = "") -> None:
        """Start every filter; with token healing, `prefix` is the text that the first token repeats."""
        self._cancel_background()
        self._fed_ids.clear()
        for member in self._filters:
            if isinstance(member, _ExternalFilter):
                member.acquire(self)
            member.begin(prefix)

    def feed(self, token: int) -> None:
        """Pass the sampled token to every filter."""
        self._cancel_background()
        self._fed_ids.append(token)
        for member in self._filters:
            member.feed(token)

    def start_background(self, pool: Executor) -> None:
        """Compute the next masks of filters that ask for it in the pool; `allowed` collects them."""
        if self._allowed is not None:
            return
        for index, member in enumerate(self._filters):
            if self._in_background[index] and self._futures[index] is None:
                self._futures[index] = pool.submit(member.next_mask)

    def allowed(self) -> AllowedTokens:
        """The tokens allowed now; the same object until the next token is fed."""
        if self._allowed is None:
            self._allowed = self._intersect() if self._filters else UNCONSTRAINED
        return self._allowed

    def close(self) -> None:
        """Wait for background threads and release the filters, so that another job may use them."""
        self._cancel_background()
        for member in self._filters:
            if isinstance(member, _ExternalFilter):
                member.release(self)

    def _cancel_background(self) -> None:
        self._allowed = None
        for index, pending in enumerate(self._futures):
            self._futures[index] = None
            if pending is not None and not pending.cancel():
                pending.exception()

    def _collect_masks(self) -> list[FilterMask]:
        # First the filters without a background thread, while the threads work.
        filters_and_futures = list(zip(self._filters, self._futures, strict=True))
        masks = [ALLOWS_ALL if pending else member.next_mask() for member, pending in filters_and_futures]
        for index, (_, pending) in enumerate(filters_and_futures):
            if pending is not None:
                masks[index] = pending.result()
                self._futures[index] = None
        return masks

    def _intersect(self) -> AllowedTokens:
        masks = self._collect_masks()
        end_ids = frozenset().union(*(each.end_ids for each in masks))
        resized = [resize_bitmask(each.mask, self._width) for each in masks if each.mask is not None]
        if not resized:
            return AllowedTokens(None, end_ids)
        mask = reduce(np.bitwise_and, resized)
        num_allowed = bitmask_count(mask)
        if not num_allowed:
            raise InputError(self._no_token_message(masks))
        forced_id = self._forced_token(mask, num_allowed)
        if forced_id is None:
            return AllowedTokens(mask, end_ids)
        ends = end_ids | {forced_id} if forced_id in self._eos_ids else end_ids
        return AllowedTokens(bitmask_from_ids(np.array([forced_id]), self._width), ends, forced_id)

    def _forced_token(self, mask: Bitmask, num_allowed: int) -> int | None:
        """The only allowed token, or EOS where it is preferred; None where the model chooses."""
        eos = [number for number in self._eos_ids if bitmask_contains(mask, number)]
        if eos and (self.prefer_eos or num_allowed == len(eos)):
            return eos[0]
        return int(bitmask_ids(mask)[0]) if num_allowed == 1 else None

    def _no_token_message(self, masks: list[FilterMask]) -> str:
        counts = [
            (name, bitmask_count(resize_bitmask(each.mask, self._width)))
            for name, each in zip(self._names, masks, strict=True)
            if each.mask is not None
        ]
        names = " and ".join(f"{name} ({num_allowed} of {self._width} tokens)" for name, num_allowed in counts)
        text = self._codec.decode(self._fed_ids, continues=True) if self._codec else ""
        shown = repr(text if len(text) <= 200 else "…" + text[-200:])
        remedy = (
            "Each lets something pass, but nothing passes all: check that they describe the same text."
            if all(allowed for _, allowed in counts)
            else "Check that it describes a text this model can write."
        )
        return f"Filter excluded all tokens: {names} after the text {shown}. {remedy}"


class _ExternalFilter:
    """A filter of another library, called as exllamav2 calls it; not copied, as not every filter can be."""

    _owners: ClassVar[WeakValueDictionary[int, FilterStack]] = WeakValueDictionary()

    def __init__(self, original: Any, width: int, codec: Codec) -> None:
        self.name = type(original).__name__
        missing = [name for name in ("begin", "feed", "next") if not callable(getattr(original, name, None))]
        if missing or isinstance(original, type):
            found = f"the class {original.__name__} itself" if isinstance(original, type) else self.name
            lacks = f", which has no {' and no '.join(missing)}" if missing else ""
            raise InputError(f"A filter has methods begin, feed and next; found {found}{lacks}.")
        self._filter = original
        self._width = width
        self._tokenizer_size = codec.size
        self._codec = codec
        self._whitespace_run = 0
        self._has_is_completed = callable(getattr(original, "is_completed", None))
        self._can_mask_logits = self._query("can_mask_logits")

    def use_background_worker(self) -> bool:
        return self._query("use_background_worker")

    def acquire(self, stack: FilterStack) -> None:
        """Refuse a filter that another job uses: its state belongs to one text."""
        owner = self._owners.get(id(self._filter))
        if owner is not None and owner is not stack:
            raise InputError(f"The filter {self.name} is still used by another job: give each job a filter of its own.")
        self._owners[id(self._filter)] = stack

    def release(self, stack: FilterStack) -> None:
        if self._owners.get(id(self._filter)) is stack:
            del self._owners[id(self._filter)]

    def begin(self, prefix: HealingPrefix) -> None:
        self._whitespace_run = 0
        with self._wrap_errors("begin"):
            if callable(drop := getattr(self._filter, "background_drop", None)):
                drop()
            self._filter.begin(prefix)

    def feed(self, token_id: int) -> None:
        pieces = self._codec.vocab.pieces()
        is_whitespace = token_id < len(pieces) and pieces[token_id].isspace()
        self._whitespace_run = self._whitespace_run + 1 if is_whitespace else 0
        with self._wrap_errors("feed"):
            self._filter.feed(torch.tensor([[token_id]], dtype=torch.long))

    def next_mask(self) -> FilterMask:
        if self._can_mask_logits:
            try:
                return self._exclude_while_incomplete(self._mask_from_logits())
            except RuntimeError:  # some filters pin memory for their masks, which fails without a GPU
                self._can_mask_logits = False
        return self._exclude_while_incomplete(self._mask_from_ids())

    def _exclude_while_incomplete(self, allowed: FilterMask) -> FilterMask:
        """The mask without EOS, and without whitespace after a long run of it, until the filter is completed.

        formatron's engine knows EOS by its text only ("</s>"), which is valid within any JSON string, and its
        JSON allows unbounded whitespace between tokens. Tokens stay allowed where the mask would become
        empty.
        """
        if allowed.mask is None or not self._has_is_completed or self._query("is_completed"):
            return allowed
        allowed = _without(allowed, self._codec.eos_ids)
        if self._whitespace_run < MAX_WHITESPACE_RUN:
            return allowed
        pieces = self._codec.vocab.pieces()
        return _without(allowed, [token_id for token_id, piece in enumerate(pieces) if piece.isspace()])

    def _query(self, method_name: str) -> bool:
        method = getattr(self._filter, method_name, None)
        with self._wrap_errors(method_name):
            return bool(method()) if callable(method) else False

    def _mask_from_logits(self) -> FilterMask:
        with self._wrap_errors("prepare_logit_mask"):
            if not self._filter.prepare_logit_mask():
                raise InputError(
                    f"The filter {self.name} can mask logits, but its prepare_logit_mask() returned False."
                )
        with self._wrap_errors("mask_logits", passed_through=RuntimeError):
            logits = self._filter.mask_logits(torch.zeros(self._width, dtype=torch.float))
            is_allowed = ~torch.isneginf(logits.reshape(-1))
        if len(is_allowed) != self._width:
            raise InputError(f"The filter {self.name} masked {len(is_allowed)} logits, found {self._width} to mask.")
        is_allowed[self._tokenizer_size :] = False
        return FilterMask(bitmask_from_bools(is_allowed.numpy()))

    def _mask_from_ids(self) -> FilterMask:
        with self._wrap_errors("next"):
            found = self._filter.next()
        allowed, ends = found if isinstance(found, tuple) and len(found) == 2 else (found, ())
        end_ids = frozenset(self._checked_ids(ends).tolist())
        if allowed is None:
            return FilterMask(None, end_ids)
        if getattr(allowed, "use_bitmask", False):
            return FilterMask(np.asarray(allowed.allowed_tokens, np.int32).copy(), end_ids)
        token_ids = self._checked_ids(getattr(allowed, "allowed_tokens", allowed))
        return FilterMask(bitmask_from_ids(token_ids, max(self._width, self._tokenizer_size)), end_ids)

    def _checked_ids(self, found: Any) -> NDArray[np.int64]:
        """Any collection of ids as an array; ids beyond both vocabularies are an error."""
        if not isinstance(found, Iterable) or isinstance(found, str | bytes):
            raise InputError(f"The filter {self.name} must answer with ids of tokens, found {type(found).__name__}.")
        ids = np.asarray(found if isinstance(found, np.ndarray | torch.Tensor) else list(found)).reshape(-1)
        if not len(ids):
            return np.zeros(0, np.int64)
        highest = max(self._width, self._tokenizer_size) - 1
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > highest:
            wrong = next((n for n in ids.tolist() if not isinstance(n, int) or not 0 <= n <= highest), None)
            raise InputError(f"The filter {self.name} named {wrong!r}; ids of tokens are 0 to {highest}.")
        return ids.astype(np.int64)

    @contextmanager
    def _wrap_errors(self, method: str, passed_through: type[Exception] = ExlmError) -> Iterator[None]:
        try:
            yield
        except (ExlmError, passed_through):
            raise
        except Exception as error:
            raise InputError(f"The filter {self.name} failed in {method}(): {type(error).__name__}: {error}") from error


def _without(allowed: FilterMask, token_ids: Iterable[int]) -> FilterMask:
    """The mask without these tokens, unless that leaves none."""
    assert allowed.mask is not None
    width = BITS_PER_WORD * len(allowed.mask)
    known = np.array([token_id for token_id in token_ids if 0 <= token_id < width], np.int64)
    others = allowed.mask & ~bitmask_from_ids(known, width)
    return allowed._replace(mask=others) if others.any() else allowed


def _checked_filters(filters: Iterable[Any] | None) -> list[Any]:
    if filters is None:
        return []
    if not isinstance(filters, Iterable):
        raise InputError(f"Filters are given as a list, found one {type(filters).__name__}: write [filter].")
    checked = list(filters)
    for index, item in enumerate(checked):
        if any(item is other for other in checked[:index]) and not isinstance(item, MaskFilter):
            raise InputError(f"The filter {type(item).__name__} is in the list twice.")
    return checked


class FilterThreadPool(Executor):
    """The threads in which filters compute masks while the device works.

    A forked process has none of its parent's threads, so it creates its own.
    """

    def __init__(self) -> None:
        self._create_pool()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in one of the threads."""
        if self._owner_pid != os.getpid():
            self._create_pool()
        return self._pool.submit(fn, *args, **kwargs)

    def _create_pool(self) -> None:
        self._owner_pid = os.getpid()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "exlm-filter")
