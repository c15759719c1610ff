"""Two ways to guess what comes next: by runs of ids seen before, and by asking a smaller model.

Both take the whole text each time and find out themselves what has changed since; nothing here decides what
becomes of a guess.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from .. import CacheBase, Model
from ..generator.sequence import Sequence as Tokens
from ..generator.sequence import common_length

MANY = 32  # ids to catch up with, beyond which nobody needs their logits


class NgramTable:
    """How often each id followed each run of `shortest` to `longest` ids."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(max(1, longest), max(1, shortest) - 1, -1)
        self._after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def count(self, ids: Sequence[int], start: int, by: int = 1) -> None:
        """Count what every id from `start` on follows; `by` -1 takes it back."""
        for end in range(max(start, 1), len(ids)):
            for size in self.sizes:
                if size <= end:
                    self._after[tuple(ids[end - size : end])][ids[end]] += by

    def likeliest(self, ids: Sequence[int], least: int) -> int | None:
        """What most often followed the longest run these ids end in, at least so often; None for nothing."""
        for size in self.sizes:
            if size <= len(ids) and (found := self._after.get(tuple(ids[-size:]))):
                token, times = found.most_common(1)[0]
                if times >= least:
                    return token
        return None


class NgramGuess:
    """Guesses what most often came next: `threshold` times for the first guess, one more for each further."""

    def __init__(self, table: NgramTable) -> None:
        self.table = table
        self.most, self.threshold = 0, 1
        self._read: list[int] = []

    def __call__(self, ids: list[int], count: int) -> list[int]:
        """Up to `count` ids that may follow, `most` at the most."""
        keep = _shared(self._read, ids)
        self.table.count(self._read, keep, by=-1)
        self.table.count(ids, keep)
        self._read = list(ids)
        found: list[int] = []
        for i in range(min(count, self.most)):
            token = self.table.likeliest(ids[-self.table.sizes.start :] + found, self.threshold + i)
            if token is None:
                break
            found.append(token)
        return found


class DraftGuess:
    """Guesses by asking a smaller model; its cache may have any size, and beyond it there are no guesses."""

    def __init__(self, model: Model, cache: CacheBase, vocab: int) -> None:
        """`vocab` is how many ids the large model knows."""
        self.most, self.least = 0, 0.0
        self._runner = model.runner(cache)
        self._length = min(model.max_seq_len, cache.max_seq_len)
        self._chunk = model.config.max_input_len
        self._own_vocab, self._vocab = model.config.vocab_size, vocab
        self._sequence = Tokens([], pages=list(range(cache.width)))
        self._cached = 0  # of the sequence's ids, those whose keys and values it has

    def __call__(self, ids: list[int], count: int) -> list[int]:
        """The model's likeliest ids, `most` at the most, as long as it gives each a chance of `least`."""
        count = min(count, self.most, self._length - len(ids))
        own = self._sequence
        kept = _shared(own.ids[: self._cached], ids[:-1])
        if count < 1 or max(ids[kept:]) >= self._own_vocab:
            return []
        own.ids = list(ids)
        self._cached = self._catch_up(kept)
        for _ in range(count):
            fed = own.ids[self._cached :]
            logits = self._runner.decode([own], [self._cached], [fed])[0][-1, : self._vocab]
            self._cached = len(own.ids)
            chance, token = logits.softmax(-1).max(-1)
            if float(chance) < self.least:
                break
            own.ids.append(int(token))
        return own.ids[len(ids) :]

    def _catch_up(self, start: int) -> int:
        """Read on until few enough ids are left to be fed at once."""
        end = len(self._sequence.ids) - 1
        while end - start > MANY:
            stop = min(end, start + self._chunk)
            self._runner.prefill(self._sequence, start, stop)
            start = stop
        return start


def _shared(before: list[int], now: list[int]) -> int:
    """How many ids are as before; most often nothing but the end is new, which is quick to see."""
    return len(before) if now[: len(before)] == before else common_length(before, now)
