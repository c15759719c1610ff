"""Speculative decoding: a drafter proposes tokens, the model verifies them in one pass.

Drafts that match what the model samples are kept. They change how many passes a text takes, never the text:
every position is sampled from the model, and the first mismatch ends the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import Protocol

from ..tokenizer import EMBEDDING_INDEX
from .model_runner import ModelRunner
from .ngram import NgramIndex
from .page_table import PageCopy
from .token_sequence import TokenSequence

MISSES_BEFORE_PAUSE = 2
"""Consecutive drafts without an accepted token after which a job pauses drafting: for 2 tokens, 4, 8 …"""

MAX_PAUSE = 32
"""Tokens after which it drafts again in any case."""


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
        """How many tokens to draft after `num_generated` tokens, of which `num_left` more may come."""
        return (
            0
            if num_generated < self._paused_until
            else round_draft_length(min(self._length, num_left), self.max_tokens)
        )

    def update(self, num_accepted: int, num_drafted: int, num_generated: int) -> None:
        """Adapt to a draft of which so many tokens were accepted."""
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
        """Process a stretch of the prompt."""
        ...

    def has_candidate(self, sequence: TokenSequence) -> bool:
        """Whether `propose` may find a draft; if not, the next pass need not wait for it."""
        ...

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[list[int]]:
        """Up to so many tokens that may come next, for each sequence."""
        ...

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """The sequence is about to lose its ids from this position on; others may follow there."""
        ...

    def release(self, sequence: TokenSequence) -> None:
        """The sequence is finished, and about to leave its pages to others."""
        ...


class NoDrafter:
    """Proposes nothing."""

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Nothing to do."""

    def prefill(self, sequence: TokenSequence, start: int, stop: int) -> None:
        """Nothing to do."""

    def has_candidate(self, sequence: TokenSequence) -> bool:
        """Never."""
        return False

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[list[int]]:
        """An empty draft for each sequence."""
        return [[] for _ in sequences]

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """Nothing to do."""

    def release(self, sequence: TokenSequence) -> None:
        """Nothing to do."""


class NgramDrafter(NoDrafter):
    """Proposes what followed an earlier occurrence of the sequence's last n-gram.

    The index of a sequence is made when its first draft is wanted, and then follows the sequence.
    """

    def __init__(self, max_ngram: int = 4) -> None:
        self.max_ngram = max(2, max_ngram)
        self._indexes: dict[int, NgramIndex] = {}

    def has_candidate(self, sequence: TokenSequence) -> bool:
        """Whether the last ids were there before."""
        return self._index(sequence).match is not None

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[list[int]]:
        """What followed the latest earlier occurrence of the last ids, the longest n-gram first.

        Where that occurrence is near the end, its continuation runs into the draft itself and repeats. So a
        draft is empty or has the full length.
        """
        return [
            self._propose_one(s, count) if count else [] for s, count in zip(sequences, counts, strict=True)
        ]

    def truncate(self, sequence: TokenSequence, length: int) -> None:
        """Drop the index entries of the ids from there on."""
        index = self._indexes.get(id(sequence))
        if index is not None and index.base < length and index.length <= len(sequence.ids):
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
            # Only final ids are never rewound; the last one is read again to find its match.
            settled = max(0, min(sequence.num_final_tokens, len(ids)) - 1)
            index = self._indexes[id(sequence)] = NgramIndex(self.max_ngram - 1, ids[:settled])
        index.extend(ids)
        return index


class ModelDrafter:
    """Proposes the greedy tokens of a smaller model, whose own cache has the same pages."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._num_computed_tokens: dict[
            int, int
        ] = {}  # sequence → ids whose keys and values the draft model has

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
                    self._num_computed_tokens.get(id(sequence), sequence.num_computed_tokens),
                    len(sequence.ids) - 1,
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
        """Compute the tokens since the last draft, so that the pages can be reused; forget the sequence."""
        self.prefill(
            sequence,
            self._num_computed_tokens.get(id(sequence), sequence.num_computed_tokens),
            sequence.num_computed_tokens,
        )
        self._num_computed_tokens.pop(id(sequence), None)
