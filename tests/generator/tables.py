"""A page table that knows who uses it, and short ways to use it."""

from __future__ import annotations

from exlm.generator.pages import Copy, PageTable
from exlm.generator.sequence import Sequence


def sequence(text: str, new: int = 0, salt: bytes = b"") -> Sequence:
    return Sequence(list(text.encode()), salt, len(text) + new)


class Table(PageTable):
    """A page table that knows who uses it."""

    def __init__(self, num_pages: int, page_size: int = 256) -> None:
        super().__init__(num_pages, page_size)
        self.users: list[Sequence] = []

    def allocate(self, sequences: list[Sequence]) -> None:
        super().allocate(sequences)
        self.users += sequences

    def verify(self) -> None:
        self.check(self.users)


def fill(table: Table, *sequences: Sequence) -> list[Copy | None]:
    """Allocate and prefill, one sequence after the other; returns the copies that were ordered."""
    table.allocate(list(sequences))
    orders = []
    for one in sequences:
        table.advance(one)
        orders.append(table.partial(one))
        table.commit(one, len(one) - 1)
    table.verify()
    return orders


def say(table: Table, one: Sequence, text: str, *, settle: bool = True) -> None:
    """Sample some ids."""
    for token in text.encode():
        table.commit(one, len(one))
        one.ids.append(token)
        if settle:
            table.settle(one, len(one))


def fill_quietly(table: Table, one: Sequence) -> None:
    table.allocate([one])
    table.commit(one, len(one) - 1)
    table.release(one)
