"""The page table: hashing, sharing and copying of pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.generator.page_table import PageCopy
from exlm.generator.token_sequence import TokenSequence, common_prefix_length, hash_page
from tests.generator.page_table_harness import TrackedPageTable, generate, make_sequence, prefill


def test_a_sequence_is_ready_when_only_its_last_id_is_to_be_fed() -> None:
    sequence = make_sequence("abc")
    assert (len(sequence), sequence.prefill_done, sequence.max_length) == (3, False, 3)
    sequence.num_computed_tokens = 2
    assert sequence.prefill_done
    assert TokenSequence([7]).prefill_done
    assert TokenSequence([1, 2, 3], max_length=2).max_length == 3


def test_the_root_hash_depends_on_the_salt() -> None:
    roots = {make_sequence("a", salt=salt).root_hash for salt in (b"", b"lora", b"tenant")}
    assert len(roots) == 3
    assert make_sequence("a").root_hash == make_sequence("b").root_hash


def test_page_hashes_are_chained() -> None:
    table = TrackedPageTable(8, 4)
    sequence = make_sequence("abcdefghij")
    prefill(table, sequence)
    first = hash_page(sequence.root_hash, list(b"abcd"))
    assert sequence.page_hashes == [first, hash_page(first, list(b"efgh"))]
    assert len(first) == 16
    assert hash_page(first, [10**9]) != hash_page(first, [10**9 + 1])


@given(st.lists(st.integers(0, 2**40), max_size=8), st.lists(st.integers(0, 2**40), max_size=8))
def test_digests_tell_ids_apart(a: list[int], b: list[int]) -> None:
    assert (hash_page(b"parent", a) == hash_page(b"parent", b)) == (a == b)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_length(a: list[int], b: list[int]) -> None:
    n = common_prefix_length(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_pages_are_reserved_for_the_limit() -> None:
    table = TrackedPageTable(8, 4)
    sequence = make_sequence("abcde", max_new_tokens=8)
    assert table.count_pages([sequence]) == table.count_free_pages_needed([sequence]) == 4  # 13 ids
    table.allocate([sequence])
    assert len(sequence.pages) == 4
    assert table.num_free_pages == 4


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 256, 512, 513])
@pytest.mark.parametrize("new", [0, 1])
def test_every_row_that_is_written_has_a_page(length: int, new: int) -> None:
    size = 256 if length > 100 else 4
    table = TrackedPageTable(4, size)
    sequence = TokenSequence(list(range(length)), max_length=length + new)
    prefill(table, sequence)
    assert sequence.prefill_done
    table.mark_computed(sequence, length)
    assert len(sequence.pages) * size >= length + new
    table.check_all()
    table.release(sequence)
    assert table.num_free_pages == 4


def test_live_prompts_share_pages_but_not_the_last() -> None:
    table = TrackedPageTable(16, 4)
    a, b = make_sequence("abcdefghij", 4), make_sequence("abcdefghij", 4)
    prefill(table, a)
    assert table.count_free_pages_needed([b]) == 2
    prefill(table, b)
    assert a.pages[:2] == b.pages[:2]
    assert a.pages[2] != b.pages[2]
    assert (b.cached_pages, b.cached_tokens) == (2, 8)
    table.release(a)
    table.check_all()
    table.release(b)
    assert table.num_free_pages == 16


def test_prompts_with_other_salts_share_nothing() -> None:
    """Equal ids under other adapters have other keys and values."""
    table = TrackedPageTable(16, 4)
    a, b = make_sequence("abcdefghij"), make_sequence("abcdefghij", salt=b"lora")
    prefill(table, a)
    assert prefill(table, b) == [None]
    assert b.cached_tokens == 0
    assert not set(a.pages) & set(b.pages)


def test_prompts_that_arrive_together_share_pages_that_do_not_exist_yet() -> None:
    table = TrackedPageTable(16, 4)
    a, b = make_sequence("abcdefghij", 4), make_sequence("abcdefghXY", 4)
    table.allocate([a])
    assert table.count_free_pages_needed([b]) == 2
    table.allocate([b])
    assert a.pages[:2] == b.pages[:2]
    assert b.num_computed_tokens == 0
    table.mark_computed(a, 4)
    table.skip_cached_tokens(b)
    assert b.num_computed_tokens == 4
    table.check_all()


@pytest.mark.parametrize("filled", [0, 2, 4, 6, 8])
def test_a_pending_hash_outlives_the_sequence_that_set_it(filled: int) -> None:
    table = TrackedPageTable(16, 4)
    a, b = make_sequence("abcdefghij"), make_sequence("abcdefghij")
    table.allocate([a])
    table.allocate([b])
    table.mark_computed(a, filled)
    table.release(a)
    table.check_all()
    table.skip_cached_tokens(b)
    assert b.num_computed_tokens == filled
    table.mark_computed(b, 9)
    table.check_all()
    c = make_sequence("abcdefghij")
    prefill(table, c)
    assert c.pages[:2] == b.pages[:2]


def test_an_unused_pending_hash_is_dropped() -> None:
    table = TrackedPageTable(4, 4)
    a = make_sequence("abcdefghij")
    table.allocate([a])
    table.mark_computed(a, 6)
    table.release(a)
    table.check_all()
    b = make_sequence("abcdefghij")
    assert prefill(table, b) == [None] or b.cached_tokens >= 4
    assert b.cached_pages == 1


def test_a_pair_counts_what_it_shares_once() -> None:
    """The size of a job is that of all its sequences."""
    table = TrackedPageTable(16, 4)
    pair = [make_sequence("abcdefghij", 2), make_sequence("abcdefghXY", 2)]
    assert table.count_pages(pair) == table.count_free_pages_needed(pair) == 2 + 1 + 1
    different = [make_sequence("abcdefghij", 2), make_sequence("xbcdefghXY", 2)]
    assert table.count_pages(different) == 6
    prefill(table, *pair)
    assert table.num_free_pages == 12
    assert pair[0].pages[:2] == pair[1].pages[:2]
    equal = [make_sequence("qqqqqqqqqq"), make_sequence("qqqqqqqqqq")]
    prefill(table, *equal)
    table.check_all()


def test_released_pages_are_found_again_and_partly_equal_ones_copied() -> None:
    table = TrackedPageTable(8, 4)
    a = make_sequence("abcdefgh", 2)
    prefill(table, a)
    pages = a.pages
    table.release(a)
    b = make_sequence("abcdefXYZ", 2)
    assert prefill(table, b) == [PageCopy(pages[1], b.pages[1], 2)]
    assert b.pages[0] == pages[0]
    assert (b.cached_pages, b.cached_tokens) == (1, 6)


def test_one_equal_id_is_not_worth_a_copy() -> None:
    table = TrackedPageTable(8, 4)
    prefill(table, make_sequence("abcd"))
    assert prefill(table, make_sequence("aXYZ")) == [None]


def test_a_copy_never_includes_the_last_id() -> None:
    table = TrackedPageTable(8, 4)
    a = make_sequence("abc", 5)
    prefill(table, a)
    generate(table, a, "d")
    (order,) = prefill(table, b := make_sequence("abc"))
    assert order == PageCopy(a.pages[0], b.pages[0], 2)
    assert b.prefill_done


def test_the_longest_equal_beginning_is_copied() -> None:
    table = TrackedPageTable(16, 4)
    for text in ("abXX", "abcX", "abYY", "abc"):
        prefill(table, make_sequence(text + "?"))
    (order,) = prefill(table, make_sequence("abcd?"))
    assert order is not None
    assert order.num_tokens == 3


def test_generated_text_is_found_again() -> None:
    """The golden continuation: prompt + 3 generated + 40 new tokens costs 40."""
    table = TrackedPageTable(12)
    a = TokenSequence(list(range(620)), max_length=640)
    prefill(table, a)
    generate(table, a, "xyz")
    table.release(a)
    b = TokenSequence([*range(620), *b"xyz", *range(40)], max_length=700)
    prefill(table, b)
    assert b.cached_tokens == 622


def test_a_prompt_of_whole_pages_and_one_token_needs_no_prefill() -> None:
    """G10."""
    table = TrackedPageTable(8)
    a, b = TokenSequence(list(range(513)), max_length=520), TokenSequence(list(range(513)), max_length=520)
    prefill(table, a)
    table.release(a)
    table.allocate([b])
    assert b.prefill_done
    assert (b.cached_pages, b.cached_tokens) == (2, 512)


def test_a_page_completed_while_generating_is_shared() -> None:
    table = TrackedPageTable(16, 4)
    a = make_sequence("abc", 6)
    prefill(table, a)
    generate(table, a, "defg")
    b = make_sequence("abcdeX")
    prefill(table, b)
    assert b.pages[0] == a.pages[0]
    assert b.cached_pages == 1
    table.check_all()


def test_equal_generated_pages_are_merged() -> None:
    table = TrackedPageTable(16, 4)
    a, b = make_sequence("abc", 6), make_sequence("ab", 6)
    prefill(table, a, b)
    generate(table, a, "def")
    free, duplicate = table.num_free_pages, b.pages[0]
    generate(table, b, "cdef")
    assert b.pages[0] == a.pages[0]
    assert b.pages[1] != a.pages[1]
    assert table.num_free_pages == free + 1
    assert table.num_cached_tokens(duplicate) == 0
    table.check_all()


def test_a_free_duplicate_page_is_cleared() -> None:
    table = TrackedPageTable(16, 4)
    a, b = make_sequence("abc", 6), make_sequence("ab", 6)
    prefill(table, a, b)
    generate(table, a, "dex")
    duplicate = a.pages[0]
    table.release(a)
    generate(table, b, "cdef")
    assert b.pages[0] != duplicate
    assert table.num_cached_tokens(duplicate) == 0
    table.check_all()


def test_a_pending_page_completed_by_another_sequence_serves_both() -> None:
    table = TrackedPageTable(16, 4)
    a = make_sequence("abc", 6)
    prefill(table, a)
    b = make_sequence("abcdefgh", 2)
    table.allocate([b])
    promised = b.pages[0]
    generate(table, a, "def")
    assert a.pages[0] != promised
    table.check_all()
    table.skip_cached_tokens(b)
    assert b.pages[0] == a.pages[0]
    assert b.num_computed_tokens == 4
    table.check_all()
