"""Guessing ahead: tokens are proposed, checked by the model in one pass, and kept if it would have said them.

A proposal never changes what a job says, only how many passes it takes: every position is sampled from the
model itself, and the first disagreement ends the guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..text import EMBEDDING_INDEX
from .pages import Copy
from .sequence import Sequence as Tokens


class DraftRunner(Protocol):
    """What is needed of a draft model's runner; logits are whatever answers `argmax`."""

    def copy(self, orders: Iterable[Copy]) -> None:
        """Duplicate the leading tokens of pages."""
        ...

    def prefill(self, sequence: Tokens, start: int, stop: int) -> None:
        """Compute keys and values of a stretch of ids."""
        ...

    def decode(
        self, sequences: Sequence[Tokens], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Sequence[Any]:
        """Logits for each fed token of each sequence."""
        ...


class Drafter(Protocol):
    """Somebody who guesses."""

    def copy(self, orders: Iterable[Copy]) -> None:
        """The same pages are copied in the guesser's own memory, if it has any."""
        ...

    def prefill(self, sequence: Tokens, start: int, stop: int) -> None:
        """The prompt as the model sees it."""
        ...

    def propose(self, sequences: Sequence[Tokens], counts: Sequence[int]) -> list[list[int]]:
        """Up to so many tokens that may come next, for each sequence."""
        ...

    def forget(self, sequence: Tokens) -> None:
        """The sequence is finished, and about to leave its pages to others."""
        ...


class NoDraft:
    """Guesses nothing."""

    def copy(self, orders: Iterable[Copy]) -> None:
        """Has no memory."""

    def prefill(self, sequence: Tokens, start: int, stop: int) -> None:
        """Has no memory."""

    def propose(self, sequences: Sequence[Tokens], counts: Sequence[int]) -> list[list[int]]:
        """Nothing, for everybody."""
        return [[] for _ in sequences]

    def forget(self, sequence: Tokens) -> None:
        """Has no memory."""


@dataclass
class _Index:
    """Where every short run of one sequence's ids was last followed by something."""

    read: int = 0
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # run → position of what followed last


class NgramDraft(NoDraft):
    """Guesses that the text goes on as it did after the same words before."""

    def __init__(self, longest: int = 4) -> None:
        self.longest = max(2, longest)
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequences: Sequence[Tokens], counts: Sequence[int]) -> list[list[int]]:
        """What followed the latest earlier place that ends in the same run of ids, the longest run first."""
        return [self._guess(s, count) if count else [] for s, count in zip(sequences, counts, strict=True)]

    def forget(self, sequence: Tokens) -> None:
        """Drop the index."""
        self._indexes.pop(id(sequence), None)

    def _guess(self, sequence: Tokens, count: int) -> list[int]:
        ids = sequence.ids
        index = self._indexes.setdefault(id(sequence), _Index())
        if index.read > len(ids):  # the sequence was rewound: runs that ended beyond are stale
            self._indexes[id(sequence)] = index = _Index()
        for end in range(max(index.read, 1), len(ids)):
            for size in range(1, min(self.longest, end + 1)):
                index.after[tuple(ids[end - size : end])] = end
        index.read = len(ids)
        for size in range(min(self.longest - 1, len(ids)), 0, -1):
            at = index.after.get(tuple(ids[-size:]))
            if at is not None:
                return [ids[at + i] for i in range(min(count, len(ids) - at))]
        return []


class ModelDraft:
    """Guesses by asking a smaller model, which keeps its own cache in the same pages."""

    def __init__(self, runner: DraftRunner) -> None:
        self.runner = runner
        self._known: dict[int, int] = {}  # sequence → ids whose keys and values the small model has

    def copy(self, orders: Iterable[Copy]) -> None:
        """The small model's cache is copied alike."""
        self.runner.copy(orders)

    def prefill(self, sequence: Tokens, start: int, stop: int) -> None:
        """The small model reads the prompt too, up to the first injected embedding: it knows only tokens."""
        if sequence.extras is not None:
            stop = next((i for i, n in enumerate(sequence.ids[:stop]) if n >= EMBEDDING_INDEX), stop)
        if start < stop:
            self.runner.prefill(sequence, start, stop)
            self._known[id(sequence)] = stop

    def propose(self, sequences: Sequence[Tokens], counts: Sequence[int]) -> list[list[int]]:
        """The small model's likeliest tokens, one after the other."""
        out: list[list[int]] = [[] for _ in sequences]
        for step in range(max(counts, default=0)):
            rows = [i for i, count in enumerate(counts) if count > step]
            past, fed = [], []
            for row in rows:
                sequence = sequences[row]
                known = min(self._known.get(id(sequence), sequence.cached), len(sequence.ids) - 1)
                whole = [*sequence.ids[known:], *out[row]] if step == 0 else [out[row][-1]]
                past.append(known if step == 0 else len(sequence.ids) + step - 1)
                fed.append(whole)
            answers = self.runner.decode([sequences[row] for row in rows], past, fed)
            for row, answer in zip(rows, answers, strict=True):
                out[row].append(int(answer[-1].argmax()))
                self._known[id(sequences[row])] = len(sequences[row].ids)
        return out

    def forget(self, sequence: Tokens) -> None:
        """Read what was said since the last guess, so that others find it in the pages, and drop the rest."""
        self.prefill(sequence, self._known.get(id(sequence), sequence.cached), sequence.cached)
        self._known.pop(id(sequence), None)
