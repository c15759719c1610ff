"""Speculative decoding: a drafter proposes tokens, the model verifies them in one pass.

Drafts that match what the model samples are kept. They change how many passes a text takes, never the text:
every position is sampled from the model, and the first mismatch ends the draft.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import Protocol

from ..tokenizer import EMBEDDING_INDEX
from .model_runner import ModelRunner
from .page_table import PageCopy
from .token_sequence import TokenSequence

MISSES_BEFORE_PAUSE = 2
"""Consecutive drafts without an accepted token after which a job pauses drafting: for 2 tokens, 4, 8 …"""

MIN_MATCH = 2
"""Tokens that must have occurred before for a guess, if `max_ngram` allows it: what followed a single token is wrong
so often that drafts cost more than they save."""

MAX_PAUSE = 32
"""The longest pause, in tokens."""


def round_draft_length(count: int, max_tokens: int) -> int:
    """The largest of 1, 3, 7, 15 … and `max_tokens` that is not more than `count`; 0 for 0.

    With few different sizes there are fewer CUDA graphs to capture, and more rows share a pass.
    """
    return max_tokens if count >= max_tokens else (1 << (count + 1).bit_length() - 1) - 1


class AdaptiveDraftLength:
    """The draft length of a job: longer while drafts are accepted, with pauses while none are."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._length = max_tokens
        self._misses = 0
        self._paused_until = 0

    def num_draft_tokens(self, num_generated: int, num_left: int) -> int:
        """How many tokens to draft after `num_generated` tokens, at most `num_left`."""
        if num_generated < self._paused_until:
            return 0
        return round_draft_length(min(self._length, num_left), self.max_tokens)

    def update(self, num_accepted: int, num_drafted: int, num_generated: int) -> None:
        """Adapt to a verified draft."""
        length = 2 * num_drafted if num_accepted == num_drafted else num_accepted
        self._length = round_draft_length(length + 1, self.max_tokens)
        self._misses = 0 if num_accepted else self._misses + 1
        pause = min(1 << max(0, self._misses - MISSES_BEFORE_PAUSE), MAX_PAUSE)
        self._paused_until = num_generated + pause if self._misses > MISSES_BEFORE_PAUSE else 0


class Drafter(Protocol):
    """Proposes draft tokens for sequences."""

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy the same pages in the drafter's own cache, if it has one."""
        ...

    def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Process the prompt's ids from `start` to `stop`."""
        ...

    def has_candidate(self, sequence: TokenSequence) -> bool:
        """Whether `propose` may return a draft; if not, the next pass need not wait for it."""
        ...

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[list[int]]:
        """For each sequence, at most as many draft tokens as `counts` says."""
        ...

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """The sequence is about to lose its ids from position `length` on."""
        ...

    def release(self, sequence: TokenSequence) -> None:
        """The sequence is finished; its pages are about to be released."""
        ...


TOKEN_BITS = 32
"""Bits for each token in the key of an n-gram; ids are smaller than that."""

ABSENT = -1


class NgramIndex:
    """For every n-gram of `shortest` to `longest` tokens of a sequence, where its latest occurrence ends.

    Appending or removing a token takes one dictionary operation for each n, however long the sequence is.
    Keys and values are integers, so that Python's garbage collector has no containers to traverse here.
    """

    def __init__(self, shortest: int, longest: int, ids: Sequence[int] = ()) -> None:
        """Index `ids`; only tokens that are added later can be removed again."""
        self._shortest = shortest
        self.num_permanent = len(ids)
        """How many leading tokens cannot be removed; `match` is None until another one is added."""
        self.length = len(ids)
        """How many tokens are indexed."""
        self._ends: list[dict[int, int]] = []
        """For each n from `shortest` on: the end of an n-gram's latest occurrence, by its key."""
        self._earlier = array("i")
        """For each token beyond `num_permanent` and each n: the end of the previous occurrence of its n-gram."""
        keys = list(ids)
        for size in range(1, longest + 1):
            if size > 1:  # the newest token is in the highest bits
                keys = [key << TOKEN_BITS | token for key, token in zip(keys[1:], ids, strict=False)]
            if size >= shortest:
                self._ends.append(dict(zip(keys, range(size, len(ids) + 1), strict=False)))

    @property
    def match(self) -> int | None:
        """Where the longest n-gram at the sequence's end last ended before; None if none occurred before."""
        for end in reversed(self._earlier[-len(self._ends) :]):
            if end != ABSENT:
                return end
        return None

    def extend(self, ids: Sequence[int]) -> None:
        """Index the tokens that were appended to the sequence, which is `ids` now."""
        append_earlier = self._earlier.append
        for end in range(self.length + 1, len(ids) + 1):
            start = end - self._shortest
            key = self._shortest_key(ids, end)
            for ends in self._ends:
                if start < 0:  # no n-gram is longer than the sequence
                    append_earlier(ABSENT)
                    continue
                append_earlier(ends.get(key, ABSENT))
                ends[key] = end
                start -= 1
                if start >= 0:
                    key = key << TOKEN_BITS | ids[start]
        self.length = max(self.length, len(ids))

    def truncate(self, ids: Sequence[int], length: int) -> None:
        """Remove the tokens of `ids` from position `length` on, all of them beyond `num_permanent`."""
        sizes = len(self._ends)
        for end in range(self.length, length, -1):
            start = end - self._shortest
            key = self._shortest_key(ids, end)
            for ends, earlier in zip(self._ends, self._earlier[-sizes:], strict=True):
                if start < 0:
                    break
                if earlier == ABSENT:
                    del ends[key]
                else:
                    ends[key] = earlier
                start -= 1
                if start >= 0:
                    key = key << TOKEN_BITS | ids[start]
            del self._earlier[-sizes:]
        self.length = min(self.length, length)

    def _shortest_key(self, ids: Sequence[int], end: int) -> int:
        """The key of the shortest n-gram that ends there: the newest token is in the highest bits."""
        key = 0
        for at in range(end - 1, max(0, end - self._shortest) - 1, -1):
            key = key << TOKEN_BITS | ids[at]
        return key


