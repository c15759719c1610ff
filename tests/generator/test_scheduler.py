"""The scheduler: what is computed in which order, and what becomes of it when a job goes away."""

from __future__ import annotations

import pytest

from exlm.generator.token_sequence import TokenSequence
from exlm.testing import ByteTokenizer
from tests.generator.page_table_oracle import check_invariants
from tests.generator.scheduler_harness import SchedulerHarness, cached_counts, job


def test_byte_tokenizer() -> None:
    codec = ByteTokenizer()
    assert codec.decode(codec.encode("né")) == "né"
    assert codec.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_the_scripted_runner_detects_wrong_rows() -> None:
    house = SchedulerHarness(4, 4)
    house.add(one := job([1, 2, 3, 4, 5, 6]))
    house.step()
    (row,) = one.sequences
    assert house.runner.check_rows(row, 6) >= 0
    row.ids[1] = 9
    with pytest.raises(AssertionError, match=r"Row 1 .* was computed from \[b'', 1, 2\]"):
        house.runner.decode([row], [row.num_computed_tokens], [[7]])
    with pytest.raises(AssertionError, match=r"was computed from \[\]"):
        house.runner.check_rows(TokenSequence([1] * 16, pages=row.pages[::-1]), 1)


def test_a_one_token_prompt_needs_no_prefill() -> None:
    """G4."""
    house = SchedulerHarness(4)
    house.add(one := job([1], new=2))
    house.step()
    assert (house.started, house.chunks, house.decoded) == ([one], [], [one])


def test_no_tokens_requested() -> None:
    """T17: no new tokens, and a prompt of whole pages."""
    for length in (1, 4, 8, 9):
        house = SchedulerHarness(4, 4)
        house.add(one := job(range(length), new=0))
        house.step()
        assert house.decoded == [one]
        assert house.page_table.num_free_pages == 4


def test_a_pair_is_two_rows() -> None:
    """G8."""
    house = SchedulerHarness(8, batch=3)
    house.add(pair := job(range(10), range(100, 107)), other := job([1]), late := job([2]))
    house.step()
    assert house.started == [pair, other]
    assert [(chunk.start, chunk.end) for chunk in house.chunks] == [(0, 9), (0, 6)]
    assert house.runner.prefill_lengths == [9, 6]
    assert house.scheduler.pending == [late]


def test_prompts_that_begin_alike_are_computed_once() -> None:
    """G9."""
    house = SchedulerHarness(40)
    shared = list(range(600))
    jobs = [job([*shared, *[1000 + n] * 20], new=3) for n in range(3)]
    house.add(*jobs)
    house.step()
    assert house.started == house.decoded == jobs
    assert house.runner.prefill_lengths == [619, 19, 19]
    assert [chunk.end for chunk in house.chunks] == [619, 619, 619]
    assert [cached_counts(one) for one in jobs] == [(0, 0), (2, 600), (2, 600)]
    house.run_to_end()

    house.add(again := job([*shared, *[1000] * 20], new=3))
    house.step()
    assert house.runner.prefill_lengths == []
    assert [(chunk.start, chunk.end) for chunk in house.chunks] == [(619, 619)]
    assert cached_counts(again) == (2, 619)
    house.run_to_end()

    house.add(more := job([*shared, *[1000] * 20, 7, 7, 7, *range(2000, 2040)]))
    house.step()
    assert house.runner.prefill_lengths == [40]
    assert cached_counts(more) == (2, 622)


def test_short_prompts_that_begin_alike_are_computed_once() -> None:
    house = SchedulerHarness(8)
    jobs = [job([*range(40), 100 + n, 200 + n, 3]) for n in range(3)]
    house.add(*jobs)
    house.step()
    assert house.runner.prefill_lengths == [42, 2, 2]
    assert [cached_counts(one) for one in jobs] == [(0, 0), (0, 40), (0, 40)]


