"""Two ways to guess what comes next: by runs of ids seen before, and by asking a smaller model.

Both take the whole text each time and find out themselves what has changed since; nothing here decides what
becomes of a guess.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ..generator.token_sequence import TokenSequence, common_prefix_length
from ..kvcache import CacheBase
from ..model import Model

MAX_CATCH_UP_DECODE = 32  # more ids than these are prefilled, without logits


class NgramCounts:
    """How often each id followed each run of `shortest` to `longest` ids."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max(1, max_ngram), max(1, min_ngram) - 1, -1)
        self._followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def count(self, ids: Sequence[int], start: int, by: int = 1) -> None:
        """Count what every id from `start` on follows; `by` -1 takes it back."""
        for end in range(max(start, 1), len(ids)):
            for size in self.sizes:
                if size <= end:
                    self._followers[tuple(ids[end - size : end])][ids[end]] += by

    def most_frequent(self, ids: Sequence[int], min_count: int) -> int | None:
        """What most often followed the longest run these ids end in, at least so often; None for nothing."""
        for size in self.sizes:
            if size <= len(ids) and (found := self._followers.get(tuple(ids[-size:]))):
                token, times = found.most_common(1)[0]
                if times >= min_count:
                    return token
        return None


class NgramDraftFunction:
    """Guesses what most often came next: `threshold` times for the first guess, one more for each further."""

    def __init__(self, counts: NgramCounts) -> None:
        self.counts = counts
        self.max_tokens, self.threshold = 0, 1
        self._counted_ids: list[int] = []

    def __call__(self, ids: list[int], count: int) -> list[int]:
        """Up to `count` ids that may follow, `most` at the most."""
        num_common = _common_length(self._counted_ids, ids)
        self.counts.count(self._counted_ids, num_common, by=-1)
        self.counts.count(ids, num_common)
        self._counted_ids = list(ids)
        drafts: list[int] = []
        for i in range(min(count, self.max_tokens)):
            token = self.counts.most_frequent(ids[-self.counts.sizes.start :] + drafts, self.threshold + i)
            if token is None:
                break
            drafts.append(token)
        return drafts


class ModelDraftFunction:
    """Guesses by asking a smaller model; its cache may have any size, and beyond it there are no guesses."""

    def __init__(self, model: Model, cache: CacheBase, vocab_size: int) -> None:
        """`vocab` is how many ids the large model knows."""
        self.max_tokens, self.min_prob = 0, 0.0
        self._runner = model.runner(cache)
        self._max_length = min(model.max_seq_len, cache.max_seq_len)
        self._chunk_size = model.config.max_input_len
        self._draft_vocab_size, self._vocab_size = model.config.vocab_size, vocab_size
        self._sequence = TokenSequence([], pages=list(range(cache.pages_per_row)))
        self._num_computed_tokens = 0  # of the sequence's ids, those whose keys and values it has

    def __call__(self, ids: list[int], count: int) -> list[int]:
        """The model's likeliest ids, `most` at the most, as long as it gives each a chance of `least`."""
        count = min(count, self.max_tokens, self._max_length - len(ids))
        sequence = self._sequence
        num_common = _common_length(sequence.ids[: self._num_computed_tokens], ids[:-1])
        if count < 1 or max(ids[num_common:]) >= self._draft_vocab_size:
            return []
        sequence.ids = list(ids)
        self._num_computed_tokens = self._catch_up(num_common)
        for _ in range(count):
            new_ids = sequence.ids[self._num_computed_tokens :]
            logits = self._runner.decode([sequence], [self._num_computed_tokens], [new_ids])[0][
                -1, : self._vocab_size
            ]
            self._num_computed_tokens = len(sequence.ids)
            prob, token = logits.softmax(-1).max(-1)
            if float(prob) < self.min_prob:
                break
            sequence.ids.append(int(token))
        return sequence.ids[len(ids) :]

    def _catch_up(self, start: int) -> int:
        """Read on until few enough ids are left to be fed at once."""
        end = len(self._sequence.ids) - 1
        while end - start > MAX_CATCH_UP_DECODE:
            stop = min(end, start + self._chunk_size)
            self._runner.prefill(self._sequence, start, stop)
            start = stop
        return start


def _common_length(before: list[int], after: list[int]) -> int:
    """How many ids are as before; most often nothing but the end is new, which is quick to see."""
    return len(before) if after[: len(before)] == before else common_prefix_length(before, after)
