"""The page table's promises to itself, as complaints about a table that broke one. Reads everything, changes
nothing, and is quick enough to run after every step of a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from .token_sequence import TokenSequence, hash_page

if TYPE_CHECKING:
    from .page_table import Page, PageTable


def invariant_violations(table: PageTable, sequences: Iterable[TokenSequence]) -> list[str]:
    """What is wrong, given every sequence that has pages; one line each."""
    allocated = [sequence for sequence in sequences if sequence.pages]
    uses = Counter(index for sequence in allocated for index in sequence.pages)
    found = [*_index_violations(table)]
    for page in table._pages:
        found += (f"page {page.index}: {text}" for text in _page_violations(table, page, uses[page.index]))
    for n, sequence in enumerate(allocated):
        found += (f"sequence {n}: {text}" for text in _sequence_violations(table, sequence))
    return found


def _index_violations(table: PageTable) -> Iterator[str]:
    idle = [page.index for page in table._pages if page.ref_count == 0]
    if sorted(table._idle) != idle or table.num_free_pages != len(idle):
        yield f"idle pages are {idle}, listed are {sorted(table._idle)}"
    last_uses = [page.last_used for page in table._idle.values()]
    if last_uses != sorted(last_uses):
        yield f"idle pages are not in the order of their last use: {last_uses}"
    for page_hash, page in table._by_hash.items():
        if page.page_hash != page_hash:
            yield f"page {page.index} is listed under a name that is not its own"
    for page_hash, page in table._by_pending_hash.items():
        if page.pending_hash != page_hash:
            yield f"page {page.index} is promised under a name it will not have"
    for prefix_key, pages in table._by_prefix_key.items():
        if not pages or any(
            page.prefix_key != prefix_key or index != page.index for index, page in pages.items()
        ):
            yield f"pages {sorted(pages)} are listed under a beginning that is not theirs"


def _page_violations(table: PageTable, page: Page, uses: int) -> Iterator[str]:
    if page.ref_count != uses:
        yield f"{page.ref_count} references, {uses} users"
    if page.filled > table.page_size:
        yield f"{page.filled} rows in a page of {table.page_size}"
    if page.page_hash is not None:
        if table._by_hash.get(page.page_hash) is not page:
            yield "named, but not found by its name"
        if page.pending_hash is not None:
            yield "named and still promised"
        if page.filled != table.page_size or page.parent_hash is None:
            yield f"named with {page.filled} rows, parent {page.parent_hash!r}"
        elif page.page_hash != hash_page(page.parent_hash, page.ids):
            yield "its name does not say what it holds"
    if page.pending_hash is not None:
        if table._by_pending_hash.get(page.pending_hash) is not page:
            yield "promised, but not found by its promise"
        if page.ref_count == 0 or page.parent_hash is None:
            yield "promised without a user or a parent"
        elif page.filled == table.page_size and page.pending_hash != hash_page(page.parent_hash, page.ids):
            yield "it does not hold what was promised"
    if (
        page.prefix_key is not None
        and table._by_prefix_key.get(page.prefix_key, {}).get(page.index) is not page
    ):
        yield "not found by its beginning"
    prefix_key = (
        (page.parent_hash, *page.ids[:2]) if page.parent_hash is not None and page.filled > 1 else None
    )
    if page.prefix_key != prefix_key:
        yield f"its beginning is {prefix_key}, listed is {page.prefix_key}"
    if (
        page.ref_count == 0
        and page.page_hash is None
        and page.prefix_key is None
        and (page.ids or page.parent_hash or page.last_used)
    ):
        yield "of no use, but not blank"


def _sequence_violations(table: PageTable, sequence: TokenSequence) -> Iterator[str]:
    size, ids, cached = table.page_size, sequence.ids, sequence.num_computed_tokens
    if not sequence.num_published_pages * size <= cached <= len(ids) or not sequence.num_final_tokens <= len(
        ids
    ):
        published, final = sequence.num_published_pages, sequence.num_final_tokens
        yield f"{published} pages published, {cached} tokens computed, {final} final of {len(ids)}"
    if len(sequence.pages) != -(-sequence.max_length // size) or len(set(sequence.pages)) != len(
        sequence.pages
    ):
        yield f"has pages {sequence.pages} for {sequence.max_length} ids"
    if sequence.num_published_pages != min(cached, sequence.num_final_tokens - 1) // size:
        published, final = sequence.num_published_pages, sequence.num_final_tokens
        yield f"{published} pages published with {cached} tokens computed and {final} final"
    filled_rows = [table._pages[index].filled for index in sequence.pages]
    if any(after and before < size for before, after in pairwise(filled_rows)):
        yield f"its pages hold {filled_rows} rows: there is a hole"
    for i, index in enumerate(sequence.pages):
        page = table._pages[index]
        valid = ids[i * size : min(cached, (i + 1) * size)]
        if page.ids[: len(valid)] != valid:
            yield f"page {index} holds {page.ids}, not {valid}"
        if page.parent_hash != sequence.parent_hash(i):
            yield f"page {index} has another parent than slot {i}"
        if i < len(sequence.page_hashes):
            if sequence.page_hashes[i] not in (page.page_hash, page.pending_hash) or (
                i < sequence.num_published_pages and not page.page_hash
            ):
                yield f"page {index} does not have the name of slot {i}"
        elif page.ref_count != 1 or page.page_hash or page.pending_hash or page.filled != len(valid):
            yield f"page {index} is its own, but has {page.ref_count} users and {page.filled} rows"
