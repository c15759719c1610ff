"""The host's work for a token does not grow with the context, nor that for a job with the queue.

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
from tests.generator.test_engine import TOKENIZER, alphabet, job, make_engine, run, streaming_results
from tests.generator.toy_model import VOCAB, ToyRunner

SHORT, LONG = 128, 16_000  # they end at the same place of a page
WAYS: list[dict[str, Any]] = [
    {},
    {"stop_conditions": ["never said", 0]},
    {"banned_strings": ["never said"]},
    {"settings": Settings(temperature=0.8, top_k=20)},
    {"settings": Settings.greedy(token_repetition_penalty=1.1)},
    {"return_probs": True, "return_top_tokens": 3},
]


def behind(context: int, drafts: bool, settings: Settings | None = None, **options: Any) -> EngineCore:
    """A loop in the middle of a long text."""
    machine = host.engine_after_context(context, 30, drafts)
    (known,) = machine.scheduler.active
    prompt = torch.tensor([known.sequences[0].ids[:context]])
    machine.clear()
    machine.enqueue(Job(prompt, 240, gen_settings=settings or Settings.greedy(), **options))
    for _ in range(4):
        machine.step()
    return machine


def several(machine: EngineCore) -> Callable[[], None]:
    def work() -> None:
        for _ in range(5):
            machine.step()

    return work


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_step_is_as_much_work_behind_any_context(way: int, drafts: bool) -> None:
    short, long = (instructions(several(behind(context, drafts, **WAYS[way]))) for context in (SHORT, LONG))
    assert abs(long - short) < 0.02 * short


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_copies_no_context(drafts: bool) -> None:
    """A list of all ids would be 128 kB."""
    peaks = []
    for context in (SHORT, LONG):
        work = several(behind(context, drafts))
        tracemalloc.start()
        try:
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20_000


def waiting(count: int) -> tuple[EngineCore, list[Job]]:
    """A loop in which one job runs and so many wait."""
    machine = make_engine(pages=4, max_batch_size=1)
    machine.enqueue(job("abc", 500))
    jobs = [job([2 + n % 26, 3], 500, stop_conditions=[0]) for n in range(count)]
    for one in jobs:
        machine.enqueue(one)
    machine.step()
    return machine, jobs


def work_on(count: int) -> dict[str, int]:
    """Instructions of everything that may be done while so many wait."""
    machine, jobs = waiting(count)
    late = job("xyz", 500)
    found = {
        "enqueue": instructions(lambda: machine.enqueue(late)),
        "step": instructions(machine.step),
        "cancel": instructions(lambda: machine.cancel(jobs[count // 2])),
        "step after": instructions(machine.step),
        "remaining": instructions(lambda: machine.busy),
    }
    machine.cancel(machine.scheduler.active[0])
    return found | {"admit": instructions(machine.step)}


def test_a_job_is_as_much_work_in_any_queue() -> None:
    short, long = work_on(10), work_on(3000)
    assert short.keys() == long.keys()
    for name, count in short.items():
        assert long[name] <= 1.02 * count, name


def visited() -> int:
    """How many objects the garbage collector goes through."""
    gc.collect()
    gc.collect()  # a tuple is let off once what is in it was
    return len(gc.get_objects())


def test_a_waiting_job_is_few_objects() -> None:
    """All of them are visited again and again while a long queue is made."""
    machine, _ = waiting(1)
    settings = Settings.greedy()
    before = visited()
    jobs = [job([2, 3], 500, settings=settings, stop_conditions=[0]) for _ in range(200)]
    made = visited()
    for one in jobs:
        machine.enqueue(one)
    enqueued = visited()
    assert made - before < 12 * len(jobs)
    assert enqueued - made < 1 * len(jobs)
    assert (jobs[0].new_tokens, jobs[0].held_text, jobs[0].full_completion) == (0, "", "")


class Adapted:
    """What a sequence with adapters brings."""

    asked = 0

    def __init__(self, salt: bytes, gone: set[bytes]) -> None:
        self.salt, self.gone = salt, gone

    def unloaded_error(self) -> NotLoaded | None:
        Adapted.asked += 1
        return NotLoaded(f"{self.salt!r} is gone") if self.salt in self.gone else None


def test_adapters_are_looked_after_once_for_all_jobs_that_have_them() -> None:
    gone: set[bytes] = set()
    runner = ToyRunner(alphabet, 16)
    machine = EngineCore(
        runner, PageTable(16), TOKENIZER, VOCAB, max_batch_size=2,
        make_extras=lambda ids, loras, embeddings: Adapted(loras, gone),
    )  # fmt: skip
    jobs = [job("abc", 5, loras=(b"one", b"two", b"three")[n % 3]) for n in range(60)]
    for one in jobs:
        machine.enqueue(one)
    Adapted.asked = 0
    machine.step()
    assert Adapted.asked == 3
    gone.add(b"two")
    failed = [one for one in machine.step() if "error" in one]
    assert [one["serial"] for one in failed] == [*range(1, 60, 3)]
    assert len({id(one["error"]) for one in failed}) == 20  # type: ignore[typeddict-item]
    ended = [one for one in streaming_results(run(machine)) if one["eos"]]
    assert sorted(one["serial"] for one in ended) == [n for n in range(60) if n % 3 != 1]
    assert all(one["eos_reason"] == "max_new_tokens" for one in ended)
    machine.enqueue(job("abc", 1))
    machine.step()
    assert not machine._jobs_by_adapters


def test_reading_results_is_as_much_work_beside_any_number_of_jobs(tmp_path: Path) -> None:
    tokenizer = scripted.make_tokenizer(tmp_path)
    counts = []
    for count in (10, 3000):
        machine = scripted.make_generator(tokenizer, max_batch_size=2)
        own = scripted.job("abc", 500)
        group = JobGroup(machine, [own])
        group.enqueue()
        machine.enqueue([scripted.job([2 + n % 26, 3], 500) for n in range(count)])
        while own.new_tokens < 5:
            group.next_result()
        counts.append([instructions(group.next_result), instructions(machine.num_remaining_jobs)])
        assert machine.num_pending_jobs == count - 1
    assert counts[0] == counts[1]


def test_the_drafter_of_the_benchmark_is_right_all_the_time() -> None:
    """Else its line would say little about drafting."""
    machine = host.engine_after_context(SHORT, 5, True)
    assert isinstance(machine.drafter, NgramDrafter)
    for _ in range(3):
        assert len(machine.step()) == 1 + host.MAX_DRAFT_TOKENS
