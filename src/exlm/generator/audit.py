"""The page table's promises to itself, as complaints about a table that broke one. Reads everything, changes
nothing, and is quick enough to run after every step of a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from .sequence import Sequence, digest

if TYPE_CHECKING:
    from .pages import Page, PageTable


def problems(table: PageTable, sequences: Iterable[Sequence]) -> list[str]:
    """What is wrong, given every sequence that has pages; one line each."""
    live = [sequence for sequence in sequences if sequence.pages]
    uses = Counter(index for sequence in live for index in sequence.pages)
    found = [*_tables(table)]
    for page in table._pages:
        found += (f"page {page.index}: {text}" for text in _page(table, page, uses[page.index]))
    for n, sequence in enumerate(live):
        found += (f"sequence {n}: {text}" for text in _sequence(table, sequence))
    return found


def _tables(table: PageTable) -> Iterator[str]:
    idle = [page.index for page in table._pages if page.refs == 0]
    if sorted(table._idle) != idle or table.free != len(idle):
        yield f"idle pages are {idle}, listed are {sorted(table._idle)}"
    ages = [page.age for page in table._idle.values()]
    if ages != sorted(ages):
        yield f"idle pages are not in the order of their last use: {ages}"
    for name, page in table._named.items():
        if page.name != name:
            yield f"page {page.index} is listed under a name that is not its own"
    for name, page in table._promised.items():
        if page.promise != name:
            yield f"page {page.index} is promised under a name it will not have"
    for lead, pages in table._leads.items():
        if not pages or any(page.lead != lead or index != page.index for index, page in pages.items()):
            yield f"pages {sorted(pages)} are listed under a beginning that is not theirs"


def _page(table: PageTable, page: Page, uses: int) -> Iterator[str]:
    if page.refs != uses:
        yield f"{page.refs} references, {uses} users"
    if page.filled > table.page_size:
        yield f"{page.filled} rows in a page of {table.page_size}"
    if page.name is not None:
        if table._named.get(page.name) is not page:
            yield "named, but not found by its name"
        if page.promise is not None:
            yield "named and still promised"
        if page.filled != table.page_size or page.parent is None:
            yield f"named with {page.filled} rows, parent {page.parent!r}"
        elif page.name != digest(page.parent, page.ids):
            yield "its name does not say what it holds"
    if page.promise is not None:
        if table._promised.get(page.promise) is not page:
            yield "promised, but not found by its promise"
        if page.refs == 0 or page.parent is None:
            yield "promised without a user or a parent"
        elif page.filled == table.page_size and page.promise != digest(page.parent, page.ids):
            yield "it does not hold what was promised"
    if page.lead is not None and table._leads.get(page.lead, {}).get(page.index) is not page:
        yield "not found by its beginning"
    lead = (page.parent, *page.ids[:2]) if page.parent is not None and page.filled > 1 else None
    if page.lead != lead:
        yield f"its beginning is {lead}, listed is {page.lead}"
    if page.refs == 0 and page.name is None and page.lead is None and (page.ids or page.parent or page.age):
        yield "of no use, but not blank"


def _sequence(table: PageTable, sequence: Sequence) -> Iterator[str]:
    size, ids, cached = table.page_size, sequence.ids, sequence.cached
    if not sequence.sealed * size <= cached <= len(ids) or not sequence.settled <= len(ids):
        yield f"{sequence.sealed} sealed, {cached} cached, {sequence.settled} settled of {len(ids)}"
    if len(sequence.pages) != -(-sequence.limit // size) or len(set(sequence.pages)) != len(sequence.pages):
        yield f"has pages {sequence.pages} for {sequence.limit} ids"
    if sequence.sealed != min(cached, sequence.settled - 1) // size:
        yield f"{sequence.sealed} pages sealed with {cached} cached and {sequence.settled} settled"
    held = [table._pages[index].filled for index in sequence.pages]
    if any(after and before < size for before, after in pairwise(held)):
        yield f"its pages hold {held} rows: there is a hole"
    for i, index in enumerate(sequence.pages):
        page = table._pages[index]
        valid = ids[i * size : min(cached, (i + 1) * size)]
        if page.ids[: len(valid)] != valid:
            yield f"page {index} holds {page.ids}, not {valid}"
        if page.parent != sequence.parent(i):
            yield f"page {index} has another parent than slot {i}"
        if i < len(sequence.names):
            if sequence.names[i] not in (page.name, page.promise) or (i < sequence.sealed and not page.name):
                yield f"page {index} does not have the name of slot {i}"
        elif page.refs != 1 or page.name or page.promise or page.filled != len(valid):
            yield f"page {index} is its own, but has {page.refs} users and {page.filled} rows"
