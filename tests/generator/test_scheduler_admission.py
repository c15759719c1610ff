"""The scheduler: who starts, who waits, who is refused."""

from __future__ import annotations

import time

import pytest

from exlm.errors import CacheTooSmall, InputError
from exlm.generator import scheduler as module
from exlm.generator.page_table import PageTable
from exlm.generator.scheduler import Scheduler
from exlm.generator.token_sequence import TokenSequence
from tests.generator.scheduler_fuzz import Job
from tests.generator.scheduler_harness import SchedulerHarness, job


def test_jobs_wait_for_rows() -> None:
    """G18."""
    house = SchedulerHarness(8, batch=2)
    jobs = [job([n], new=3) for n in range(4)]
    house.add(*jobs)
    order = []
    while house.scheduler.num_unfinished:
        house.step()
        order.append(house.started)
    assert order == [jobs[:2], [], [], jobs[2:], [], []]
    assert all(one.skips == 0 for one in jobs)


def test_a_job_that_waits_is_overtaken_only_so_often() -> None:
    """8 pages: A takes 6, B wants 7; c0 and c1 overtake it, c2 does not although a page is free."""
    house = SchedulerHarness(8, 4)
    a, b = job(range(4), new=20), job(range(100, 104), new=24, max_skips=2)
    small = [job([200 + n], new=2) for n in range(3)]
    house.add(a, b)
    house.step()
    assert house.started == [a]
    house.add(small[0])
    house.step()
    assert house.started == [small[0]]
    house.step()
    house.add(small[1], small[2])
    house.step()
    assert house.started == [small[1]]
    assert b.skips == 2
    assert house.page_table.num_free_pages == 1
    house.step()
    house.step()
    assert house.started == []
    while b in house.scheduler.pending:
        assert small[2] in house.scheduler.pending
        house.step()
    assert house.started == [b, small[2]]


def test_no_limit_to_being_overtaken() -> None:
    """T18."""
    house = SchedulerHarness(4, 4, batch=8)
    big = job(range(4), new=12, max_skips=None)
    house.add(first := job([1], new=9), big)
    for n in range(9):
        house.add(job([10 + n], new=1))
        house.step()
    assert big.skips == 9
    assert first not in house.scheduler.active
    house.run_to_end()


def test_a_job_that_must_not_be_overtaken() -> None:
    house = SchedulerHarness(4, 4)
    big, small = job(range(4), new=12, max_skips=0), job([9], new=1)
    house.add(job([1], new=3), big, small)
    house.step()
    assert house.started == [house.scheduler.active[0]]
    house.step()
    assert house.started == []
    assert house.scheduler.pending == [big, small]


def test_a_job_waiting_for_a_cancelled_one_starts() -> None:
    house = SchedulerHarness(4, 4)
    big, small = job(range(4), new=12, max_skips=0), job([9], new=1)
    house.add(job([1], new=8), big, small)
    house.step()
    house.step()
    assert house.scheduler.cancel(big)
    house.step()
    assert house.started == [small]


def test_a_start_counts_a_skip_for_every_older_job() -> None:
    house = SchedulerHarness(4, 4)
    big = [job([n], new=15, max_skips=1) for n in range(3)]
    small = [job([10 + n], new=3) for n in range(2)]
    house.add(job([99], new=3), *big, *small)
    house.step()
    assert [one.skips for one in big] == [1, 1, 1]
    assert small[1] in house.scheduler.pending


def test_the_search_for_a_job_that_fits_ends() -> None:
    house = SchedulerHarness(4, 4)
    big = [job([n], new=15, max_skips=None) for n in range(module.MAX_ADMISSION_SCAN + 20)]
    house.add(job([999], new=3), *big, job([1000], new=1))
    house.step()
    assert len(house.started) == 1
    assert big[0].skips == 0


