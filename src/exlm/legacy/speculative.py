"""Speculative decoding of the streaming generator: draft functions, and the runner that uses them.

A draft function takes the ids so far and proposes ids that may come next, from n-gram counts or from a draft
model. `SpeculativeRunner` computes them in the same pass as the requested token. If the next requested token
is the drafted one, its logits are there and no pass is needed. The generator samples every token when it is
requested, from the model's logits, so that a draft never changes the text.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..generator.model_runner import ModelRunner
from ..generator.page_table import PageCopy
from ..generator.token_sequence import TokenSequence, common_prefix_length
from ..kvcache import CacheBase
from ..model import Model

MAX_CATCH_UP_DECODE = 32  # more tokens than this are prefilled, without logits
DraftFunction = Callable[[list[int], int], list[int]]
"""(ids so far, n) → at most n draft ids"""


class NgramCounts:
    """How often each id followed each n-gram of `min_ngram` to `max_ngram` ids."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max(1, max_ngram), max(1, min_ngram) - 1, -1)
        self._followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def count(self, ids: Sequence[int], start: int, by: int = 1) -> None:
        """Count the ids from `start` on after the n-grams before them; `by` -1 uncounts them."""
        for end in range(max(start, 1), len(ids)):
            for size in self.sizes:
                if size <= end:
                    self._followers[tuple(ids[end - size : end])][ids[end]] += by

    def most_frequent(self, ids: Sequence[int], min_count: int) -> int | None:
        """The id that most often, `min_count` times or more, followed the longest known n-gram at the end."""
        for size in self.sizes:
            if size <= len(ids) and (found := self._followers.get(tuple(ids[-size:]))):
                token, count = found.most_common(1)[0]
                if count >= min_count:
                    return token
        return None


class NgramDraftFunction:
    """Drafts the most frequent id, if it was seen `threshold` times, one more for each further id."""

    def __init__(self, counts: NgramCounts) -> None:
        self.counts = counts
        self.max_tokens, self.threshold = 0, 1
        self._counted_ids: list[int] = []

    def __call__(self, ids: list[int], count: int) -> list[int]:
        """At most `count` and at most `max_tokens` draft ids."""
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
    """Drafts with a smaller model, up to the size of its cache."""

    def __init__(self, model: Model, cache: CacheBase, vocab_size: int) -> None:
        """`vocab_size` is that of the target model."""
        self.max_tokens, self.min_prob = 0, 0.0
        self._runner = model.runner(cache)
        self._max_length = min(model.max_seq_len, cache.max_seq_len)
        self._chunk_size = model.config.max_input_len
        self._draft_vocab_size, self._vocab_size = model.config.vocab_size, vocab_size
        self._sequence = TokenSequence([], pages=list(range(cache.pages_per_row)))
        self._num_computed_tokens = 0  # leading ids whose keys and values are in the draft model's cache

    def __call__(self, ids: list[int], count: int) -> list[int]:
        """The draft model's greedy ids, at most `max_tokens`, each at least `min_prob` probable."""
        count = min(count, self.max_tokens, self._max_length - len(ids))
        sequence = self._sequence
        num_common = _common_length(sequence.ids[: self._num_computed_tokens], ids[:-1])
        if count < 1 or max(ids[num_common:]) >= self._draft_vocab_size:
            return []
        sequence.ids = list(ids)
        self._num_computed_tokens = self._catch_up(num_common)
        for _ in range(count):
            new_ids = sequence.ids[self._num_computed_tokens :]
            logits = self._runner.decode([sequence], [self._num_computed_tokens], [new_ids])[0]
            self._num_computed_tokens = len(sequence.ids)
            prob, token = logits[-1, : self._vocab_size].softmax(-1).max(-1)
            if float(prob) < self.min_prob:
                break
            sequence.ids.append(int(token))
        return sequence.ids[len(ids) :]

    def _catch_up(self, start: int) -> int:
        """Prefill until few enough tokens are left for one decode pass; the number of computed tokens."""
        end = len(self._sequence.ids) - 1
        while end - start > MAX_CATCH_UP_DECODE:
            stop = min(end, start + self._chunk_size)
            self._runner.prefill(self._sequence, start, stop)
            start = stop
        return start


def _common_length(before: list[int], after: list[int]) -> int:
    """The length of the common prefix; fast if `after` continues `before`."""
    return len(before) if after[: len(before)] == before else common_prefix_length(before, after)


class SpeculativeRunner:
    """Wraps a runner and computes drafts for one sequence at a time; `draft` may change at any time."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.draft: DraftFunction | None = None
        self.num_requested = self.num_drafted = self.num_accepted = 0
        self._computed_ahead: deque[tuple[int, Any]] = deque()  # draft ids and the logits after them
        self._next_position: tuple[TokenSequence | None, int] = (None, 0)  # of the first draft id

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Duplicate the leading tokens of pages."""
        self.runner.copy_pages(copies)

    def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Compute keys and values of the ids from `start` to `stop`."""
        self._computed_ahead.clear()
        self.runner.prefill(sequence, start, stop)

    def decode(self, sequences: Sequence[TokenSequence], past: Sequence[int], tokens: Sequence[Sequence[int]]) -> Any:
        """Logits (tokens, vocabulary) for each sequence."""
        if self.draft is None or len(sequences) != 1 or len(tokens[0]) != 1:
            self._computed_ahead.clear()
            return self.runner.decode(sequences, past, tokens)
        return [self._next_logits(sequences[0], past[0], tokens[0][0])]

    def decode_next(self, sequences: Sequence[TokenSequence], past: Sequence[int], tokens: Any) -> None:
        """None: the streaming generator does not launch passes early."""

    def _next_logits(self, sequence: TokenSequence, start: int, token: int) -> Any:
        self.num_requested += 1
        drafted_sequence, position = self._next_position
        is_next = drafted_sequence is sequence and position == start
        if is_next and self._computed_ahead and self._computed_ahead[0][0] == token:
            self.num_accepted += 1
            self._next_position = (sequence, start + 1)
            return self._computed_ahead.popleft()[1]
        # The last token of the sequence is never computed, so no draft is needed for its position.
        max_drafts = sequence.max_length - start - 2
        drafts = []
        if self.draft is not None and max_drafts > 0:
            drafts = self.draft([*sequence.ids[:start], token], max_drafts)
        self.num_drafted += len(drafts)
        logits = self.runner.decode([sequence], [start], [[token, *drafts]])[0]
        self._computed_ahead = deque((draft, logits[i : i + 1]) for i, draft in enumerate(drafts, 1))
        self._next_position = (sequence, start + 1)
        return logits[:1]
