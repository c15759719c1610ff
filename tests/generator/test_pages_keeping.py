"""The page table: what can be taken back, what is kept, what is forgotten, and in which order."""

from __future__ import annotations

import pytest

from exlm.errors import CacheTooSmall, ExlmError, InputError
from exlm.generator.pages import Copy, PageTable
from exlm.generator.sequence import Sequence
from tests.generator.tables import Table, fill, fill_quietly, say, sequence


def test_what_can_be_taken_back_is_not_shared() -> None:
    table = Table(16, 4)
    a = sequence("abc", 9)
    fill(table, a)
    say(table, a, "defgh", settle=False)
    b = sequence("abcdefX")
    fill(table, b)
    assert b.cached_pages == 0
    assert b.pages[0] != a.pages[0]
    table.rewind(a, 3)
    table.verify()
    assert a.ready
    assert (a.ids, a.cached) == (list(b"abc"), 2)
    say(table, a, "XYZ")
    table.verify()


def test_a_page_is_not_shared_while_its_last_id_may_be_fed_again() -> None:
    table = Table(16, 4)
    a = sequence("abc", 9)
    fill(table, a)
    say(table, a, "def", settle=False)
    table.settle(a, 4)  # to the very end of the page: a rewind to it feeds id 4 again
    assert a.sealed == 0
    table.rewind(a, 4)
    assert a.cached == 3
    table.verify()
    say(table, a, "x")
    assert a.sealed == 1
    table.verify()


def test_only_unsettled_ids_can_be_taken_back() -> None:
    table = Table(16, 4)
    a = sequence("abc", 9)
    fill(table, a)
    say(table, a, "de")
    say(table, a, "fg", settle=False)
    for to in (4, 8, 0):
        with pytest.raises(InputError, match="settled"):
            table.rewind(a, to)
    table.rewind(a, 7)
    table.rewind(a, 5)
    assert a.ids == list(b"abcde")


def test_text_held_over_a_page_boundary_is_neither_lost_nor_misplaced() -> None:
    """T35: the first page gets its name with the text; the second never passes for a first one."""
    table = Table(16, 4)
    a = sequence("ab", 12)
    fill(table, a)
    say(table, a, "cdefgh", settle=False)
    stranger = sequence("efgX")  # what the second page holds, at another position
    assert fill(table, stranger) == [None]
    assert stranger.cached_tokens == 0
    table.release(stranger)
    table.settle(a, len(a))
    say(table, a, "i")
    b = sequence("abcdefghi")
    fill(table, b)
    assert b.cached_pages == 2
    table.verify()


def test_text_still_held_at_the_end_is_found_again() -> None:
    """T35: what a cancelled job computed is worth keeping, held or not."""
    table = Table(16, 4)
    a = sequence("ab", 12)
    fill(table, a)
    say(table, a, "cdefgh", settle=False)
    table.release(a)
    table.verify()
    b = sequence("abcdefgh?")
    fill(table, b)
    assert b.cached_tokens == 7


def test_rejected_guesses_are_not_found() -> None:
    """T65: rows past what was committed hold guesses; only committed ids count."""
    table = Table(16, 4)
    a = sequence("abc", 12)
    fill(table, a)
    table.commit(a, 3)
    a.ids += list(b"d")
    table.release(a)
    (order,) = fill(table, sequence("abcdef"))
    assert order is not None
    assert order.tokens == 3


def test_the_jobs_own_pages_are_not_given_up_for_it() -> None:
    """T44."""
    table = Table(4)
    prompt = list(range(773))
    a = Sequence(list(prompt), limit=800)
    fill(table, a)
    table.release(a)
    other = Sequence([5, 6, 7])
    fill(table, other)
    table.release(other)
    again = Sequence(list(prompt), limit=800)
    fill(table, again)
    assert again.cached_pages == 3


def test_rows_of_use_stay_in_place_when_every_page_is_needed() -> None:
    """A chat whose answer may fill the cache takes all pages each turn, and still goes on where it was."""
    table = Table(4, 4)
    a = sequence("abcdefg", 9)
    fill(table, a)
    table.release(a)
    b = sequence("abcdefgh", 8)
    assert fill(table, b) == [None]
    assert (b.cached_pages, b.cached_tokens) == (1, 6)
    table.release(b)
    c = sequence("abcdefX", 9)
    fill(table, c)
    assert (c.cached_pages, c.cached_tokens) == (1, 6)
    table.verify()


def test_one_page_for_the_whole_cache_reuses_the_last_job() -> None:
    """G14, unpaged: prompt + 3 generated + 10 new tokens costs 10."""
    table = Table(1, 1024)
    a = Sequence(list(range(100)), limit=103)
    fill(table, a)
    say(table, a, "xyz")
    table.release(a)
    b = Sequence([*range(100), *b"xyz", *range(10)], limit=120)
    fill(table, b)
    assert (b.cached_pages, b.cached_tokens) == (0, 102)


