"""The page table: what is named, shared and copied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.generator.pages import Copy
from exlm.generator.sequence import Sequence, common_length, digest
from tests.generator.tables import Table, fill, say, sequence


def test_a_sequence_is_ready_when_only_its_last_id_is_to_be_fed() -> None:
    one = sequence("abc")
    assert (len(one), one.ready, one.limit) == (3, False, 3)
    one.cached = 2
    assert one.ready
    assert Sequence([7]).ready
    assert Sequence([1, 2, 3], limit=2).limit == 3


def test_the_root_depends_on_the_salt() -> None:
    roots = {sequence("a", salt=salt).root for salt in (b"", b"lora", b"tenant")}
    assert len(roots) == 3
    assert sequence("a").root == sequence("b").root


def test_names_are_chained_digests() -> None:
    table = Table(8, 4)
    one = sequence("abcdefghij")
    fill(table, one)
    first = digest(one.root, list(b"abcd"))
    assert one.names == [first, digest(first, list(b"efgh"))]
    assert len(first) == 16
    assert digest(first, [10**9]) != digest(first, [10**9 + 1])


@given(st.lists(st.integers(0, 2**40), max_size=8), st.lists(st.integers(0, 2**40), max_size=8))
def test_digests_tell_ids_apart(a: list[int], b: list[int]) -> None:
    assert (digest(b"parent", a) == digest(b"parent", b)) == (a == b)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_length(a: list[int], b: list[int]) -> None:
    n = common_length(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_pages_are_reserved_for_the_limit() -> None:
    table = Table(8, 4)
    one = sequence("abcde", new=8)
    assert table.pages_for([one]) == table.cost([one]) == 4  # 13 ids
    table.allocate([one])
    assert len(one.pages) == 4
    assert table.free == 4


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 256, 512, 513])
@pytest.mark.parametrize("new", [0, 1])
def test_every_row_that_is_written_has_a_page(length: int, new: int) -> None:
    size = 256 if length > 100 else 4
    table = Table(4, size)
    one = Sequence(list(range(length)), limit=length + new)
    fill(table, one)
    assert one.ready
    table.commit(one, length)
    assert len(one.pages) * size >= length + new
    table.verify()
    table.release(one)
    assert table.free == 4


def test_live_prompts_share_pages_but_not_the_last() -> None:
    table = Table(16, 4)
    a, b = sequence("abcdefghij", 4), sequence("abcdefghij", 4)
    fill(table, a)
    assert table.cost([b]) == 2
    fill(table, b)
    assert a.pages[:2] == b.pages[:2]
    assert a.pages[2] != b.pages[2]
    assert (b.cached_pages, b.cached_tokens) == (2, 8)
    table.release(a)
    table.verify()
    table.release(b)
    assert table.free == 16


def test_prompts_with_other_salts_share_nothing() -> None:
    """T21: equal ids under other adapters have other keys and values."""
    table = Table(16, 4)
    a, b = sequence("abcdefghij"), sequence("abcdefghij", salt=b"lora")
    fill(table, a)
    assert fill(table, b) == [None]
    assert b.cached_tokens == 0
    assert not set(a.pages) & set(b.pages)


def test_prompts_that_arrive_together_share_pages_that_do_not_exist_yet() -> None:
    table = Table(16, 4)
    a, b = sequence("abcdefghij", 4), sequence("abcdefghXY", 4)
    table.allocate([a])
    assert table.cost([b]) == 2
    table.allocate([b])
    assert a.pages[:2] == b.pages[:2]
    assert b.cached == 0
    table.commit(a, 4)
    table.advance(b)
    assert b.cached == 4
    table.verify()


@pytest.mark.parametrize("filled", [0, 2, 4, 6, 8])
def test_a_promise_outlives_the_one_who_made_it(filled: int) -> None:
    table = Table(16, 4)
    a, b = sequence("abcdefghij"), sequence("abcdefghij")
    table.allocate([a])
    table.allocate([b])
    table.commit(a, filled)
    table.release(a)
    table.verify()
    table.advance(b)
    assert b.cached == filled
    table.commit(b, 9)
    table.verify()
    c = sequence("abcdefghij")
    fill(table, c)
    assert c.pages[:2] == b.pages[:2]


def test_a_promise_nobody_waits_for_is_forgotten() -> None:
    table = Table(4, 4)
    a = sequence("abcdefghij")
    table.allocate([a])
    table.commit(a, 6)
    table.release(a)
    table.verify()
    b = sequence("abcdefghij")
    assert fill(table, b) == [None] or b.cached_tokens >= 4
    assert b.cached_pages == 1


def test_a_pair_counts_what_it_shares_once() -> None:
    """T13: the size of a job is that of all its sequences."""
    table = Table(16, 4)
    pair = [sequence("abcdefghij", 2), sequence("abcdefghXY", 2)]
    assert table.pages_for(pair) == table.cost(pair) == 2 + 1 + 1
    apart = [sequence("abcdefghij", 2), sequence("xbcdefghXY", 2)]
    assert table.pages_for(apart) == 6
    fill(table, *pair)
    assert table.free == 12
    assert pair[0].pages[:2] == pair[1].pages[:2]
    twins = [sequence("qqqqqqqqqq"), sequence("qqqqqqqqqq")]
    fill(table, *twins)
    table.verify()


def test_released_pages_are_found_again_and_partly_equal_ones_copied() -> None:
    table = Table(8, 4)
    a = sequence("abcdefgh", 2)
    fill(table, a)
    pages = a.pages
    table.release(a)
    b = sequence("abcdefXYZ", 2)
    assert fill(table, b) == [Copy(pages[1], b.pages[1], 2)]
    assert b.pages[0] == pages[0]
    assert (b.cached_pages, b.cached_tokens) == (1, 6)


def test_one_equal_id_is_not_worth_a_copy() -> None:
    table = Table(8, 4)
    fill(table, sequence("abcd"))
    assert fill(table, sequence("aXYZ")) == [None]


def test_a_copy_never_includes_the_last_id() -> None:
    table = Table(8, 4)
    a = sequence("abc", 5)
    fill(table, a)
    say(table, a, "d")
    (order,) = fill(table, b := sequence("abc"))
    assert order == Copy(a.pages[0], b.pages[0], 2)
    assert b.ready


def test_the_longest_equal_beginning_is_copied() -> None:
    table = Table(16, 4)
    for text in ("abXX", "abcX", "abYY", "abc"):
        fill(table, sequence(text + "?"))
    (order,) = fill(table, sequence("abcd?"))
    assert order is not None
    assert order.tokens == 3


def test_generated_text_is_found_again() -> None:
    """The golden continuation: prompt + 3 generated + 40 new tokens costs 40."""
    table = Table(12)
    a = Sequence(list(range(620)), limit=640)
    fill(table, a)
    say(table, a, "xyz")
    table.release(a)
    b = Sequence([*range(620), *b"xyz", *range(40)], limit=700)
    fill(table, b)
    assert b.cached_tokens == 622


def test_a_prompt_of_whole_pages_and_one_token_needs_no_prefill() -> None:
    """G10."""
    table = Table(8)
    a, b = Sequence(list(range(513)), limit=520), Sequence(list(range(513)), limit=520)
    fill(table, a)
    table.release(a)
    table.allocate([b])
    assert b.ready
    assert (b.cached_pages, b.cached_tokens) == (2, 512)


def test_a_page_completed_while_generating_is_shared() -> None:
    table = Table(16, 4)
    a = sequence("abc", 6)
    fill(table, a)
    say(table, a, "defg")
    b = sequence("abcdeX")
    fill(table, b)
    assert b.pages[0] == a.pages[0]
    assert b.cached_pages == 1
    table.verify()


def test_two_who_generate_the_same_end_up_with_one_page() -> None:
    table = Table(16, 4)
    a, b = sequence("abc", 6), sequence("ab", 6)
    fill(table, a, b)
    say(table, a, "def")
    free, own = table.free, b.pages[0]
    say(table, b, "cdef")
    assert b.pages[0] == a.pages[0]
    assert b.pages[1] != a.pages[1]
    assert table.free == free + 1
    assert table.held(own) == 0
    table.verify()


def test_an_idle_twin_is_forgotten() -> None:
    table = Table(16, 4)
    a, b = sequence("abc", 6), sequence("ab", 6)
    fill(table, a, b)
    say(table, a, "dex")
    twin = a.pages[0]
    table.release(a)
    say(table, b, "cdef")
    assert b.pages[0] != twin
    assert table.held(twin) == 0
    table.verify()


def test_a_page_promised_to_one_and_completed_by_another_serves_both() -> None:
    table = Table(16, 4)
    a = sequence("abc", 6)
    fill(table, a)
    b = sequence("abcdefgh", 2)
    table.allocate([b])
    promised = b.pages[0]
    say(table, a, "def")
    assert a.pages[0] != promised
    table.verify()
    table.advance(b)
    assert b.pages[0] == a.pages[0]
    assert b.cached == 4
    table.verify()
