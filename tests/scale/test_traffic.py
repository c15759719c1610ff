"""The traffic simulation, against a queue that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.traffic import Fleet, Outcome, Speed, Traffic, arrivals, outcome_table, simulate, summarize

SPEED = Speed(prefill=1000.0, step=0.02, row=0.001, overhead=0.0)


@given(st.integers(0, 1000), st.floats(0.1, 5.0))
def test_one_request_at_a_time_is_a_fifo_queue(seed: int, rate: float) -> None:
    requests = arrivals(Traffic(rate=rate, requests=30, topics=30, seed=seed))
    done = simulate(requests, SPEED, Fleet(replicas=1, batch=1, cache=10**9))
    free, known = 0.0, set[int]()
    for request in done:
        start = max(free, request.arrival)
        cached = request.shared if request.topic in known else 0
        known.add(request.topic)
        free = start + (request.prompt - cached) / SPEED.prefill + request.new * SPEED.step
        assert request.started == pytest.approx(start)
        assert request.ended == pytest.approx(free)
        assert request.cached == cached


@given(
    st.integers(0, 1000),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(500, 20_000),
    st.booleans(),
)
def test_nothing_is_lost_or_early(seed: int, replicas: int, batch: int, cache: int, aware: bool) -> None:
    requests = arrivals(Traffic(requests=60, topics=5, seed=seed))
    done = simulate(requests, SPEED, Fleet(replicas, batch, cache, aware=aware))
    assert [replace(one, generated=0) for one in requests] == requests
    for request in done:
        assert request.generated == request.new
        assert 0 <= request.replica < replicas
        assert request.arrival <= request.started < request.first <= request.ended
        assert request.cached in (0, request.shared)


def test_prefix_routing_prefills_less_with_a_small_cache() -> None:
    requests = arrivals(Traffic(rate=8, topics=40))
    fleet = Fleet(replicas=4, cache=8192)
    aware, blind = (summarize(simulate(requests, Speed(), replace(fleet, aware=choice))) for choice in (True, False))
    assert aware.hits > 2 * blind.hits
    assert aware.affinity > 0.9
    assert aware.time_p95 < blind.time_p95


def test_figures_are_named() -> None:
    text = outcome_table({"this": Outcome(1, 2, 3, 4, 5, 6, 0.7, 0.8)})
    assert [line.split()[-1] for line in text.splitlines()] == [
        *("this", "1.000", "2.000", "3.000", "4.000", "5.000", "6.000", "0.700", "0.800")
    ]
