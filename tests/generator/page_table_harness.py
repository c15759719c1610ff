"""A page table that tracks its allocated sequences, and helpers that use it."""

from __future__ import annotations

from exlm.generator.page_table import PageCopy, PageTable
from exlm.generator.token_sequence import TokenSequence
from tests.generator.page_table_oracle import check_invariants


def make_sequence(text: str, max_new_tokens: int = 0, salt: bytes = b"") -> TokenSequence:
    return TokenSequence(list(text.encode()), salt, len(text) + max_new_tokens)


class TrackedPageTable(PageTable):
    """A page table that tracks its allocated sequences."""

    def __init__(self, num_pages: int, page_size: int = 256) -> None:
        super().__init__(num_pages, page_size)
        self.sequences: list[TokenSequence] = []

    def allocate(self, sequences: list[TokenSequence]) -> None:
        super().allocate(sequences)
        self.sequences += sequences

    def check_all(self) -> None:
        check_invariants(self, self.sequences)


def prefill(table: TrackedPageTable, *sequences: TokenSequence) -> list[PageCopy | None]:
    """Allocate and prefill the sequences one by one; return the page copies that were ordered."""
    table.allocate(list(sequences))
    copies = []
    for sequence in sequences:
        table.skip_cached_tokens(sequence)
        copies.append(table.plan_partial_copy(sequence))
        table.mark_computed(sequence, len(sequence) - 1)
    table.check_all()
    return copies


def generate(table: TrackedPageTable, sequence: TokenSequence, text: str, *, finalize: bool = True) -> None:
    """Append the ids of a text as if they had been sampled."""
    for token in text.encode():
        table.mark_computed(sequence, len(sequence))
        sequence.ids.append(token)
        if finalize:
            table.mark_final(sequence, len(sequence))


def prefill_and_release(table: TrackedPageTable, sequence: TokenSequence) -> None:
    table.allocate([sequence])
    table.mark_computed(sequence, len(sequence) - 1)
    table.release(sequence)
