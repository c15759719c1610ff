"""The scheduler: what is computed in which order, and what becomes of it when a job goes away."""

from __future__ import annotations

import pytest

from exlm.generator.sequence import Sequence
from exlm.testing import ByteTokenizer
from tests.generator.house import House, cached, job


def test_byte_tokenizer() -> None:
    codec = ByteTokenizer()
    assert codec.decode(codec.encode("né")) == "né"
    assert codec.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_the_runner_sees_what_is_wrong() -> None:
    house = House(4, 4)
    house.add(one := job([1, 2, 3, 4, 5, 6]))
    house.step()
    (row,) = one.sequences
    assert house.runner.verify(row, 6) >= 0
    row.ids[1] = 9
    with pytest.raises(AssertionError, match=r"Row 1 .* was computed from \[b'', 1, 2\]"):
        house.runner.decode([row], [row.cached], [[7]])
    with pytest.raises(AssertionError, match=r"was computed from \[\]"):
        house.runner.verify(Sequence([1] * 16, pages=row.pages[::-1]), 1)


def test_a_one_token_prompt_needs_no_prefill() -> None:
    """G4."""
    house = House(4)
    house.add(one := job([1], new=2))
    house.step()
    assert (house.started, house.events, house.streamed) == ([one], [], [one])


def test_nothing_new_to_say() -> None:
    """T17: no new tokens, and a prompt of whole pages."""
    for length in (1, 4, 8, 9):
        house = House(4, 4)
        house.add(one := job(range(length), new=0))
        house.step()
        assert house.streamed == [one]
        assert house.pages.free == 4


def test_a_pair_is_two_rows() -> None:
    """G8."""
    house = House(8, batch=3)
    house.add(pair := job(range(10), range(100, 107)), other := job([1]), late := job([2]))
    house.step()
    assert house.started == [pair, other]
    assert [(chunk.start, chunk.end) for chunk in house.events] == [(0, 9), (0, 6)]
    assert house.runner.computed == [9, 6]
    assert house.scheduler.pending == [late]


def test_prompts_that_begin_alike_are_computed_once() -> None:
    """G9."""
    house = House(40)
    shared = list(range(600))
    jobs = [job([*shared, *[1000 + n] * 20], new=3) for n in range(3)]
    house.add(*jobs)
    house.step()
    assert house.started == house.streamed == jobs
    assert house.runner.computed == [619, 19, 19]
    assert [chunk.end for chunk in house.events] == [619, 619, 619]
    assert [cached(one) for one in jobs] == [(0, 0), (2, 600), (2, 600)]
    house.finish()

    house.add(again := job([*shared, *[1000] * 20], new=3))
    house.step()
    assert house.runner.computed == []
    assert [(chunk.start, chunk.end) for chunk in house.events] == [(619, 619)]
    assert cached(again) == (2, 619)
    house.finish()

    house.add(more := job([*shared, *[1000] * 20, 7, 7, 7, *range(2000, 2040)]))
    house.step()
    assert house.runner.computed == [40]
    assert cached(more) == (2, 622)


def test_short_prompts_that_begin_alike_are_computed_once() -> None:
    house = House(8)
    jobs = [job([*range(40), 100 + n, 200 + n, 3]) for n in range(3)]
    house.add(*jobs)
    house.step()
    assert house.runner.computed == [42, 2, 2]
    assert [cached(one) for one in jobs] == [(0, 0), (0, 40), (0, 40)]


def test_prompts_that_differ_run_in_one_plan() -> None:
    house = House(8)
    house.add(*(job([n, 1, 2, 3]) for n in range(4)))
    house.scheduler.start()
    plan = house.scheduler.plan()
    assert plan is not None
    assert len(plan.prefill) == 4
    house.run(plan)
    assert house.scheduler.plan() is None


def test_a_prompt_of_whole_pages_is_found_without_an_event() -> None:
    """G10."""
    house = House(8)
    for _ in range(2):
        house.add(one := job(range(513)))
        house.step()
        house.finish()
    assert cached(one) == (2, 512)
    assert house.events == []


def test_a_long_prompt_does_not_stop_the_others() -> None:
    """G11."""
    house = House(20, chunk=512)
    house.add(first := job(range(10), new=50))
    house.step()
    house.add(long := job(range(5000, 6300)))
    progress = []
    for _ in range(3):
        house.step()
        progress += [chunk.end for chunk in house.events]
        assert first in house.streamed
    assert progress == [512, 1024, 1299]
    assert house.streamed == [first, long]


def test_equal_long_prompts_take_turns() -> None:
    house = House(40, chunk=512)
    a, b = job(range(2049)), job(range(2049))
    house.add(a, b)
    house.step()
    assert [(chunk.start, chunk.end) for chunk in house.events] == [(0, 512), (512, 1024)]
    house.step()
    assert [(chunk.start, chunk.end) for chunk in house.events] == [(1024, 1536), (1536, 2048)]
    assert house.streamed == [b]
    house.step()
    assert house.streamed == [a, b]


def test_a_page_larger_than_a_chunk() -> None:
    """G14: unpaged, the whole cache is one page, and one job runs at a time."""
    house = House(1, 2048, chunk=512)
    a, b = job(range(1300), new=3), job(range(1300), new=3)
    house.add(a, b)
    ends = []
    for _ in range(3):
        house.step()
        ends += [chunk.end for chunk in house.events]
    assert ends == [512, 1024, 1299]
    assert house.scheduler.active == [a]
    house.finish()
    assert cached(b) == (0, 1299)


def test_cancel_anywhere() -> None:
    house = House(8, 4, batch=1)
    running, waiting = job(range(9)), job(range(9))
    house.add(running, waiting)
    assert not house.scheduler.cancel(job([1]))
    house.scheduler.start()
    plan = house.scheduler.plan()
    assert plan is not None
    assert house.scheduler.cancel(running)
    assert not house.scheduler.cancel(running)
    house.pages.commit(plan.prefill[0].sequence, plan.prefill[0].end)  # too late, and no harm done
    assert house.scheduler.plan() is None
    assert house.scheduler.ready() == []
    house.pages.check([])
    house.step()
    assert house.streamed == [waiting]
    house.add(other := job([1]))
    assert house.scheduler.cancel(other)
    assert house.scheduler.pending == []
    assert house.scheduler.remaining == 1
    assert house.scheduler.clear() == [waiting]
    assert (house.scheduler.remaining, house.pages.free) == (0, 8)


def test_a_neighbour_that_fails_is_made_up_for() -> None:
    """T25: the chunk that was to fill shared pages is never committed."""
    house = House(16, 4, chunk=8)
    a, b = job(range(20)), job(range(20))
    house.add(a, b)
    house.scheduler.start()
    plan = house.scheduler.plan()
    assert plan is not None
    (chunk,) = plan.prefill
    house.runner.spoil(chunk.sequence, chunk.start, chunk.end)
    house.scheduler.cancel(a)
    while plan := house.scheduler.plan():
        house.run(plan)
    house.finish()
    assert cached(b) == (0, 0)
