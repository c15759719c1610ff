"""The generator in an event loop: whatever consumers do, nobody waits for ever and nothing stays behind."""

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
from tests.generator.scripted import FlatRunner, ScriptedCache, ScriptedModel, alphabet, ids, tokenizer

PATIENCE = 20.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class SlowModel(ScriptedModel):
    """A model that takes its time, and fails when told to."""

    def __init__(self) -> None:
        super().__init__(max_seq_len=8192)
        self.broken: Exception | None = None

    def runner(self, cache: ScriptedCache) -> FlatRunner:
        model = self

        class Slow(FlatRunner):
            def decode(self, *arguments: Any) -> Any:
                time.sleep(0.001)
                if model.broken is not None:
                    raise model.broken
                return super().decode(*arguments)

        return Slow(alphabet, cache.max_seq_len // 256)


class Trap(Filter):
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
def texts(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("toy"))


Act = Callable[[AsyncGenerator], Coroutine[Any, Any, None]]


def play(texts: Tokenizer, act: Act) -> None:
    """Run a scene in an event loop of its own; afterwards no task, no thread and no job is left."""
    threads = set(threading.enumerate())

    async def scene() -> None:
        machine = AsyncGenerator(SlowModel(), ScriptedCache(), texts, max_batch_size=8)
        async with asyncio.timeout(PATIENCE):
            await act(machine)
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


def start(machine: AsyncGenerator, prompt: str = "abc", new: int = 6, **options: Any) -> AsyncJob:
    return AsyncJob(machine, ids(prompt), new, gen_settings=Settings.greedy(), **options)


async def read(job: AsyncJob) -> str:
    return "".join([str(result.get("text", "")) async for result in job])


async def works(machine: AsyncGenerator) -> None:
    """A normal job says what it always says."""
    assert await read(start(machine)) == "defghi"


def test_many_consumers(texts: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        jobs = [start(machine, LETTERS[i % 20 : i % 20 + 3], 1 + i % 9) for i in range(200)]
        told = await asyncio.gather(*map(read, jobs))
        for i, text in enumerate(told):
            begin = i % 20 + 3
            assert text == (LETTERS * 2)[begin : begin + 1 + i % 9]

    play(texts, act)


def test_stages_in_order(texts: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        results = [result async for result in start(machine, new=2, identifier="x")]
        assert [result["stage"] for result in results] == ["started", "prefill", "streaming", "streaming"]
        assert [result["eos"] for result in results] == [False, False, False, True]
        assert {result["identifier"] for result in results} == {"x"}

    play(texts, act)


def test_enqueueing_what_is_queued_already_is_harmless(texts: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        job = start(machine)
        machine.enqueue(job)
        assert await read(job) == "defghi"
        other = AsyncGenerator(SlowModel(), ScriptedCache(), texts)
        with pytest.raises(InputError, match="another generator"):
            other.enqueue(job)
        await other.close()

    play(texts, act)


def test_cancel_midway(texts: Tokenizer) -> None:
    """By its own consumer, who then listens in vain; the neighbours go on."""

    async def act(machine: AsyncGenerator) -> None:
        long, neighbour = start(machine, new=2000), start(machine, "klm", 30)
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
        assert await read(neighbour) == (LETTERS * 3)[13:43]
        await works(machine)

    play(texts, act)


def test_cancel_while_somebody_waits(texts: Tokenizer) -> None:
    """T27: from another task; the consumer's loop ends."""

    async def act(machine: AsyncGenerator) -> None:
        long = start(machine, new=2000)
        consumers = [asyncio.create_task(read(long)) for _ in range(3)]
        await asyncio.sleep(0.02)
        await machine.cancel(long)
        told = await asyncio.gather(*consumers)
        assert 0 < len("".join(told)) < 2000
        await works(machine)

    play(texts, act)


def test_cancel_before_it_began(texts: Tokenizer) -> None:
    """A job that is cancelled in the same breath never runs."""

    async def act(machine: AsyncGenerator) -> None:
        never = start(machine, new=2000)
        await never.cancel()
        assert await read(never) == ""
        assert machine.generator.num_remaining_jobs() == 0
        filled = [start(machine, new=2000) for _ in range(8)]
        await asyncio.sleep(0.01)
        waiting = start(machine)
        await asyncio.sleep(0.01)
        await waiting.cancel()
        assert await read(waiting) == ""
        await asyncio.gather(*(job.cancel() for job in filled))
        await works(machine)

    play(texts, act)


def test_a_finished_job_can_be_cancelled_and_read_again(texts: Tokenizer) -> None:
    """T30: both without effect."""

    async def act(machine: AsyncGenerator) -> None:
        done = start(machine)
        assert await read(done) == "defghi"
        await done.cancel()
        assert await read(done) == ""

    play(texts, act)


def test_a_job_that_fails_fails_alone(texts: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        bad, good = start(machine, filters=[Trap()]), start(machine, "klm", 12)

        async def last() -> Any:
            return [result async for result in bad][-1]

        result, text = await asyncio.gather(last(), read(good))
        assert (result["eos"], result["eos_reason"]) == (True, "error")
        assert isinstance(result["error"], InputError)
        assert "trap" in str(result["error"])
        assert text == "nopqrstuvwxy"
        await works(machine)

    play(texts, act)


def test_a_refused_job_is_heard_of_where_it_is_read(texts: Tokenizer) -> None:
    """T28: and is not left in the queue; if nobody reads it, nothing happens."""

    async def act(machine: AsyncGenerator) -> None:
        unread = start(machine, new=5000)
        large = start(machine, new=5000)
        with pytest.raises(CacheTooSmall):
            await read(large)
        assert await read(large) == ""
        assert not machine.jobs
        with pytest.raises(InputError):
            start(machine, new=0)
        del unread
        await works(machine)

    play(texts, act)


def test_a_round_that_fails_is_heard_of_by_all_and_later_jobs_run(texts: Tokenizer) -> None:
    """T29."""

    async def act(machine: AsyncGenerator) -> None:
        jobs = [start(machine, new=2000) for _ in range(12)]
        readers = [asyncio.create_task(read(job)) for job in jobs]
        await asyncio.sleep(0.02)
        machine.generator.model.broken = RuntimeError("out of memory")
        told = await asyncio.gather(*readers, return_exceptions=True)
        assert {str(error) for error in told} == {"out of memory"}
        machine.generator.model.broken = None
        await works(machine)

    play(texts, act)


def test_close_while_jobs_run(texts: Tokenizer) -> None:
    """Consumers end; whoever comes later is told."""

    async def act(machine: AsyncGenerator) -> None:
        jobs = [start(machine, new=2000) for _ in range(12)]  # eight run, four wait
        readers = [asyncio.create_task(read(job)) for job in jobs]
        await asyncio.sleep(0.02)
        late = start(machine)
        await machine.close()
        told = await asyncio.gather(*readers)
        assert all(len(text) < 2000 for text in told)
        for job in (late, start(machine)):
            with pytest.raises(InputError, match="closed"):
                await read(job)
        await machine.close()

    play(texts, act)


def test_close_at_once(texts: Tokenizer) -> None:
    async def act(machine: AsyncGenerator) -> None:
        await machine.close()

    play(texts, act)


def test_the_event_loop_stays_free(texts: Tokenizer) -> None:
    """T30: rounds run elsewhere."""

    async def act(machine: AsyncGenerator) -> None:
        reader = asyncio.create_task(read(start(machine, new=50)))
        ticks = 0
        while not reader.done():
            await asyncio.sleep(0)
            ticks += 1
        assert ticks > 100

    play(texts, act)


@pytest.mark.parametrize("seed", range(3))
def test_consumers_that_come_and_go(texts: Tokenizer, seed: int) -> None:
    """At random some leave early, some are cancelled by others, some fail; whoever stays hears everything."""
    dice = Random(seed)

    async def consumer(machine: AsyncGenerator, n: int) -> None:
        await asyncio.sleep(dice.random() * 0.1)
        place, new, fate = n % 20, dice.randint(1, 40), dice.random()
        filters = [Trap()] if fate < 0.15 else None
        job = start(machine, LETTERS[place : place + 3], new, filters=filters)
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
        await works(machine)

    play(texts, act)


async def works_in_time(machine: AsyncGenerator) -> None:
    async with asyncio.timeout(PATIENCE):
        await works(machine)


def test_a_generator_goes_on_in_the_next_event_loop(texts: Tokenizer) -> None:
    """Scripts call asyncio.run once for each request, and each call has a loop of its own."""

    async def begin() -> AsyncGenerator:
        machine = AsyncGenerator(SlowModel(), ScriptedCache(), texts)
        await works_in_time(machine)
        async for result in start(machine, new=4000):  # never finished, nor cancelled
            if result["stage"] == "streaming":
                break
        return machine

    machine = asyncio.run(begin())
    for _ in range(2):
        asyncio.run(works_in_time(machine))
        assert (machine.jobs, machine.generator.num_remaining_jobs()) == ({}, 0)
    asyncio.run(machine.close())
    asyncio.run(machine.close())
    with pytest.raises(InputError, match="closed"):
        asyncio.run(works_in_time(machine))


def test_a_loop_that_is_still_there_keeps_its_generator(texts: Tokenizer) -> None:
    async def make() -> AsyncGenerator:
        return AsyncGenerator(SlowModel(), ScriptedCache(), texts)

    home = asyncio.new_event_loop()
    machine = home.run_until_complete(make())
    with pytest.raises(InputError, match="at work in another event loop"):
        asyncio.run(works_in_time(machine))
    home.run_until_complete(works_in_time(machine))
    home.run_until_complete(machine.close())
    home.close()


def test_who_cancels_every_task_is_told(texts: Tokenizer) -> None:
    async def scene(machine: AsyncGenerator) -> None:
        machine.iteration_task.cancel()
        await asyncio.wait([machine.iteration_task])
        with pytest.raises(InputError, match="task of this generator was cancelled"):
            start(machine)

    play(texts, scene)
