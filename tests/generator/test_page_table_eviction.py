"""The page table: rewinding, keeping and evicting pages, and the order of eviction."""

from __future__ import annotations

import pytest

from exlm.errors import CacheTooSmall, ExlmError, InputError
from exlm.generator.page_table import PageCopy, PageTable
from exlm.generator.token_sequence import TokenSequence
from tests.generator.page_table_harness import (
    TrackedPageTable,
    generate,
    make_sequence,
    prefill,
    prefill_and_release,
)
from tests.generator.page_table_oracle import check_invariants


def test_tokens_that_may_be_rewound_are_not_shared() -> None:
    table = TrackedPageTable(16, 4)
    a = make_sequence("abc", 9)
    prefill(table, a)
    generate(table, a, "defgh", finalize=False)
    b = make_sequence("abcdefX")
    prefill(table, b)
    assert b.cached_pages == 0
    assert b.pages[0] != a.pages[0]
    table.rewind(a, 3)
    table.check_all()
    assert a.prefill_done
    assert (a.ids, a.num_computed_tokens) == (list(b"abc"), 2)
    generate(table, a, "XYZ")
    table.check_all()


def test_a_page_is_not_shared_while_its_last_id_may_be_fed_again() -> None:
    table = TrackedPageTable(16, 4)
    a = make_sequence("abc", 9)
    prefill(table, a)
    generate(table, a, "def", finalize=False)
    table.mark_final(a, 4)  # to the very end of the page: a rewind to it feeds id 4 again
    assert a.num_published_pages == 0
    table.rewind(a, 4)
    assert a.num_computed_tokens == 3
    table.check_all()
    generate(table, a, "x")
    assert a.num_published_pages == 1
    table.check_all()


def test_only_unfinalized_ids_can_be_rewound() -> None:
    table = TrackedPageTable(16, 4)
    a = make_sequence("abc", 9)
    prefill(table, a)
    generate(table, a, "de")
    generate(table, a, "fg", finalize=False)
    for length in (4, 8, 0):
        with pytest.raises(InputError, match="are final"):
            table.rewind(a, length)
    table.rewind(a, 7)
    table.rewind(a, 5)
    assert a.ids == list(b"abcde")


def test_text_held_over_a_page_boundary_is_neither_lost_nor_misplaced() -> None:
    """The first page is hashed when its text is final; the second is never taken for a first page."""
    table = TrackedPageTable(16, 4)
    a = make_sequence("ab", 12)
    prefill(table, a)
    generate(table, a, "cdefgh", finalize=False)
    unrelated = make_sequence("efgX")  # what the second page holds, at another position
    assert prefill(table, unrelated) == [None]
    assert unrelated.cached_tokens == 0
    table.release(unrelated)
    table.mark_final(a, len(a))
    generate(table, a, "i")
    b = make_sequence("abcdefghi")
    prefill(table, b)
    assert b.cached_pages == 2
    table.check_all()


def test_text_still_held_at_the_end_is_found_again() -> None:
    """The pages of a cancelled job stay in the cache, whether its text was held or not."""
    table = TrackedPageTable(16, 4)
    a = make_sequence("ab", 12)
    prefill(table, a)
    generate(table, a, "cdefgh", finalize=False)
    table.release(a)
    table.check_all()
    b = make_sequence("abcdefgh?")
    prefill(table, b)
    assert b.cached_tokens == 7


def test_rejected_drafts_are_not_cached() -> None:
    """Rows past the committed ids contain drafts; only committed ids are hashed."""
    table = TrackedPageTable(16, 4)
    a = make_sequence("abc", 12)
    prefill(table, a)
    table.mark_computed(a, 3)
    a.ids += list(b"d")
    table.release(a)
    (order,) = prefill(table, make_sequence("abcdef"))
    assert order is not None
    assert order.num_tokens == 3


def test_a_jobs_own_cached_pages_are_not_evicted_for_it() -> None:
    table = TrackedPageTable(4)
    prompt = list(range(773))
    a = TokenSequence(list(prompt), max_length=800)
    prefill(table, a)
    table.release(a)
    other = TokenSequence([5, 6, 7])
    prefill(table, other)
    table.release(other)
    repeated = TokenSequence(list(prompt), max_length=800)
    prefill(table, repeated)
    assert repeated.cached_pages == 3


def test_useful_rows_stay_in_place_when_every_page_is_needed() -> None:
    """A chat whose answer may fill the cache takes all pages each turn, and still reuses its prefix."""
    table = TrackedPageTable(4, 4)
    a = make_sequence("abcdefg", 9)
    prefill(table, a)
    table.release(a)
    b = make_sequence("abcdefgh", 8)
    assert prefill(table, b) == [None]
    assert (b.cached_pages, b.cached_tokens) == (1, 6)
    table.release(b)
    c = make_sequence("abcdefX", 9)
    prefill(table, c)
    assert (c.cached_pages, c.cached_tokens) == (1, 6)
    table.check_all()


def test_one_page_for_the_whole_cache_reuses_the_last_job() -> None:
    """G14, unpaged: prompt + 3 generated + 10 new tokens costs 10."""
    table = TrackedPageTable(1, 1024)
    a = TokenSequence(list(range(100)), max_length=103)
    prefill(table, a)
    generate(table, a, "xyz")
    table.release(a)
    b = TokenSequence([*range(100), *b"xyz", *range(10)], max_length=120)
    prefill(table, b)
    assert (b.cached_pages, b.cached_tokens) == (0, 102)


