"""The scheduler: what is computed in which order, and what is kept when a job is cancelled or fails."""

from __future__ import annotations

import pytest

from exlm.generator.token_sequence import TokenSequence
from exlm.testing import ByteTokenizer
from tests.generator.page_table_oracle import check_invariants
from tests.generator.scheduler_harness import SchedulerHarness, cached_counts, make_job


def test_byte_tokenizer() -> None:
    codec = ByteTokenizer()
    assert codec.decode(codec.encode("né")) == "né"
    assert codec.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_the_scripted_runner_detects_wrong_rows() -> None:
    harness = SchedulerHarness(4, 4)
    harness.add(job := make_job([1, 2, 3, 4, 5, 6]))
    harness.step()
    (row,) = job.sequences
    assert harness.runner.check_rows(row, 6) >= 0
    row.ids[1] = 9
    with pytest.raises(AssertionError, match=r"Row 1 .* was computed from \[b'', 1, 2\]"):
        harness.runner.decode([row], [row.num_computed_tokens], [[7]])
    with pytest.raises(AssertionError, match=r"was computed from \[\]"):
        harness.runner.check_rows(TokenSequence([1] * 16, pages=row.pages[::-1]), 1)


def test_a_one_token_prompt_needs_no_prefill() -> None:
    """G4."""
    harness = SchedulerHarness(4)
    harness.add(job := make_job([1], new=2))
    harness.step()
    assert (harness.started, harness.chunks, harness.decoded) == ([job], [], [job])


def test_no_tokens_requested() -> None:
    """Covers prompts of whole pages."""
    for length in (1, 4, 8, 9):
        harness = SchedulerHarness(4, 4)
        harness.add(job := make_job(range(length), new=0))
        harness.step()
        assert harness.decoded == [job]
        assert harness.page_table.num_free_pages == 4


def test_a_pair_is_two_rows() -> None:
    """G8."""
    harness = SchedulerHarness(8, batch=3)
    harness.add(pair := make_job(range(10), range(100, 107)), other := make_job([1]), late := make_job([2]))
    harness.step()
    assert harness.started == [pair, other]
    assert [(chunk.start, chunk.end) for chunk in harness.chunks] == [(0, 9), (0, 6)]
    assert harness.runner.prefill_lengths == [9, 6]
    assert harness.scheduler.pending == [late]


def test_prompts_that_begin_alike_are_computed_once() -> None:
    """G9."""
    harness = SchedulerHarness(40)
    shared = list(range(600))
    jobs = [make_job([*shared, *[1000 + n] * 20], new=3) for n in range(3)]
    harness.add(*jobs)
    harness.step()
    assert harness.started == harness.decoded == jobs
    assert harness.runner.prefill_lengths == [619, 19, 19]
    assert [chunk.end for chunk in harness.chunks] == [619, 619, 619]
    assert [cached_counts(job) for job in jobs] == [(0, 0), (2, 600), (2, 600)]
    harness.run_to_end()

    harness.add(repeated := make_job([*shared, *[1000] * 20], new=3))
    harness.step()
    assert harness.runner.prefill_lengths == []
    assert [(chunk.start, chunk.end) for chunk in harness.chunks] == [(619, 619)]
    assert cached_counts(repeated) == (2, 619)
    harness.run_to_end()

    harness.add(longer := make_job([*shared, *[1000] * 20, 7, 7, 7, *range(2000, 2040)]))
    harness.step()
    assert harness.runner.prefill_lengths == [40]
    assert cached_counts(longer) == (2, 622)


def test_short_prompts_that_begin_alike_are_computed_once() -> None:
    harness = SchedulerHarness(8)
    jobs = [make_job([*range(40), 100 + n, 200 + n, 3]) for n in range(3)]
    harness.add(*jobs)
    harness.step()
    assert harness.runner.prefill_lengths == [42, 2, 2]
    assert [cached_counts(job) for job in jobs] == [(0, 0), (0, 40), (0, 40)]