def test_jobs_that_can_never_run_are_refused() -> None:
    house = SchedulerHarness(4, 4, batch=1)
    with pytest.raises(CacheTooSmall, match=r"Job requires 5 pages \(only 4 available\).*4 \* 4 = 16 tokens"):
        house.add(job(range(10), new=7))
    with pytest.raises(CacheTooSmall, match=r"10 prompt tokens and up to 7 new ones.*max_seq_len=20 or more"):
        house.add(job(range(10), new=7))
    with pytest.raises(InputError, match="minimum batch size of 2, but max_batch_size is 1"):
        house.add(job([1], [2]))
    with pytest.raises(InputError, match="cannot be empty"):
        house.add(job([]))
    with pytest.raises(InputError, match="cannot be empty"):
        house.add(job())
    assert house.scheduler.num_unfinished == 0
    house.add(job(range(10), new=6))
    house.run_to_end()


def test_a_pair_that_can_never_run_is_refused() -> None:
    """T13."""
    house = SchedulerHarness(4, 4)
    with pytest.raises(CacheTooSmall, match="Job requires 6 pages"):
        house.add(job(range(8), range(10, 18)))
    house.add(job(range(5), range(5), new=3))  # what they share counts once
    with pytest.raises(CacheTooSmall, match="Job requires 2 pages"):
        SchedulerHarness(1, 64).add(job([1], [2]))


def test_a_job_is_queued_once() -> None:
    """T26."""
    house = SchedulerHarness(4, 4)
    one = job([1, 2])
    house.add(one)
    with pytest.raises(InputError, match="already in the queue"):
        house.add(one)
    house.step()
    with pytest.raises(InputError, match="already in the queue"):
        house.add(one)
    with pytest.raises(InputError, match="in use"):
        house.add(Job(one.sequences))
    twice = TokenSequence([5])
    with pytest.raises(InputError, match="in use"):
        house.add(Job([twice, twice]))


def test_scheduler_arguments() -> None:
    for batch, chunk in ((0, 4), (1, 0)):
        with pytest.raises(InputError, match="at least 1"):
            Scheduler(PageTable(1), batch, chunk)


class CountingTable(PageTable):
    """A page table that counts how often it is asked."""

    asked = 0

    def fits(self, sequences: list[TokenSequence]) -> bool:
        self.asked += 1
        return super().fits(sequences)


@pytest.mark.parametrize("max_skips", [None, 4])
def test_thousands_of_waiting_jobs_cost_nothing(max_skips: int | None) -> None:
    """How much a round looks at does not depend on the queue."""
    pages = CountingTable(16, 4)
    scheduler: Scheduler = Scheduler(pages, 8, 64)
    for n in range(5000):
        scheduler.add(job([n], new=40, max_skips=max_skips))  # 11 pages: one at a time
    for n in range(30):
        pages.asked = 0
        (only,) = scheduler.admit()
        assert only.sequences[0].ids == [n]
        assert pages.asked <= module.MAX_ADMISSION_SCAN + 2
        pages.asked = 0
        for _ in range(10):
            assert scheduler.admit() == []
        assert pages.asked <= module.MAX_ADMISSION_SCAN + 1  # and not again while nothing changes
        scheduler.finish(only)


def test_draining_a_long_queue_is_not_quadratic() -> None:
    house = SchedulerHarness(64, 16, batch=16)
    jobs = [job([n, 1, 2], new=1, max_skips=None) for n in range(5000)]
    big = job(range(16), new=16 * 60, max_skips=None)
    began = time.perf_counter()
    house.add(big, *jobs[:2500])
    for one in jobs[:2500:2]:
        house.scheduler.cancel(one)
    house.add(*jobs[2500:])
    while house.scheduler.num_unfinished > 1:
        for one in house.scheduler.admit():
            for row in one.sequences:
                house.page_table.mark_computed(row, len(row) - 1)
        for one in house.scheduler.decode_batch():
            if one is not big:
                house.scheduler.finish(one)
    assert time.perf_counter() - began < 5