def test_eviction_is_lru_and_suffix_before_prefix() -> None:
    table = TrackedPageTable(6, 4)
    older, newer = make_sequence("abcdefghi"), make_sequence("ABCDEFGHI")
    prefill(table, older)
    prefill(table, newer)
    table.release(older)
    table.release(newer)
    prefill(table, largest := make_sequence("0123456", 5))  # takes both ends, which are blank, and one page more
    table.release(largest)
    table.allocate([repeated := make_sequence("ABCDEFGHI")])
    assert repeated.num_computed_tokens == 8
    table.release(repeated)
    table.allocate([repeated := make_sequence("abcdefghi")])
    assert repeated.num_computed_tokens == 4
    table.check_all()


def test_empty_pages_are_taken_first() -> None:
    table = TrackedPageTable(4, 4)
    a = make_sequence("abcde")
    prefill(table, a)
    table.release(a)
    for _ in range(5):
        prefill(table, other := make_sequence("X"))
        table.release(other)
    prefill(table, repeated := make_sequence("abcde"))
    assert repeated.cached_pages == 1


def test_clear_empties_free_pages_only() -> None:
    table = TrackedPageTable(8, 4)
    a, b = make_sequence("abcdefgh"), make_sequence("ABCDEFGH")
    prefill(table, a, b)
    table.release(a)
    table.clear_prefix_cache()
    table.check_all()
    prefill(table, c := make_sequence("abcdefgh"))
    assert c.cached_tokens == 0
    prefill(table, d := make_sequence("ABCDEFGH"))
    assert d.cached_pages == 1
    table.check_all()


def test_more_than_there_is_cannot_be_allocated() -> None:
    table = TrackedPageTable(2, 4)
    with pytest.raises(CacheTooSmall, match="3 pages are needed but 2 are free"):
        table.allocate([TokenSequence([1] * 9, max_length=12)])
    table.check_all()
    with pytest.raises(InputError):
        PageTable(0)
    assert issubclass(CacheTooSmall, ExlmError)


def test_a_released_sequence_can_no_longer_be_changed() -> None:
    table = TrackedPageTable(4, 4)
    a = make_sequence("abcdef")
    table.allocate([a])
    table.release(a)
    table.mark_computed(a, 5)
    table.mark_final(a, 5)
    table.release(a)
    table.check_all()
    assert table.num_free_pages == 4


def test_a_failed_copy_leaves_no_trace() -> None:
    table = TrackedPageTable(8, 4)
    prefill(table, make_sequence("abcd"))
    a = make_sequence("abcX")
    table.allocate([a])
    assert table.plan_partial_copy(a) == table.plan_partial_copy(a) == PageCopy(0, a.pages[0], 3)
    assert (a.num_computed_tokens, a.cached_tokens) == (0, 0)
    table.mark_computed(a, 3)
    assert (a.num_computed_tokens, a.cached_tokens) == (3, 3)


def test_a_copy_that_was_not_needed_after_all_does_not_count() -> None:
    table = TrackedPageTable(8, 4)
    prefill(table, make_sequence("abXX"))
    a, b = make_sequence("abcdefgh"), make_sequence("abcdefgh")
    table.allocate([a])
    table.allocate([b])
    assert table.plan_partial_copy(a) is not None
    table.mark_computed(b, 7)
    table.skip_cached_tokens(a)
    table.mark_computed(a, 7)
    assert (a.cached_pages, a.cached_tokens) == (1, 4)


def test_a_page_that_serves_as_a_source_was_used() -> None:
    table = TrackedPageTable(4, 4)
    prefill(table, x := make_sequence("abcd"), y := make_sequence("0123"), z := make_sequence("!", 7))
    source, other = x.pages[0], y.pages[0]
    table.release(x)
    table.release(y)
    order = prefill(table, make_sequence("abXY"))
    assert order == [PageCopy(source, other, 2)]
    assert table.num_cached_tokens(source) == 3
    table.release(z)


def test_the_version_tells_when_it_is_worth_asking_again() -> None:
    table = TrackedPageTable(4, 4)
    versions = [table.capacity_version]
    table.allocate([a := make_sequence("abcdef")])
    versions.append(table.capacity_version)
    table.mark_computed(a, 5)
    assert table.capacity_version == versions[-1]
    table.release(a)
    versions.append(table.capacity_version)
    assert len(set(versions)) == 3


def test_check_invariants_finds_violations() -> None:
    table = TrackedPageTable(8, 4)
    a = make_sequence("abcdefghij", 2)
    prefill(table, a)
    with pytest.raises(AssertionError, match="1 references, 0 users"):
        check_invariants(table, [])
    a.ids[1] = 7
    with pytest.raises(AssertionError, match="holds"):
        check_invariants(table, [a])
    a.ids[1] = ord("b")
    table._pages[a.pages[0]].ids[0] = 7
    with pytest.raises(AssertionError, match="its hash is not that of its ids"):
        check_invariants(table, [a])


def test_prefix_lookup_does_not_scan_every_page() -> None:
    table = TrackedPageTable(4000, 64)
    for n in range(2000):
        prefill_and_release(table, TokenSequence([n, *range(40), *([n] * 20)]))
    sequence = TokenSequence([777, *range(60)])
    table.allocate([sequence])
    order = table.plan_partial_copy(sequence)
    assert order is not None
    assert order.num_tokens == 41
    lead = table.start_key(sequence, 0)
    assert lead is not None
    assert len(table._by_start_key[lead]) == 1
