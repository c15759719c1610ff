"""The generator in an event loop: whatever consumers do, no consumer hangs and no job stays behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from exlm import AsyncGenerator, AsyncJob, CacheTooSmall, Filter, InputError, Settings, Tokenizer
from tests.generator.scripted import (
    HashingRunner,
    ScriptedCache,
    ScriptedModel,
    alphabet,
    ids,
    make_tokenizer,
)

TIMEOUT = 20.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class SlowModel(ScriptedModel):
    """A model that takes its time, and fails when told to."""

    def __init__(self) -> None:
        super().__init__(max_seq_len=8192)
        self.broken: Exception | None = None

    def runner(self, cache: ScriptedCache) -> HashingRunner:
        model = self

        class Slow(HashingRunner):
            def decode(self, *arguments: Any) -> Any:
                time.sleep(0.001)
                if model.broken is not None:
                    raise model.broken
                return super().decode(*arguments)

        return Slow(alphabet, cache.max_seq_len // 256)


class FilterFailingAfterTwo(Filter):
    """Lets two tokens pass, then fails."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.fed = 0

    def begin(self, prefix_str: Any) -> None:
        self.fed = 0

    def feed(self, token: Any) -> None:
        self.fed += 1
        if self.fed == 2:
            raise KeyError("trap")

    def next(self) -> Any:
        return set(range(2, 28)), set()

    def use_background_worker(self) -> bool:
        return True


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("toy"))


Scenario = Callable[[AsyncGenerator], Coroutine[Any, Any, None]]


def run_scenario(tokenizer: Tokenizer, scenario: Scenario) -> None:
    """Run a scene in an event loop of its own; afterwards no task, no thread and no job is left."""
    threads = set(threading.enumerate())

    async def scene() -> None:
        machine = AsyncGenerator(SlowModel(), ScriptedCache(), tokenizer, max_batch_size=8)
        async with asyncio.timeout(TIMEOUT):
            await scenario(machine)
            await machine.close()
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert machine.generator.num_remaining_jobs() == 0
        assert not machine.jobs

    asyncio.run(scene())
    gc.collect()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads


def start_job(machine: AsyncGenerator, prompt: str = "abc", new: int = 6, **options: Any) -> AsyncJob:
    return AsyncJob(machine, ids(prompt), new, gen_settings=Settings.greedy(), **options)


async def read_text(job: AsyncJob) -> str:
    return "".join([str(result.get("text", "")) async for result in job])


async def check_works(machine: AsyncGenerator) -> None:
    """A normal job says what it always says."""
    assert await read_text(start_job(machine)) == "defghi"


