"""FilterStack: the filters of one job, as one answer a step.

It intersects what the filters let pass, decides when EOS is taken, and lets those that ask for it think in
other threads while the device works. It accepts filters written for other libraries: they are fed tensors
(1, 1), may answer with sets, lists, token lists or masked logits, and need no base class. Applying a mask is
the sampler's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ExlmError, InputError
from ..text import Codec
from .bits import WORD, Words, contains, count, fit, members, of, only, pack
from .filter import Answer, MaskFilter, Prefix
from .lexicon import codec_of

EVERYTHING = Answer(None)

LONGEST_WHITESPACE = 16
"""Tokens of whitespace in a row that a filter of another library may let pass before its text is complete:
small models write whitespace until their tokens run out. Some newlines and an indentation are fewer."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may come next.

    `mask` is the set of tokens as packed bits (see `bits`), None when there is no constraint. A token in
    `end` ends the generation, with its text included. `forced` is the token when there is only one to choose;
    the mask then holds just that one.
    """

    mask: Words | None
    end: frozenset[int] = frozenset()
    forced: int | None = None


UNLIMITED = Allowed(None)


class _Member(Protocol):
    """One filter of a stack, whoever wrote it."""

    name: str
    background: bool

    def begin(self, prefix: Prefix) -> None: ...

    def feed(self, number: int) -> None: ...

    def answer(self) -> Answer: ...


class FilterStack:
    """The filters of one job; used by one thread at a time.

    `begin`, then for each token `allowed` and `feed`; `start_background` may come before `allowed`, and
    `close` comes last. Errors are typed and concern this job only.

    An EOS that is forced, because nothing else passes or because `prefer_eos` takes it, is an end token.
    """

    def __init__(
        self,
        filters: Iterable[Any] | None,
        tokenizer: Any,
        prefer_eos: bool = False,
        *,
        width: int | None = None,
    ) -> None:
        """`prefer_eos` takes an EOS as soon as one passes.

        `width` is how many tokens the model has, where that differs from the tokenizer's number.
        """
        given = _listed(filters)
        self.prefer_eos = prefer_eos
        codec = codec_of(tokenizer) if given else None
        self._codec = codec
        size = codec.size if codec else 0
        self._width = size if width is None else width
        self._eos = tuple(n for n in codec.eos_ids if 0 <= n < self._width) if codec else ()
        self._members = [_member(item, self._width, codec) for item in given] if codec else []
        self._pending: list[Future[Answer] | None] = [None] * len(given)
        self._fed: list[int] = []
        self._now: Allowed | None = None

    def __bool__(self) -> bool:
        """Whether there is any filter."""
        return bool(self._members)

    def begin(self, prefix: Prefix = "") -> None:
        """Start every filter; the prefix, if any, is text that the first token repeats."""
        self._drop()
        self._fed.clear()
        for member in self._members:
            if isinstance(member, _Foreign):
                member.claim(self)
            member.begin(prefix)

    def feed(self, token: int) -> None:
        """Tell every filter which token was chosen."""
        self._drop()
        self._fed.append(token)
        for member in self._members:
            member.feed(token)

    def start_background(self, pool: Executor) -> None:
        """Let the filters that ask for it compute their next answer in the pool; `allowed` collects it."""
        if self._now is not None:
            return
        for place, member in enumerate(self._members):
            if member.background and self._pending[place] is None:
                self._pending[place] = pool.submit(member.answer)

    def allowed(self) -> Allowed:
        """What may come now; the same object until the next token is fed."""
        if self._now is None:
            self._now = self._combine() if self._members else UNLIMITED
        return self._now

    def close(self) -> None:
        """Wait for answers in the making and let go of the filters, so that another job may use them."""
        self._drop()
        for member in self._members:
            if isinstance(member, _Foreign):
                member.release(self)

    def _drop(self) -> None:
        self._now = None
        for place, pending in enumerate(self._pending):
            self._pending[place] = None
            if pending is not None and not pending.cancel():
                pending.exception()

    def _answers(self) -> list[Answer]:
        # Those that no thread works on first: the others go on meanwhile.
        both = list(zip(self._members, self._pending, strict=True))
        answers = [EVERYTHING if pending else member.answer() for member, pending in both]
        for place, (_, pending) in enumerate(both):
            if pending is not None:
                answers[place] = pending.result()
                self._pending[place] = None
        return answers

    def _combine(self) -> Allowed:
        answers = self._answers()
        end = frozenset().union(*(answer.end for answer in answers))
        mask: Words | None = None
        for answer in answers:
            if answer.words is not None:
                words = fit(answer.words, self._width)
                mask = words if mask is None else mask & words
        if mask is None:
            return Allowed(None, end)
        passing = count(mask)
        if not passing:
            raise InputError(self._nothing_left(answers))
        forced = self._choice(mask, passing)
        if forced is None:
            return Allowed(mask, end)
        ends = end | {forced} if forced in self._eos else end
        return Allowed(only(forced, self._width), ends, forced)

    def _choice(self, mask: Words, passing: int) -> int | None:
        """The token to take without asking the model, where there is no choice or EOS is preferred."""
        eos = [number for number in self._eos if contains(mask, number)]
        if eos and (self.prefer_eos or passing == len(eos)):
            return eos[0]
        return int(members(mask)[0]) if passing == 1 else None

    def _nothing_left(self, answers: list[Answer]) -> str:
        limits = [
            (member.name, count(fit(answer.words, self._width)))
            for member, answer in zip(self._members, answers, strict=True)
            if answer.words is not None
        ]
        names = " and ".join(f"{name} ({passing} of {self._width} tokens)" for name, passing in limits)
        text = self._codec.decode(self._fed, continues=True) if self._codec else ""
        shown = repr(text if len(text) <= 200 else "…" + text[-200:])
        remedy = (
            "Each lets something pass, but nothing passes all: check that they describe the same text."
            if all(passing for _, passing in limits)
            else "Check that it describes a text this model can write."
        )
        return f"Filter excluded all tokens: {names} after the text {shown}. {remedy}"


class _Own:
    """A filter of ours, renewed, so that jobs may share what the user made once."""

    def __init__(self, given: MaskFilter) -> None:
        self.name = type(given).__name__
        self._filter = given.renewed()
        self.background = self._filter.use_background_worker()
        self.begin = self._filter.begin
        self.feed = self._filter.feed
        self.answer = self._filter.answer


class _Foreign:
    """A filter of somebody else's, spoken to in the old library's way. It is not copied: not all can be."""

    _owners: ClassVar[WeakValueDictionary[int, FilterStack]] = WeakValueDictionary()

    def __init__(self, given: Any, width: int, codec: Codec) -> None:
        self.name = type(given).__name__
        missing = [name for name in ("begin", "feed", "next") if not callable(getattr(given, name, None))]
        if missing or isinstance(given, type):
            found = f"the class {given.__name__} itself" if isinstance(given, type) else self.name
            lacks = f", which has no {' and no '.join(missing)}" if missing else ""
            raise InputError(f"A filter has methods begin, feed and next; found {found}{lacks}.")
        self._filter = given
        self._width = width
        self._known = codec.size
        self._codec = codec
        self._whitespace_run = 0
        self._tells_completion = callable(getattr(given, "is_completed", None))
        self._masks = self._ask("can_mask_logits")
        self.background = self._ask("use_background_worker")

    def claim(self, stack: FilterStack) -> None:
        """A filter remembers one text: two jobs at a time would spoil it."""
        owner = self._owners.get(id(self._filter))
        if owner is not None and owner is not stack:
            raise InputError(
                f"The filter {self.name} is still used by another job: give each job a filter of its own."
            )
        self._owners[id(self._filter)] = stack

    def release(self, stack: FilterStack) -> None:
        if self._owners.get(id(self._filter)) is stack:
            del self._owners[id(self._filter)]

    def begin(self, prefix: Prefix) -> None:
        self._whitespace_run = 0
        with self._blamed("begin"):
            if callable(drop := getattr(self._filter, "background_drop", None)):
                drop()
            self._filter.begin(prefix)

    def feed(self, number: int) -> None:
        pieces = self._codec.vocab.pieces()
        is_whitespace = number < len(pieces) and pieces[number].isspace()
        self._whitespace_run = self._whitespace_run + 1 if is_whitespace else 0
        with self._blamed("feed"):
            self._filter.feed(torch.tensor([[number]], dtype=torch.long))

    def answer(self) -> Answer:
        if self._masks:
            try:
                return self._narrowed(self._masked())
            except RuntimeError:  # some need pinned memory for masks, which no machine without a GPU has
                self._masks = False
        return self._narrowed(self._listed())

    def _narrowed(self, answer: Answer) -> Answer:
        """Without what would leave a text incomplete, while the filter says that it is; never empty by that.

        formatron's engine knows EOS by its text only ("</s>"), which fits into any JSON string, and its JSON
        may have whitespace without end between two parts.
        """
        if answer.words is None or not self._tells_completion or self._ask("is_completed"):
            return answer
        answer = _without(answer, np.array(self._codec.eos_ids, np.int64))
        if self._whitespace_run < LONGEST_WHITESPACE:
            return answer
        pieces = self._codec.vocab.pieces()
        return _without(answer, np.array([n for n, piece in enumerate(pieces) if piece.isspace()], np.int64))

    def _ask(self, question: str) -> bool:
        method = getattr(self._filter, question, None)
        with self._blamed(question):
            return bool(method()) if callable(method) else False

    def _masked(self) -> Answer:
        with self._blamed("prepare_logit_mask"):
            if not self._filter.prepare_logit_mask():
                raise InputError(f"The filter {self.name} promises to mask logits, but did not prepare to.")
        with self._blamed("mask_logits", but=RuntimeError):
            logits = self._filter.mask_logits(torch.zeros(self._width, dtype=torch.float))
            passing = ~torch.isneginf(logits.reshape(-1))
        if len(passing) != self._width:
            raise InputError(
                f"The filter {self.name} masked {len(passing)} logits, found {self._width} to mask."
            )
        passing[self._known :] = False
        return Answer(pack(passing.numpy()))

    def _listed(self) -> Answer:
        with self._blamed("next"):
            found = self._filter.next()
        passing, end = found if isinstance(found, tuple) and len(found) == 2 else (found, ())
        ends = frozenset(self._ids(end).tolist())
        if passing is None:
            return Answer(None, ends)
        if getattr(passing, "use_bitmask", False):
            return Answer(np.asarray(passing.allowed_tokens, np.int32).copy(), ends)
        numbers = self._ids(getattr(passing, "allowed_tokens", passing))
        return Answer(of(numbers, max(self._width, self._known)), ends)

    def _ids(self, given: Any) -> NDArray[np.int64]:
        """Any collection of ids as an array; ids that no vocabulary has are refused."""
        if not isinstance(given, Iterable) or isinstance(given, str | bytes):
            raise InputError(
                f"The filter {self.name} must answer with ids of tokens, found {type(given).__name__}."
            )
        ids = np.asarray(given if isinstance(given, np.ndarray | torch.Tensor) else list(given)).reshape(-1)
        if not len(ids):
            return np.zeros(0, np.int64)
        highest = max(self._width, self._known) - 1
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > highest:
            wrong = next((n for n in ids.tolist() if not isinstance(n, int) or not 0 <= n <= highest), None)
            raise InputError(f"The filter {self.name} named {wrong!r}; ids of tokens are 0 to {highest}.")
        return ids.astype(np.int64)

    @contextmanager
    def _blamed(self, method: str, but: type[Exception] = ExlmError) -> Iterator[None]:
        try:
            yield
        except (ExlmError, but):
            raise
        except Exception as error:
            raise InputError(
                f"The filter {self.name} failed in {method}(): {type(error).__name__}: {error}"
            ) from error


def _member(given: Any, width: int, codec: Codec) -> _Member:
    return _Own(given) if isinstance(given, MaskFilter) else _Foreign(given, width, codec)


def _without(answer: Answer, numbers: NDArray[np.int64]) -> Answer:
    """The answer without these tokens, if any other passes."""
    assert answer.words is not None
    width = WORD * len(answer.words)
    others = answer.words & ~of(numbers[(numbers >= 0) & (numbers < width)], width)
    return Answer(others, answer.end) if others.any() else answer


def _listed(filters: Iterable[Any] | None) -> list[Any]:
    if filters is None:
        return []
    if not isinstance(filters, Iterable):
        raise InputError(f"Filters are given as a list, found one {type(filters).__name__}: write [filter].")
    given = list(filters)
    for place, item in enumerate(given):
        if any(item is other for other in given[:place]) and not isinstance(item, MaskFilter):
            raise InputError(f"The filter {type(item).__name__} is in the list twice.")
    return given
