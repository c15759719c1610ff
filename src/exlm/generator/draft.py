"""Guessing ahead: tokens are proposed, checked by the model in one pass, and kept if it would have said them.

A proposal never changes what a job says, only how many passes it takes: every position is sampled from the
model itself, and the first disagreement ends the guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import Any, Protocol

from ..text import EMBEDDING_INDEX
from .ngram import NgramIndex
from .pages import Copy
from .sequence import Sequence as Tokens

PATIENCE = 2
"""Guesses in vain, one after the other, before a job rests: for 2 tokens, 4, 8 …"""

LONGEST_REST = 32
"""Tokens after which it tries again in any case."""


def round_down(count: int, most: int) -> int:
    """The largest of 1, 3, 7, 15 … and `most` that is not more than `count`; 0 of none.

    Passes of few different sizes are recorded sooner, and rows of equal sizes share one.
    """
    return most if count >= most else (1 << (count + 1).bit_length() - 1) - 1


class Pace:
    """How far a job guesses: further while its guesses are right, and not for a while if none are."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._length = most
        self._misses = 0
        self._rests_until = 0

    def reach(self, made: int, left: int) -> int:
        """How many tokens to guess for a text of so many that may have so many more."""
        return 0 if made < self._rests_until else round_down(min(self._length, left), self.most)

    def learn(self, right: int, guessed: int, made: int) -> None:
        """Of so many guesses so many were right, and the text has so many tokens now."""
        further = 2 * guessed if right == guessed else right
        self._length = round_down(further + 1, self.most)
        self._misses = 0 if right else self._misses + 1
        rest = min(1 << max(0, self._misses - PATIENCE), LONGEST_REST)
        self._rests_until = made + rest if self._misses > PATIENCE else 0


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

    def expects(self, sequence: Tokens) -> bool:
        """Whether it has an idea of what comes next; if not, nobody needs to wait for its guess."""
        ...

    def propose(self, sequences: Sequence[Tokens], counts: Sequence[int]) -> list[list[int]]:
        """Up to so many tokens that may come next, for each sequence."""
        ...

    def truncate(self, sequence: Tokens, length: int) -> None:
        """The sequence is about to lose its ids from this position on; others may follow there."""
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

    def expects(self, sequence: Tokens) -> bool:
        """Never."""
        return False

    def propose(self, sequences: Sequence[Tokens], counts: Sequence[int]) -> list[list[int]]:
        """Nothing, for everybody."""
        return [[] for _ in sequences]

    def truncate(self, sequence: Tokens, length: int) -> None:
        """Has no memory."""

    def forget(self, sequence: Tokens) -> None:
        """Has no memory."""


class NgramDraft(NoDraft):
    """Guesses that the text goes on as it did after the same words before.

    The index of a sequence is made when its first guess is wanted, and then follows the sequence.
    """

    def __init__(self, longest: int = 4) -> None:
        self.longest = max(2, longest)
        self._indexes: dict[int, NgramIndex] = {}

    def expects(self, sequence: Tokens) -> bool:
        """Whether the last ids were there before."""
        return self._index(sequence).match is not None

    def propose(self, sequences: Sequence[Tokens], counts: Sequence[int]) -> list[list[int]]:
        """What followed the latest earlier place that ends in the same run of ids, the longest run first.

        Where that place is near, what follows it is the text's end, and then the guess itself: a circle goes
        on. So there is no guess, or one as long as it may be.
        """
        return [self._guess(s, count) if count else [] for s, count in zip(sequences, counts, strict=True)]

    def truncate(self, sequence: Tokens, length: int) -> None:
        """Drop what the index knows of the ids from there on."""
        index = self._indexes.get(id(sequence))
        if index is not None and index.base < length and index.length <= len(sequence.ids):
            index.truncate(sequence.ids, length)
        else:
            self.forget(sequence)

    def forget(self, sequence: Tokens) -> None:
        """Drop the index."""
        self._indexes.pop(id(sequence), None)

    def _guess(self, sequence: Tokens, count: int) -> list[int]:
        at = self._index(sequence).match
        return [] if at is None else [*islice(cycle(sequence.ids[at : at + count]), count)]

    def _index(self, sequence: Tokens) -> NgramIndex:
        """The sequence's index, up to date."""
        ids = sequence.ids
        index = self._indexes.get(id(sequence))
        if index is None or index.length > len(ids):
            # Only settled ids are never taken back; the last one is read again to find its match.
            settled = max(0, min(sequence.settled, len(ids)) - 1)
            index = self._indexes[id(sequence)] = NgramIndex(self.longest - 1, ids[:settled])
        index.extend(ids)
        return index


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

    def expects(self, sequence: Tokens) -> bool:
        """Always."""
        return True

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

    def truncate(self, sequence: Tokens, length: int) -> None:
        """What the small model has of the ids from there on is of no use."""
        if self._known.get(id(sequence), 0) > length:
            self._known[id(sequence)] = length

    def forget(self, sequence: Tokens) -> None:
        """Read what was said since the last guess, so that others find it in the pages, and drop the rest."""
        self.prefill(sequence, self._known.get(id(sequence), sequence.cached), sequence.cached)
        self._known.pop(id(sequence), None)