def test_many_consumers(tokenizer: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        jobs = [start_job(machine, LETTERS[i % 20 : i % 20 + 3], 1 + i % 9) for i in range(200)]
        told = await asyncio.gather(*map(read_text, jobs))
        for i, text in enumerate(told):
            begin = i % 20 + 3
            assert text == (LETTERS * 2)[begin : begin + 1 + i % 9]

    run_scenario(tokenizer, act)


def test_stages_in_order(tokenizer: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        results = [result async for result in start_job(machine, new=2, identifier="x")]
        assert [result["stage"] for result in results] == ["started", "prefill", "streaming", "streaming"]
        assert [result["eos"] for result in results] == [False, False, False, True]
        assert {result["identifier"] for result in results} == {"x"}

    run_scenario(tokenizer, act)


def test_enqueueing_what_is_queued_already_is_harmless(tokenizer: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        job = start_job(machine)
        machine.enqueue(job)
        assert await read_text(job) == "defghi"
        other = AsyncGenerator(SlowModel(), ScriptedCache(), tokenizer)
        with pytest.raises(InputError, match="another generator"):
            other.enqueue(job)
        await other.close()

    run_scenario(tokenizer, act)


def test_cancel_midway(tokenizer: Tokenizer) -> None:
    """By its own consumer, who then listens in vain; the neighbours go on."""

    async def act(machine: AsyncGenerator) -> None:
        long, neighbour = start_job(machine, new=2000), start_job(machine, "klm", 30)
        told = ""
        async for result in long:
            told += str(result.get("text", ""))
            if len(told) == 3:
                await long.cancel()
                break
        assert told == "def"
        assert long.cancelled
        rest = [result async for result in long]
        assert len(rest) <= 2
        await long.cancel()
        assert await read_text(neighbour) == (LETTERS * 3)[13:43]
        await check_works(machine)

    run_scenario(tokenizer, act)


def test_cancel_while_a_consumer_waits(tokenizer: Tokenizer) -> None:
    """T27: from another task; the consumer's loop ends."""

    async def act(machine: AsyncGenerator) -> None:
        long = start_job(machine, new=2000)
        consumers = [asyncio.create_task(read_text(long)) for _ in range(3)]
        await asyncio.sleep(0.02)
        await machine.cancel(long)
        told = await asyncio.gather(*consumers)
        assert 0 < len("".join(told)) < 2000
        await check_works(machine)

    run_scenario(tokenizer, act)


def test_cancel_before_it_began(tokenizer: Tokenizer) -> None:
    """A job that is cancelled in the same breath never runs."""

    async def act(machine: AsyncGenerator) -> None:
        never = start_job(machine, new=2000)
        await never.cancel()
        assert await read_text(never) == ""
        assert machine.generator.num_remaining_jobs() == 0
        filled = [start_job(machine, new=2000) for _ in range(8)]
        await asyncio.sleep(0.01)
        waiting = start_job(machine)
        await asyncio.sleep(0.01)
        await waiting.cancel()
        assert await read_text(waiting) == ""
        await asyncio.gather(*(job.cancel() for job in filled))
        await check_works(machine)

    run_scenario(tokenizer, act)


def test_a_finished_job_can_be_cancelled_and_read_again(tokenizer: Tokenizer) -> None:
    """T30: both without effect."""

    async def act(machine: AsyncGenerator) -> None:
        done = start_job(machine)
        assert await read_text(done) == "defghi"
        await done.cancel()
        assert await read_text(done) == ""

    run_scenario(tokenizer, act)


def test_a_job_that_fails_fails_alone(tokenizer: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        bad, good = start_job(machine, filters=[FilterFailingAfterTwo()]), start_job(machine, "klm", 12)

        async def last() -> Any:
            return [result async for result in bad][-1]

        result, text = await asyncio.gather(last(), read_text(good))
        assert (result["eos"], result["eos_reason"]) == (True, "error")
        assert isinstance(result["error"], InputError)
        assert "trap" in str(result["error"])
        assert text == "nopqrstuvwxy"
        await check_works(machine)

    run_scenario(tokenizer, act)


def test_a_refused_job_raises_where_it_is_iterated(tokenizer: Tokenizer) -> None:
    """T28: and is not left in the queue; an unread result does no harm."""

    async def act(machine: AsyncGenerator) -> None:
        unread = start_job(machine, new=5000)
        large = start_job(machine, new=5000)
        with pytest.raises(CacheTooSmall):
            await read_text(large)
        assert await read_text(large) == ""
        assert not machine.jobs
        with pytest.raises(InputError):
            start_job(machine, new=0)
        del unread
        await check_works(machine)

    run_scenario(tokenizer, act)


def test_a_failed_step_reaches_every_job_and_later_jobs_run(tokenizer: Tokenizer) -> None:
    """T29."""

    async def act(machine: AsyncGenerator) -> None:
        jobs = [start_job(machine, new=2000) for _ in range(12)]
        readers = [asyncio.create_task(read_text(job)) for job in jobs]
        await asyncio.sleep(0.02)
        machine.generator.model.broken = RuntimeError("out of memory")
        told = await asyncio.gather(*readers, return_exceptions=True)
        assert {str(error) for error in told} == {"out of memory"}
        machine.generator.model.broken = None
        await check_works(machine)

    run_scenario(tokenizer, act)


def test_close_while_jobs_run(tokenizer: Tokenizer) -> None:
    """Consumers end; one that comes later gets an error."""

    async def act(machine: AsyncGenerator) -> None:
        jobs = [start_job(machine, new=2000) for _ in range(12)]  # eight run, four wait
        readers = [asyncio.create_task(read_text(job)) for job in jobs]
        await asyncio.sleep(0.02)
        late = start_job(machine)
        await machine.close()
        told = await asyncio.gather(*readers)
        assert all(len(text) < 2000 for text in told)
        for job in (late, start_job(machine)):
            with pytest.raises(InputError, match="closed"):
                await read_text(job)
        await machine.close()

    run_scenario(tokenizer, act)


def test_close_at_once(tokenizer: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        await machine.close()

    run_scenario(tokenizer, act)


def test_the_event_loop_is_not_blocked(tokenizer: Tokenizer) -> None:
    """T30: rounds run elsewhere."""

    async def act(machine: AsyncGenerator) -> None:
        reader = asyncio.create_task(read_text(start_job(machine, new=50)))
        ticks = 0
        while not reader.done():
            await asyncio.sleep(0)
            ticks += 1
        assert ticks > 100

    run_scenario(tokenizer, act)


@pytest.mark.parametrize("seed", range(3))
def test_consumers_that_come_and_go(tokenizer: Tokenizer, seed: int) -> None:
    """At random some leave early, are cancelled or fail; those that stay receive every result."""
    dice = Random(seed)

    async def consumer(machine: AsyncGenerator, n: int) -> None:
        await asyncio.sleep(dice.random() * 0.1)
        place, new, fate = n % 20, dice.randint(1, 40), dice.random()
        filters = [FilterFailingAfterTwo()] if fate < 0.15 else None
        job = start_job(machine, LETTERS[place : place + 3], new, filters=filters)
        if fate > 0.85:
            asyncio.get_running_loop().call_later(dice.random() * 0.05, lambda: keep(job.cancel()))
        told = ""
        async for result in job:
            told += str(result.get("text", ""))
            if 0.15 < fate < 0.4 and len(told) > 5:
                await job.cancel()
                break
        whole = (LETTERS * 3)[place + 3 : place + 3 + new]
        assert whole.startswith(told)
        if 0.4 < fate < 0.85:
            assert told == whole

    later: set[asyncio.Task[None]] = set()

    def keep(what: Coroutine[Any, Any, None]) -> None:
        later.add(asyncio.get_running_loop().create_task(what))

    async def act(machine: AsyncGenerator) -> None:
        await asyncio.gather(*(consumer(machine, n) for n in range(60)))
        await asyncio.sleep(0.06)
        await asyncio.gather(*later)
        await check_works(machine)

    run_scenario(tokenizer, act)


async def check_works_in_time(machine: AsyncGenerator) -> None:
    async with asyncio.timeout(TIMEOUT):
        await check_works(machine)


def test_a_generator_goes_on_in_the_next_event_loop(tokenizer: Tokenizer) -> None:
    """Scripts call asyncio.run once for each request, and each call has a loop of its own."""

    async def begin() -> AsyncGenerator:
        machine = AsyncGenerator(SlowModel(), ScriptedCache(), tokenizer)
        await check_works_in_time(machine)
        async for result in start_job(machine, new=4000):  # never finished, nor cancelled
            if result["stage"] == "streaming":
                break
        return machine

    machine = asyncio.run(begin())
    for _ in range(2):
        asyncio.run(check_works_in_time(machine))
        assert (machine.jobs, machine.generator.num_remaining_jobs()) == ({}, 0)
    asyncio.run(machine.close())
    asyncio.run(machine.close())
    with pytest.raises(InputError, match="closed"):
        asyncio.run(check_works_in_time(machine))


def test_a_generator_is_refused_while_its_event_loop_is_open(tokenizer: Tokenizer) -> None:
    async def make() -> AsyncGenerator:
        return AsyncGenerator(SlowModel(), ScriptedCache(), tokenizer)

    home = asyncio.new_event_loop()
    machine = home.run_until_complete(make())
    with pytest.raises(InputError, match="at work in another event loop"):
        asyncio.run(check_works_in_time(machine))
    home.run_until_complete(check_works_in_time(machine))
    home.run_until_complete(machine.close())
    home.close()


def test_cancelling_the_iteration_task_is_reported(tokenizer: Tokenizer) -> None:
    async def scene(machine: AsyncGenerator) -> None:
        machine.iteration_task.cancel()
        await asyncio.wait([machine.iteration_task])
        with pytest.raises(InputError, match="task of this generator was cancelled"):
            start_job(machine)

    run_scenario(tokenizer, scene)
