"""The host's work per token does not grow with the context, nor that per job with the queue.

It is counted, because times on a shared machine prove little: the interpreter's instructions, the memory that
a step asks for, and the objects that the garbage collector has to visit. `benchmarks.host` has the times.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import host
from exlm.errors import NotLoaded
from exlm.generator.engine import EngineCore
from exlm.generator.generator import JobGroup
from exlm.generator.job import Job
from exlm.generator.page_table import PageTable
from exlm.generator.speculative import NgramDrafter
from exlm.sampling import Settings
from tests.generator import scripted
from tests.generator.counting import instructions
from tests.generator.test_engine import TOKENIZER, alphabet, make_engine, make_job, run, streaming_results
from tests.generator.toy_model import VOCAB, ToyRunner

SHORT, LONG = 128, 16_000  # they end at the same place of a page
JOB_OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop_conditions": ["never said", 0]},
    {"banned_strings": ["never said"]},
    {"settings": Settings(temperature=0.8, top_k=20)},
    {"settings": Settings.greedy(token_repetition_penalty=1.1)},
    {"return_probs": True, "return_top_tokens": 3},
]


def engine_in_decode(context: int, drafts: bool, settings: Settings | None = None, **options: Any) -> EngineCore:
    """An engine that decodes one job after a context of this length."""
    engine = host.engine_after_context(context, 30, drafts)
    (active,) = engine.scheduler.active
    prompt = torch.tensor([active.sequences[0].ids[:context]])
    engine.clear()
    engine.enqueue(Job(prompt, 240, gen_settings=settings or Settings.greedy(), **options))
    for _ in range(4):
        engine.step()
    return engine


def five_steps(engine: EngineCore) -> Callable[[], None]:
    def work() -> None:
        for _ in range(5):
            engine.step()

    return work


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("case", range(len(JOB_OPTIONS)))
def test_a_step_is_as_much_work_behind_any_context(case: int, drafts: bool) -> None:
    engines = (engine_in_decode(context, drafts, **JOB_OPTIONS[case]) for context in (SHORT, LONG))
    short, long = (instructions(five_steps(engine)) for engine in engines)
    assert abs(long - short) < 0.02 * short


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_copies_no_context(drafts: bool) -> None:
    """A copy of all ids would take 128 kB."""
    peaks = []
    for context in (SHORT, LONG):
        work = five_steps(engine_in_decode(context, drafts))
        tracemalloc.start()
        try:
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20_000


def engine_with_queue(count: int) -> tuple[EngineCore, list[Job]]:
    """An engine in which one job runs and `count` jobs wait."""
    engine = make_engine(pages=4, max_batch_size=1)
    engine.enqueue(make_job("abc", 500))
    jobs = [make_job([2 + n % 26, 3], 500, stop_conditions=[0]) for n in range(count)]
    for job in jobs:
        engine.enqueue(job)
    engine.step()
    return engine, jobs


def count_instructions(count: int) -> dict[str, int]:
    """The instructions of each operation on an engine in which `count` jobs wait."""
    engine, jobs = engine_with_queue(count)
    new_job = make_job("xyz", 500)
    counts = {
        "enqueue": instructions(lambda: engine.enqueue(new_job)),
        "step": instructions(engine.step),
        "cancel": instructions(lambda: engine.cancel(jobs[count // 2])),
        "step after": instructions(engine.step),
        "remaining": instructions(lambda: engine.busy),
    }
    engine.cancel(engine.scheduler.active[0])
    return counts | {"admit": instructions(engine.step)}


def test_a_job_is_as_much_work_in_any_queue() -> None:
    short, long = count_instructions(10), count_instructions(3000)
    assert short.keys() == long.keys()
    for name, count in short.items():
        assert long[name] <= 1.02 * count, name


def num_tracked_objects() -> int:
    """How many objects the garbage collector tracks."""
    gc.collect()
    gc.collect()  # a tuple is untracked one collection after its elements
    return len(gc.get_objects())


def test_a_waiting_job_is_few_objects() -> None:
    """The garbage collector visits all of them repeatedly while a long queue is built."""
    engine, _ = engine_with_queue(1)
    settings = Settings.greedy()
    before = num_tracked_objects()
    jobs = [make_job([2, 3], 500, settings=settings, stop_conditions=[0]) for _ in range(200)]
    created = num_tracked_objects()
    for job in jobs:
        engine.enqueue(job)
    enqueued = num_tracked_objects()
    assert created - before < 12 * len(jobs)
    assert enqueued - created < 1 * len(jobs)
    assert (jobs[0].new_tokens, jobs[0].held_text, jobs[0].full_completion) == (0, "", "")


class AdapterExtras:
    """The extras of a sequence with adapters, which count the checks for unloaded adapters."""

    num_checks = 0

    def __init__(self, salt: bytes, unloaded: set[bytes]) -> None:
        self.salt, self.unloaded = salt, unloaded

    def unloaded_error(self) -> NotLoaded | None:
        AdapterExtras.num_checks += 1
        return NotLoaded(f"{self.salt!r} is gone") if self.salt in self.unloaded else None


def test_adapters_are_looked_after_once_for_all_jobs_that_have_them() -> None:
    unloaded: set[bytes] = set()
    runner = ToyRunner(alphabet, 16)
    engine = EngineCore(
        runner, PageTable(16), TOKENIZER, VOCAB, max_batch_size=2,
        make_extras=lambda ids, loras, embeddings: AdapterExtras(loras, unloaded),
    )  # fmt: skip
    jobs = [make_job("abc", 5, loras=(b"one", b"two", b"three")[n % 3]) for n in range(60)]
    for one in jobs:
        engine.enqueue(one)
    AdapterExtras.num_checks = 0
    engine.step()
    assert AdapterExtras.num_checks == 3
    unloaded.add(b"two")
    failed = [one for one in engine.step() if "error" in one]
    assert [one["serial"] for one in failed] == [*range(1, 60, 3)]
    assert len({id(one["error"]) for one in failed}) == 20  # type: ignore[typeddict-item]
    last = [one for one in streaming_results(run(engine)) if one["eos"]]
    assert sorted(one["serial"] for one in last) == [n for n in range(60) if n % 3 != 1]
    assert all(one["eos_reason"] == "max_new_tokens" for one in last)
    engine.enqueue(make_job("abc", 1))
    engine.step()
    assert not engine._jobs_by_adapters


def test_reading_results_is_as_much_work_beside_any_number_of_jobs(tmp_path: Path) -> None:
    tokenizer = scripted.make_tokenizer(tmp_path)
    counts = []
    for count in (10, 3000):
        generator = scripted.make_generator(tokenizer, max_batch_size=2)
        job = scripted.make_job("abc", 500)
        group = JobGroup(generator, [job])
        group.enqueue()
        generator.enqueue([scripted.make_job([2 + n % 26, 3], 500) for n in range(count)])
        while job.new_tokens < 5:
            group.next_result()
        counts.append([instructions(group.next_result), instructions(generator.num_remaining_jobs)])
        assert generator.num_pending_jobs == count - 1
    assert counts[0] == counts[1]


def test_the_drafter_of_the_benchmark_is_right_all_the_time() -> None:
    """Otherwise the benchmark would measure little of drafting."""
    engine = host.engine_after_context(SHORT, 5, True)
    assert isinstance(engine.drafter, NgramDrafter)
    for _ in range(3):
        assert len(engine.step()) == 1 + host.MAX_DRAFT_TOKENS