def test_prompts_that_differ_run_in_one_plan() -> None:
    house = SchedulerHarness(8)
    house.add(*(job([n, 1, 2, 3]) for n in range(4)))
    house.scheduler.admit()
    plan = house.scheduler.next_prefill_batch()
    assert plan
    assert len(plan) == 4
    house.run_prefill_batch(plan)
    assert house.scheduler.next_prefill_batch() == []


def test_a_prompt_of_whole_pages_is_found_without_an_event() -> None:
    """G10."""
    house = SchedulerHarness(8)
    for _ in range(2):
        house.add(one := job(range(513)))
        house.step()
        house.run_to_end()
    assert cached_counts(one) == (2, 512)
    assert house.chunks == []


def test_a_long_prompt_does_not_stop_the_others() -> None:
    """G11."""
    house = SchedulerHarness(20, chunk=512)
    house.add(first := job(range(10), new=50))
    house.step()
    house.add(long := job(range(5000, 6300)))
    progress = []
    for _ in range(3):
        house.step()
        progress += [chunk.end for chunk in house.chunks]
        assert first in house.decoded
    assert progress == [512, 1024, 1299]
    assert house.decoded == [first, long]


def test_equal_long_prompts_take_turns() -> None:
    house = SchedulerHarness(40, chunk=512)
    a, b = job(range(2049)), job(range(2049))
    house.add(a, b)
    house.step()
    assert [(chunk.start, chunk.end) for chunk in house.chunks] == [(0, 512), (512, 1024)]
    house.step()
    assert [(chunk.start, chunk.end) for chunk in house.chunks] == [(1024, 1536), (1536, 2048)]
    assert house.decoded == [b]
    house.step()
    assert house.decoded == [a, b]


def test_a_page_larger_than_a_chunk() -> None:
    """G14: unpaged, the whole cache is one page, and one job runs at a time."""
    house = SchedulerHarness(1, 2048, chunk=512)
    a, b = job(range(1300), new=3), job(range(1300), new=3)
    house.add(a, b)
    ends = []
    for _ in range(3):
        house.step()
        ends += [chunk.end for chunk in house.chunks]
    assert ends == [512, 1024, 1299]
    assert house.scheduler.active == [a]
    house.run_to_end()
    assert cached_counts(b) == (0, 1299)


def test_cancel_anywhere() -> None:
    house = SchedulerHarness(8, 4, batch=1)
    running, waiting = job(range(9)), job(range(9))
    house.add(running, waiting)
    assert not house.scheduler.cancel(job([1]))
    house.scheduler.admit()
    plan = house.scheduler.next_prefill_batch()
    assert plan
    assert house.scheduler.cancel(running)
    assert not house.scheduler.cancel(running)
    house.page_table.mark_computed(plan[0].sequence, plan[0].end)  # too late, and no harm done
    assert house.scheduler.next_prefill_batch() == []
    assert house.scheduler.decode_batch() == []
    check_invariants(house.page_table, [])
    house.step()
    assert house.decoded == [waiting]
    house.add(other := job([1]))
    assert house.scheduler.cancel(other)
    assert house.scheduler.pending == []
    assert house.scheduler.num_unfinished == 1
    assert house.scheduler.cancel(waiting)
    assert (house.scheduler.num_unfinished, house.page_table.num_free_pages) == (0, 8)


def test_a_failed_chunk_is_recomputed_by_the_sequence_that_shares_it() -> None:
    """T25: the chunk that was to fill shared pages is never committed."""
    house = SchedulerHarness(16, 4, chunk=8)
    a, b = job(range(20)), job(range(20))
    house.add(a, b)
    house.scheduler.admit()
    plan = house.scheduler.next_prefill_batch()
    assert plan
    (chunk,) = plan
    house.runner.invalidate_rows(chunk.sequence, chunk.start, chunk.end)
    house.scheduler.cancel(a)
    while plan := house.scheduler.next_prefill_batch():
        house.run_prefill_batch(plan)
    house.run_to_end()
    assert cached_counts(b) == (0, 0)