def test_the_least_recently_used_go_first_and_ends_before_beginnings() -> None:
    table = Table(6, 4)
    old, new = sequence("abcdefghi"), sequence("ABCDEFGHI")
    fill(table, old)
    fill(table, new)
    table.release(old)
    table.release(new)
    fill(table, three := sequence("0123456", 5))  # takes both ends, which are blank, and one page more
    table.release(three)
    table.allocate([again := sequence("ABCDEFGHI")])
    assert again.cached == 8
    table.release(again)
    table.allocate([again := sequence("abcdefghi")])
    assert again.cached == 4
    table.verify()


def test_blank_pages_go_before_all_others() -> None:
    table = Table(4, 4)
    a = sequence("abcde")
    fill(table, a)
    table.release(a)
    for _ in range(5):
        fill(table, other := sequence("X"))
        table.release(other)
    fill(table, again := sequence("abcde"))
    assert again.cached_pages == 1


def test_clear_forgets_idle_pages_only() -> None:
    table = Table(8, 4)
    a, b = sequence("abcdefgh"), sequence("ABCDEFGH")
    fill(table, a, b)
    table.release(a)
    table.clear()
    table.verify()
    fill(table, c := sequence("abcdefgh"))
    assert c.cached_tokens == 0
    fill(table, d := sequence("ABCDEFGH"))
    assert d.cached_pages == 1
    table.verify()


def test_more_than_there_is_cannot_be_allocated() -> None:
    table = Table(2, 4)
    with pytest.raises(CacheTooSmall, match="3 pages are needed but 2 are free"):
        table.allocate([Sequence([1] * 9, limit=12)])
    table.verify()
    with pytest.raises(InputError):
        PageTable(0)
    assert issubclass(CacheTooSmall, ExlmError)


def test_a_released_sequence_can_no_longer_be_changed() -> None:
    table = Table(4, 4)
    a = sequence("abcdef")
    table.allocate([a])
    table.release(a)
    table.commit(a, 5)
    table.settle(a, 5)
    table.release(a)
    table.verify()
    assert table.free == 4


def test_a_failed_copy_leaves_no_trace() -> None:
    table = Table(8, 4)
    fill(table, sequence("abcd"))
    a = sequence("abcX")
    table.allocate([a])
    assert table.partial(a) == table.partial(a) == Copy(0, a.pages[0], 3)
    assert (a.cached, a.cached_tokens) == (0, 0)
    table.commit(a, 3)
    assert (a.cached, a.cached_tokens) == (3, 3)


def test_a_copy_that_was_not_needed_after_all_does_not_count() -> None:
    table = Table(8, 4)
    fill(table, sequence("abXX"))
    a, b = sequence("abcdefgh"), sequence("abcdefgh")
    table.allocate([a])
    table.allocate([b])
    assert table.partial(a) is not None
    table.commit(b, 7)
    table.advance(a)
    table.commit(a, 7)
    assert (a.cached_pages, a.cached_tokens) == (1, 4)


def test_a_page_that_serves_as_a_source_was_used() -> None:
    table = Table(4, 4)
    fill(table, x := sequence("abcd"), y := sequence("0123"), z := sequence("!", 7))
    source, other = x.pages[0], y.pages[0]
    table.release(x)
    table.release(y)
    order = fill(table, sequence("abXY"))
    assert order == [Copy(source, other, 2)]
    assert table.held(source) == 3
    table.release(z)


def test_the_version_tells_when_it_is_worth_asking_again() -> None:
    table = Table(4, 4)
    versions = [table.version]
    table.allocate([a := sequence("abcdef")])
    versions.append(table.version)
    table.commit(a, 5)
    assert table.version == versions[-1]
    table.release(a)
    versions.append(table.version)
    assert len(set(versions)) == 3


def test_check_sees_what_is_wrong() -> None:
    table = Table(8, 4)
    a = sequence("abcdefghij", 2)
    fill(table, a)
    with pytest.raises(AssertionError, match="1 references, 0 users"):
        table.check([])
    a.ids[1] = 7
    with pytest.raises(AssertionError, match="holds"):
        table.check([a])
    a.ids[1] = ord("b")
    table._pages[a.pages[0]].ids[0] = 7
    with pytest.raises(AssertionError, match="its name does not say what it holds"):
        table.check([a])


def test_finding_a_beginning_does_not_look_at_every_page() -> None:
    table = Table(4000, 64)
    for n in range(2000):
        fill_quietly(table, Sequence([n, *range(40), *([n] * 20)]))
    one = Sequence([777, *range(60)])
    table.allocate([one])
    order = table.partial(one)
    assert order is not None
    assert order.tokens == 41
    lead = table.lead(one, 0)
    assert lead is not None
    assert len(table._leads[lead]) == 1