class NgramDrafter:
    """Proposes what followed an earlier occurrence of the sequence's last n-gram.

    A sequence is indexed when its first draft is requested.
    """

    def __init__(self, max_ngram: int = 4) -> None:
        self.max_ngram = max(2, max_ngram)
        self._indexes: dict[int, NgramIndex] = {}

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Do nothing: it has no cache."""

    def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Do nothing: `propose` indexes the prompt."""

    def has_candidate(self, sequence: TokenSequence) -> bool:
        """Whether the last ids occurred before."""
        return self._index(sequence).match is not None

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[list[int]]:
        """What followed the latest earlier occurrence of the last ids, the longest n-gram first.

        A continuation that reaches the end of the sequence is repeated: a draft is empty or has full length.
        """
        return [self._propose_one(s, count) if count else [] for s, count in zip(sequences, counts, strict=True)]

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """Drop the index entries of the ids from there on."""
        index = self._indexes.get(id(sequence))
        if index is not None and index.num_permanent < length and index.length <= len(sequence.ids):
            index.truncate(sequence.ids, length)
        else:
            self.release(sequence)

    def release(self, sequence: TokenSequence) -> None:
        """Drop the index."""
        self._indexes.pop(id(sequence), None)

    def _propose_one(self, sequence: TokenSequence, count: int) -> list[int]:
        at = self._index(sequence).match
        return [] if at is None else [*islice(cycle(sequence.ids[at : at + count]), count)]

    def _index(self, sequence: TokenSequence) -> NgramIndex:
        """The sequence's index, up to date."""
        ids = sequence.ids
        index = self._indexes.get(id(sequence))
        if index is None or index.length > len(ids):
            # Only final ids are never rewound; the last one is added by `extend`, to find its match.
            num_permanent = max(0, min(sequence.num_final_tokens, len(ids)) - 1)
            # An n-gram of `max_ngram` tokens is those that are searched for and the first one of the draft.
            longest = self.max_ngram - 1
            index = self._indexes[id(sequence)] = NgramIndex(min(MIN_MATCH, longest), longest, ids[:num_permanent])
        index.extend(ids)
        return index


class ModelDrafter:
    """Proposes the greedy tokens of a smaller model, whose own cache has the same pages."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._num_computed_tokens: dict[int, int] = {}  # in the draft model's cache, by `id(sequence)`

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy the pages of the draft model's cache."""
        self.runner.copy_pages(copies)

    def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Prefill the draft model, up to the first injected embedding: it takes only tokens."""
        if sequence.extras is not None:
            stop = next((i for i, n in enumerate(sequence.ids[:stop]) if n >= EMBEDDING_INDEX), stop)
        if start < stop:
            self.runner.prefill(sequence, start, stop)
            self._num_computed_tokens[id(sequence)] = stop

    def has_candidate(self, sequence: TokenSequence) -> bool:
        """Always."""
        return True

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[list[int]]:
        """The draft model's most probable tokens, one after the other."""
        out: list[list[int]] = [[] for _ in sequences]
        for step in range(max(counts, default=0)):
            rows = [i for i, count in enumerate(counts) if count > step]
            past, token_rows = [], []
            for row in rows:
                sequence = sequences[row]
                num_computed = min(
                    self._num_computed_tokens.get(id(sequence), sequence.num_computed_tokens), len(sequence.ids) - 1
                )
                row_tokens = [*sequence.ids[num_computed:], *out[row]] if step == 0 else [out[row][-1]]
                past.append(num_computed if step == 0 else len(sequence.ids) + step - 1)
                token_rows.append(row_tokens)
            logits = self.runner.decode([sequences[row] for row in rows], past, token_rows)
            for row, row_logits in zip(rows, logits, strict=True):
                out[row].append(int(row_logits[-1].argmax()))
                self._num_computed_tokens[id(sequences[row])] = len(sequences[row].ids)
        return out

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """The draft model's keys and values of the ids from there on are no longer valid."""
        if self._num_computed_tokens.get(id(sequence), 0) > length:
            self._num_computed_tokens[id(sequence)] = length

    def release(self, sequence: TokenSequence) -> None:
        """Compute the tokens since the last draft, so that the pages can be reused."""
        self.prefill(
            sequence,
            self._num_computed_tokens.get(id(sequence), sequence.num_computed_tokens),
            sequence.num_computed_tokens,
        )
        self._num_computed_tokens.pop(id(sequence), None)
