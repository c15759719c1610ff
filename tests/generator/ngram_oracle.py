"""N-gram drafting as it was first written: the index is a dictionary of tuples, read anew for every guess."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from exlm.generator.speculative import NgramDrafter
from exlm.generator.token_sequence import TokenSequence


def oracle(ids: list[int], count: int, longest: int) -> list[int]:
    """What n-gram drafting proposes after these ids."""
    after: dict[tuple[int, ...], int] = {}
    for end in range(1, len(ids)):
        for size in range(1, min(longest, end + 1)):
            after[tuple(ids[end - size : end])] = end
    for size in range(min(longest - 1, len(ids)), 0, -1):
        if (at := after.get(tuple(ids[-size:]))) is not None:
            return [*islice(cycle(ids[at : at + count]), count)]
    return []


class CheckedNgramDraft(NgramDrafter):
    """The library's, with every guess compared."""

    def expects(self, sequence: TokenSequence) -> bool:
        found = super().has_candidate(sequence)
        assert found == bool(oracle(sequence.ids, 1, self.max_ngram))
        return found

    def propose(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[list[int]]:
        found = super().propose(sequences, counts)
        for sequence, count, guess in zip(sequences, counts, found, strict=True):
            assert guess == (oracle(sequence.ids, count, self.max_ngram) if count else [])
        return found
