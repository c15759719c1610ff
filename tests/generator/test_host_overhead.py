"""Host overhead: few calls per token, and the simple path gives the results of the general one."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import host
from exlm.generator.job import Job
from tests.generator.page_table_oracle import check_invariants
from tests.generator.test_engine import make_engine, make_job
from tests.generator.toy_model import VOCAB


def script_with_stops(prefix: list[int]) -> list[int]:
    return random.Random(sum(prefix[-3:])).sample(range(VOCAB), 6)


def all_results(jobs: list[Job], is_simple: bool) -> list[dict[str, Any]]:
    """All results of the jobs, without times and with tensors as lists."""
    engine = make_engine(script_with_stops)
    for job in jobs:
        engine.enqueue(job)
        assert job.is_simple
        job.is_simple = is_simple
    out = []
    while engine.busy:
        out += [
            {
                key: value.tolist() if isinstance(value, torch.Tensor) else value
                for key, value in result.items()
                if key != "job" and not key.startswith("time")
            }
            for result in engine.step()
        ]
        check_invariants(engine.page_table, [s for active in engine.scheduler.active for s in active.sequences])
    for result in out:
        if "held" in result:
            held: Any = result["held"]
            result["held"] = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in held.items()}
    return out


@pytest.mark.parametrize("seed", range(5))
def test_the_simple_path_equals_the_general_path(seed: int) -> None:
    """Simple jobs take a path of their own; on the general path they give the same results."""

    def random_jobs() -> list[Job]:
        rng = random.Random(seed)
        return [
            make_job(
                [rng.randrange(2, VOCAB) for _ in range(rng.choice([1, 5, 255, 300]))],
                rng.randint(1, 40),
                stop_conditions=rng.choice([None, ["ab", "Hell", "z"], [rng.randrange(VOCAB)], ["</s>"]]),
                decode_special_tokens=rng.random() < 0.5,
                identifier=rng.choice([None, 0, "x"]),
            )
            for _ in range(6)
        ]

    assert all_results(random_jobs(), True) == all_results(random_jobs(), False)


def calls(function: Callable[[], object]) -> int:
    """The number of calls of Python and C functions."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_step_takes_few_calls() -> None:
    """Counted, because times on a shared machine prove little; the benchmark has the times."""
    single, batch = (host.engine_in_decode(rows, 8) for rows in (1, 64))
    for generator in (single, batch):
        generator.step()
    single_calls = min(calls(single.step) for _ in range(3))
    batch_calls = min(calls(batch.step) for _ in range(3))
    assert single_calls < 200
    assert (batch_calls - single_calls) / 63 < 45


def test_the_benchmark_measures_a_full_batch() -> None:
    engine = host.engine_in_decode(4, 5)
    results = engine.step()
    assert [result["serial"] for result in results] == [0, 1, 2, 3]
    assert all(isinstance(result["job"], Job) and result["job"].is_simple for result in results)
    assert all(result["text"].startswith(" ") for result in results)  # type: ignore[typeddict-item]
    rows = host.measure(host.Case(rows=2, target=1.0, steps=3), repeats=2)
    assert len(rows) == 2
    assert all(step > 0 and single > 0 for step, single in rows)


def test_the_benchmark_measures_queues_and_contexts() -> None:
    queue = host.measure_queue(7)
    assert [*queue] == ["make", "enqueue", "step", "cancel"]
    assert all(seconds > 0 for seconds in queue.values())
    for drafts in (False, True):
        engine = host.engine_after_context(300, 5, drafts)
        (job,) = engine.scheduler.active
        assert (job.prompt_tokens, bool(engine.num_draft_tokens)) == (300, drafts)
        assert job.sequences[0].ids[300:] == job.sequences[0].ids[300 - host.LOGIT_SETS :][: job.new_tokens]
    measured = host.measure_cases([lambda: {"a": 1.0}, lambda: {"a": 3.0}], repeats=2)
    assert [case["a"][0] for case in measured] == [1.0, 3.0]


def test_queues_are_measured_with_what_is_loaded_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    def measure_queue(count: int) -> dict[str, float]:
        frozen.append(gc.get_freeze_count())
        return {"make": float(count)}

    monkeypatch.setattr(host, "measure_queue", measure_queue)
    assert [case["make"][0] for case in host.measure_queues(2)] == [*host.QUEUES]
    assert all(count > 10_000 for count in frozen)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("growth", "expected"), [(1e9, "flat"), (0.0, "grows")])
def test_the_benchmark_prints_a_verdict(
    growth: float, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["host", "--repeats", "1"])
    monkeypatch.setattr(host, "CASES", (host.Case(1, 1.0, 2), host.Case(2, 0.0, 2)))
    monkeypatch.setattr(host, "CONTEXTS", (16, 32))
    monkeypatch.setattr(host, "QUEUES", (2, 4))
    monkeypatch.setattr(host, "GROWTH", growth)
    try:
        host.main()
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "met" in printed
    assert "missed" in printed
    assert printed.count(expected) == 2 + 4
