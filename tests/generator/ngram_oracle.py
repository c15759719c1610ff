"""A reference implementation of n-gram drafting: a dictionary of tuples, rebuilt for every draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from exlm.generator.speculative import NgramDrafter
from exlm.generator.token_sequence import TokenSequence


def search_draft(ids: list[int], count: int, longest: int) -> list[int]:
    """What n-gram drafting proposes after these ids; one token that occurred before is enough for `longest` 2 only."""
    after: dict[tuple[int, ...], int] = {}
    for end in range(1, len(ids)):
        for size in range(min(2, longest - 1), min(longest, end + 1)):
            after[tuple(ids[end - size : end])] = end
    for size in range(min(longest - 1, len(ids)), min(2, longest - 1) - 1, -1):
        if (position := after.get(tuple(ids[-size:]))) is not None:
            return [*islice(cycle(ids[position : position + count]), count)]
    return []


class CheckedNgramDraft(NgramDrafter):
    """The library's drafter, each of whose drafts is compared with the reference implementation's."""

    def expects(self, sequence: TokenSequence) -> bool:
        result = super().has_candidate(sequence)
        assert result == bool(search_draft(sequence.ids, 1, self.max_ngram))
        return result

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[list[int]]:
        drafts = super().propose(sequences, counts)
        for sequence, count, draft in zip(sequences, counts, drafts, strict=True):
            assert draft == (search_draft(sequence.ids, count, self.max_ngram) if count else [])
        return drafts
