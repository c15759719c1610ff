"""The scheduler's admission: which jobs start, wait or are refused."""

from __future__ import annotations

from functools import partial

import pytest

from exlm.errors import CacheTooSmall, InputError
from exlm.generator import scheduler as module
from exlm.generator.page_table import PageTable
from exlm.generator.scheduler import Scheduler
from exlm.generator.token_sequence import TokenSequence
from tests.generator.counting import cpu_seconds
from tests.generator.scheduler_fuzz import Job
from tests.generator.scheduler_harness import SchedulerHarness, make_job


def test_jobs_wait_for_rows() -> None:
    """G18."""
    harness = SchedulerHarness(8, batch=2)
    jobs = [make_job([n], new=3) for n in range(4)]
    harness.add(*jobs)
    order = []
    while harness.scheduler.num_unfinished:
        harness.step()
        order.append(harness.started)
    assert order == [jobs[:2], [], [], jobs[2:], [], []]
    assert all(job.skips == 0 for job in jobs)


def test_a_job_that_waits_is_overtaken_only_so_often() -> None:
    """8 pages: A takes 6, B wants 7; c0 and c1 overtake it, c2 does not although a page is free."""
    harness = SchedulerHarness(8, 4)
    a, b = make_job(range(4), new=20), make_job(range(100, 104), new=24, max_skips=2)
    small = [make_job([200 + n], new=2) for n in range(3)]
    harness.add(a, b)
    harness.step()
    assert harness.started == [a]
    harness.add(small[0])
    harness.step()
    assert harness.started == [small[0]]
    harness.step()
    harness.add(small[1], small[2])
    harness.step()
    assert harness.started == [small[1]]
    assert b.skips == 2
    assert harness.page_table.num_free_pages == 1
    harness.step()
    harness.step()
    assert harness.started == []
    while b in harness.scheduler.pending:
        assert small[2] in harness.scheduler.pending
        harness.step()
    assert harness.started == [b, small[2]]


def test_no_limit_to_being_overtaken() -> None:
    harness = SchedulerHarness(4, 4, batch=8)
    big = make_job(range(4), new=12, max_skips=None)
    harness.add(first := make_job([1], new=9), big)
    for n in range(9):
        harness.add(make_job([10 + n], new=1))
        harness.step()
    assert big.skips == 9
    assert first not in harness.scheduler.active
    harness.run_to_end()


def test_a_job_that_must_not_be_overtaken() -> None:
    harness = SchedulerHarness(4, 4)
    big, small = make_job(range(4), new=12, max_skips=0), make_job([9], new=1)
    harness.add(make_job([1], new=3), big, small)
    harness.step()
    assert harness.started == [harness.scheduler.active[0]]
    harness.step()
    assert harness.started == []
    assert harness.scheduler.pending == [big, small]


def test_a_job_waiting_for_a_cancelled_one_starts() -> None:
    harness = SchedulerHarness(4, 4)
    big, small = make_job(range(4), new=12, max_skips=0), make_job([9], new=1)
    harness.add(make_job([1], new=8), big, small)
    harness.step()
    harness.step()
    assert harness.scheduler.cancel(big)
    harness.step()
    assert harness.started == [small]


def test_a_start_counts_a_skip_for_every_older_job() -> None:
    harness = SchedulerHarness(4, 4)
    big = [make_job([n], new=15, max_skips=1) for n in range(3)]
    small = [make_job([10 + n], new=3) for n in range(2)]
    harness.add(make_job([99], new=3), *big, *small)
    harness.step()
    assert [job.skips for job in big] == [1, 1, 1]
    assert small[1] in harness.scheduler.pending


def test_the_search_for_a_job_that_fits_ends() -> None:
    harness = SchedulerHarness(4, 4)
    big = [make_job([n], new=15, max_skips=None) for n in range(module.MAX_ADMISSION_SCAN + 20)]
    harness.add(make_job([999], new=3), *big, make_job([1000], new=1))
    harness.step()
    assert len(harness.started) == 1
    assert big[0].skips == 0