def test_prompts_that_differ_run_in_one_plan() -> None:
    harness = SchedulerHarness(8)
    harness.add(*(make_job([n, 1, 2, 3]) for n in range(4)))
    harness.scheduler.admit()
    plan = harness.scheduler.next_prefill_batch()
    assert plan
    assert len(plan) == 4
    harness.run_prefill_batch(plan)
    assert harness.scheduler.next_prefill_batch() == []


def test_a_prompt_of_whole_pages_is_found_without_an_event() -> None:
    """G10."""
    harness = SchedulerHarness(8)
    for _ in range(2):
        harness.add(job := make_job(range(513)))
        harness.step()
        harness.run_to_end()
    assert cached_counts(job) == (2, 512)
    assert harness.chunks == []


def test_a_long_prompt_does_not_stop_the_others() -> None:
    """G11."""
    harness = SchedulerHarness(20, chunk=512)
    harness.add(first := make_job(range(10), new=50))
    harness.step()
    harness.add(long := make_job(range(5000, 6300)))
    progress = []
    for _ in range(3):
        harness.step()
        progress += [chunk.end for chunk in harness.chunks]
        assert first in harness.decoded
    assert progress == [512, 1024, 1299]
    assert harness.decoded == [first, long]


def test_equal_long_prompts_take_turns() -> None:
    harness = SchedulerHarness(40, chunk=512)
    a, b = make_job(range(2049)), make_job(range(2049))
    harness.add(a, b)
    harness.step()
    assert [(chunk.start, chunk.end) for chunk in harness.chunks] == [(0, 512), (512, 1024)]
    harness.step()
    assert [(chunk.start, chunk.end) for chunk in harness.chunks] == [(1024, 1536), (1536, 2048)]
    assert harness.decoded == [b]
    harness.step()
    assert harness.decoded == [a, b]


def test_a_page_larger_than_a_chunk() -> None:
    """G14: unpaged, the whole cache is one page, and one job runs at a time."""
    harness = SchedulerHarness(1, 2048, chunk=512)
    a, b = make_job(range(1300), new=3), make_job(range(1300), new=3)
    harness.add(a, b)
    ends = []
    for _ in range(3):
        harness.step()
        ends += [chunk.end for chunk in harness.chunks]
    assert ends == [512, 1024, 1299]
    assert harness.scheduler.active == [a]
    harness.run_to_end()
    assert cached_counts(b) == (0, 1299)


def test_cancel_anywhere() -> None:
    harness = SchedulerHarness(8, 4, batch=1)
    running, waiting = make_job(range(9)), make_job(range(9))
    harness.add(running, waiting)
    assert not harness.scheduler.cancel(make_job([1]))
    harness.scheduler.admit()
    plan = harness.scheduler.next_prefill_batch()
    assert plan
    assert harness.scheduler.cancel(running)
    assert not harness.scheduler.cancel(running)
    harness.page_table.mark_computed(plan[0].sequence, plan[0].end)  # too late, and no harm done
    assert harness.scheduler.next_prefill_batch() == []
    assert harness.scheduler.decode_batch() == []
    check_invariants(harness.page_table, [])
    harness.step()
    assert harness.decoded == [waiting]
    harness.add(other := make_job([1]))
    assert harness.scheduler.cancel(other)
    assert harness.scheduler.pending == []
    assert harness.scheduler.num_unfinished == 1
    assert harness.scheduler.cancel(waiting)
    assert (harness.scheduler.num_unfinished, harness.page_table.num_free_pages) == (0, 8)


def test_a_failed_chunk_is_recomputed_by_the_sequence_that_shares_it() -> None:
    """The failed chunk, which was to fill shared pages, is never committed."""
    harness = SchedulerHarness(16, 4, chunk=8)
    a, b = make_job(range(20)), make_job(range(20))
    harness.add(a, b)
    harness.scheduler.admit()
    plan = harness.scheduler.next_prefill_batch()
    assert plan
    (chunk,) = plan
    harness.runner.invalidate_rows(chunk.sequence, chunk.start, chunk.end)
    harness.scheduler.cancel(a)
    while plan := harness.scheduler.next_prefill_batch():
        harness.run_prefill_batch(plan)
    harness.run_to_end()
    assert cached_counts(b) == (0, 0)
