"""A page table that knows who uses it, and short ways to use it."""

from __future__ import annotations

from exlm.generator.page_table import PageCopy, PageTable
from exlm.generator.token_sequence import TokenSequence
from tests.generator.page_table_oracle import check_invariants


def sequence(text: str, new: int = 0, salt: bytes = b"") -> TokenSequence:
    return TokenSequence(list(text.encode()), salt, len(text) + new)


class TrackedPageTable(PageTable):
    """A page table that knows who uses it."""

    def __init__(self, num_pages: int, page_size: int = 256) -> None:
        super().__init__(num_pages, page_size)
        self.sequences: list[TokenSequence] = []

    def allocate(self, sequences: list[TokenSequence]) -> None:
        super().allocate(sequences)
        self.sequences += sequences

    def check_all(self) -> None:
        check_invariants(self, self.sequences)


def prefill(table: TrackedPageTable, *sequences: TokenSequence) -> list[PageCopy | None]:
    """Allocate and prefill, one sequence after the other; returns the copies that were ordered."""
    table.allocate(list(sequences))
    copies = []
    for one in sequences:
        table.skip_cached_tokens(one)
        copies.append(table.plan_partial_copy(one))
        table.mark_computed(one, len(one) - 1)
    table.check_all()
    return copies


def generate(table: TrackedPageTable, one: TokenSequence, text: str, *, finalize: bool = True) -> None:
    """Sample some ids."""
    for token in text.encode():
        table.mark_computed(one, len(one))
        one.ids.append(token)
        if finalize:
            table.mark_final(one, len(one))


def prefill_and_release(table: TrackedPageTable, one: TokenSequence) -> None:
    table.allocate([one])
    table.mark_computed(one, len(one) - 1)
    table.release(one)
