"""The page table's invariants, checked against every sequence that has pages, after every step of a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from exlm.generator.page_table import PageTable
from exlm.generator.token_sequence import TokenSequence


def check_invariants(table: PageTable, sequences: Iterable[TokenSequence]) -> None:
    """Raise AssertionError if any invariant is broken, given every sequence that has pages."""
    allocated = [sequence for sequence in sequences if sequence.pages]
    violations = table.violations(Counter(index for sequence in allocated for index in sequence.pages))
    for n, sequence in enumerate(allocated):
        violations += (f"sequence {n}: {text}" for text in _sequence_violations(table, sequence))
    assert not violations, "\n".join(violations)


def _sequence_violations(table: PageTable, sequence: TokenSequence) -> Iterator[str]:
    size, ids, cached = table.page_size, sequence.ids, sequence.num_computed_tokens
    if not sequence.num_published_pages * size <= cached <= len(ids) or not sequence.num_final_tokens <= len(ids):
        published, final = sequence.num_published_pages, sequence.num_final_tokens
        yield f"{published} pages published, {cached} tokens computed, {final} final of {len(ids)}"
    if len(sequence.pages) != -(-sequence.max_length // size) or len(set(sequence.pages)) != len(sequence.pages):
        yield f"has pages {sequence.pages} for {sequence.max_length} ids"
    settled = min(cached, sequence.num_final_tokens - 1)
    if table.states is not None:  # a rewind may compute again all that follows the last state before
        settled = max((p for p in sequence.states if p <= settled), default=0)
    if sequence.num_published_pages != settled // size:
        published, final = sequence.num_published_pages, sequence.num_final_tokens
        yield f"{published} pages published with {cached} tokens computed and {final} final"
    filled_rows = [len(table._pages[index].ids) for index in sequence.pages]
    if any(after and before < size for before, after in pairwise(filled_rows)):
        yield f"its pages hold {filled_rows} rows: there is a hole"
    if table.states is not None and cached and cached not in sequence.states:
        yield f"no recurrent state after {cached} tokens, only after {sorted(sequence.states)}"
    for i, index in enumerate(sequence.pages):
        page = table._pages[index]
        valid = ids[i * size : min(cached, (i + 1) * size)]
        if page.ids[: len(valid)] != valid:
            yield f"page {index} holds {page.ids}, not {valid}"
        if page.parent_hash != sequence.parent_hash(i):
            yield f"page {index} has another parent than slot {i}"
        shared_when_pending = table.states is None  # with recurrent states, pages are shared once published
        if i < (len(sequence.page_hashes) if shared_when_pending else sequence.num_published_pages):
            if sequence.page_hashes[i] not in (page.page_hash, page.pending_hash) or (
                i < sequence.num_published_pages and not page.page_hash
            ):
                yield f"page {index} does not have the hash of slot {i}"
        elif page.ref_count != 1 or page.page_hash or page.pending_hash or len(page.ids) != len(valid):
            yield f"page {index} is its own, but has {page.ref_count} users and {len(page.ids)} rows"