def test_jobs_that_can_never_run_are_refused() -> None:
    harness = SchedulerHarness(4, 4, batch=1)
    with pytest.raises(CacheTooSmall, match=r"Job requires 5 pages \(only 4 available\).*4 \* 4 = 16 tokens"):
        harness.add(make_job(range(10), new=7))
    with pytest.raises(CacheTooSmall, match=r"10 prompt tokens and up to 7 new ones.*max_seq_len=20 or more"):
        harness.add(make_job(range(10), new=7))
    with pytest.raises(InputError, match="minimum batch size of 2, but max_batch_size is 1"):
        harness.add(make_job([1], [2]))
    with pytest.raises(InputError, match="cannot be empty"):
        harness.add(make_job([]))
    with pytest.raises(InputError, match="cannot be empty"):
        harness.add(make_job())
    assert harness.scheduler.num_unfinished == 0
    harness.add(make_job(range(10), new=6))
    harness.run_to_end()


def test_a_pair_that_can_never_run_is_refused() -> None:
    harness = SchedulerHarness(4, 4)
    with pytest.raises(CacheTooSmall, match="Job requires 6 pages"):
        harness.add(make_job(range(8), range(10, 18)))
    harness.add(make_job(range(5), range(5), new=3))  # what they share counts once
    with pytest.raises(CacheTooSmall, match="Job requires 2 pages"):
        SchedulerHarness(1, 64).add(make_job([1], [2]))


def test_a_job_is_queued_once() -> None:
    harness = SchedulerHarness(4, 4)
    job = make_job([1, 2])
    harness.add(job)
    with pytest.raises(InputError, match="already in the queue"):
        harness.add(job)
    harness.step()
    with pytest.raises(InputError, match="already in the queue"):
        harness.add(job)
    with pytest.raises(InputError, match="in use"):
        harness.add(Job(job.sequences))
    sequence = TokenSequence([5])
    with pytest.raises(InputError, match="in use"):
        harness.add(Job([sequence, sequence]))


def test_scheduler_arguments() -> None:
    for batch, chunk in ((0, 4), (1, 0)):
        with pytest.raises(InputError, match="at least 1"):
            Scheduler(PageTable(1), batch, chunk)


class CountingTable(PageTable):
    """A page table that counts its calls of `fits`."""

    num_checks = 0

    def fits(self, sequences: list[TokenSequence]) -> bool:
        self.num_checks += 1
        return super().fits(sequences)


@pytest.mark.parametrize("max_skips", [None, 4])
def test_thousands_of_waiting_jobs_cost_nothing(max_skips: int | None) -> None:
    """The number of jobs that a step examines does not depend on the queue."""
    pages = CountingTable(16, 4)
    scheduler: Scheduler = Scheduler(pages, 8, 64)
    for n in range(5000):
        scheduler.add(make_job([n], new=40, max_skips=max_skips))  # 11 pages: one at a time
    for n in range(30):
        pages.num_checks = 0
        (only,) = scheduler.admit()
        assert only.sequences[0].ids == [n]
        assert pages.num_checks <= module.MAX_ADMISSION_SCAN + 2
        pages.num_checks = 0
        for _ in range(10):
            assert scheduler.admit() == []
        assert pages.num_checks <= module.MAX_ADMISSION_SCAN + 1  # and not again while nothing changes
        scheduler.finish(only)


def drain_queue(count: int) -> None:
    """Run a queue of so many small jobs, a quarter of which are cancelled, beside one that needs most pages."""
    harness = SchedulerHarness(64, 16, batch=16)
    jobs = [make_job([n, 1, 2], new=1, max_skips=None) for n in range(count)]
    big = make_job(range(16), new=16 * 60, max_skips=None)
    harness.add(big, *jobs[: count // 2])
    for job in jobs[: count // 2 : 2]:
        harness.scheduler.cancel(job)
    harness.add(*jobs[count // 2 :])
    while harness.scheduler.num_unfinished > 1:
        for job in harness.scheduler.admit():
            for row in job.sequences:
                harness.page_table.mark_computed(row, len(row) - 1)
        for job in harness.scheduler.decode_batch():
            if job is not big:
                harness.scheduler.finish(job)


def test_draining_a_long_queue_is_not_quadratic() -> None:
    """Ten times the jobs take about ten times as long; a hundred times if each step scanned the queue."""
    per_job = [min(cpu_seconds(partial(drain_queue, count)) for _ in range(2)) / count for count in (500, 5000)]
    assert per_job[1] < 4 * per_job[0]
