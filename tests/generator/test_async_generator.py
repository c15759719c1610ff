"""AsyncGenerator: no consumer hangs and no job is leaked, whatever consumers do."""

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
    """A scripted model whose passes take time, and raise if the test sets an error."""

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
    """A filter that raises after two tokens."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.num_tokens = 0

    def begin(self, prefix_str: Any) -> None:
        self.num_tokens = 0

    def feed(self, token: Any) -> None:
        self.num_tokens += 1
        if self.num_tokens == 2:
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
    """Run a scenario in a new event loop; afterwards no task, no thread and no job may be left."""
    threads = set(threading.enumerate())

    async def main() -> None:
        generator = AsyncGenerator(SlowModel(), ScriptedCache(), tokenizer, max_batch_size=8)
        async with asyncio.timeout(TIMEOUT):
            await scenario(generator)
            await generator.close()
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert generator.generator.num_remaining_jobs() == 0
        assert not generator.jobs

    asyncio.run(main())
    gc.collect()
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads


def start_job(generator: AsyncGenerator, prompt: str = "abc", new: int = 6, **options: Any) -> AsyncJob:
    return AsyncJob(generator, ids(prompt), new, gen_settings=Settings.greedy(), **options)


async def read_text(job: AsyncJob) -> str:
    return "".join([str(result.get("text", "")) async for result in job])


async def check_works(generator: AsyncGenerator) -> None:
    """Check that a normal job gives its usual text."""
    assert await read_text(start_job(generator)) == "defghi"


def test_many_consumers(tokenizer: Tokenizer) -> None:
    async def act(generator: AsyncGenerator) -> None:
        jobs = [start_job(generator, LETTERS[i % 20 : i % 20 + 3], 1 + i % 9) for i in range(200)]
        texts = await asyncio.gather(*map(read_text, jobs))
        for i, text in enumerate(texts):
            start = i % 20 + 3
            assert text == (LETTERS * 2)[start : start + 1 + i % 9]

    run_scenario(tokenizer, act)


def test_stages_in_order(tokenizer: Tokenizer) -> None:
    async def act(generator: AsyncGenerator) -> None:
        results = [result async for result in start_job(generator, new=2, identifier="x")]
        assert [result["stage"] for result in results] == ["started", "prefill", "streaming", "streaming"]
        assert [result["eos"] for result in results] == [False, False, False, True]
        assert {result["identifier"] for result in results} == {"x"}

    run_scenario(tokenizer, act)


def test_enqueueing_what_is_queued_already_is_harmless(tokenizer: Tokenizer) -> None:
    async def act(generator: AsyncGenerator) -> None:
        job = start_job(generator)
        generator.enqueue(job)
        assert await read_text(job) == "defghi"
        other = AsyncGenerator(SlowModel(), ScriptedCache(), tokenizer)
        with pytest.raises(InputError, match="another generator"):
            other.enqueue(job)
        await other.close()

    run_scenario(tokenizer, act)


def test_cancel_midway(tokenizer: Tokenizer) -> None:
    """The job's own consumer cancels it and receives no more results; the other job continues."""

    async def act(generator: AsyncGenerator) -> None:
        cancelled, neighbour = start_job(generator, new=2000), start_job(generator, "klm", 30)
        text = ""
        async for result in cancelled:
            text += str(result.get("text", ""))
            if len(text) == 3:
                await cancelled.cancel()
                break
        assert text == "def"
        assert cancelled.cancelled
        later_results = [result async for result in cancelled]
        assert len(later_results) <= 2
        await cancelled.cancel()
        assert await read_text(neighbour) == (LETTERS * 3)[13:43]
        await check_works(generator)

    run_scenario(tokenizer, act)


def test_cancel_while_a_consumer_waits(tokenizer: Tokenizer) -> None:
    """Another task cancels the job; the consumer's loop ends."""

    async def act(generator: AsyncGenerator) -> None:
        long = start_job(generator, new=2000)
        consumers = [asyncio.create_task(read_text(long)) for _ in range(3)]
        await asyncio.sleep(0.02)
        await generator.cancel(long)
        texts = await asyncio.gather(*consumers)
        assert 0 < len("".join(texts)) < 2000
        await check_works(generator)

    run_scenario(tokenizer, act)


def test_cancel_before_it_began(tokenizer: Tokenizer) -> None:
    """A job that is cancelled before the first step never runs."""

    async def act(generator: AsyncGenerator) -> None:
        cancelled = start_job(generator, new=2000)
        await cancelled.cancel()
        assert await read_text(cancelled) == ""
        assert generator.generator.num_remaining_jobs() == 0
        filled = [start_job(generator, new=2000) for _ in range(8)]
        await asyncio.sleep(0.01)
        waiting = start_job(generator)
        await asyncio.sleep(0.01)
        await waiting.cancel()
        assert await read_text(waiting) == ""
        await asyncio.gather(*(job.cancel() for job in filled))
        await check_works(generator)

    run_scenario(tokenizer, act)


def test_a_finished_job_can_be_cancelled_and_read_again(tokenizer: Tokenizer) -> None:
    """Both calls have no effect."""

    async def act(generator: AsyncGenerator) -> None:
        finished = start_job(generator)
        assert await read_text(finished) == "defghi"
        await finished.cancel()
        assert await read_text(finished) == ""

    run_scenario(tokenizer, act)


def test_a_job_that_fails_fails_alone(tokenizer: Tokenizer) -> None:
    async def act(generator: AsyncGenerator) -> None:
        bad, good = start_job(generator, filters=[FilterFailingAfterTwo()]), start_job(generator, "klm", 12)

        async def last() -> Any:
            return [result async for result in bad][-1]

        result, text = await asyncio.gather(last(), read_text(good))
        assert (result["eos"], result["eos_reason"]) == (True, "error")
        assert isinstance(result["error"], InputError)
        assert "trap" in str(result["error"])
        assert text == "nopqrstuvwxy"
        await check_works(generator)

    run_scenario(tokenizer, act)


def test_a_refused_job_raises_where_it_is_iterated(tokenizer: Tokenizer) -> None:
    """The refused job does not stay in the queue, and its unread error does no harm."""

    async def act(generator: AsyncGenerator) -> None:
        unread = start_job(generator, new=5000)
        large = start_job(generator, new=5000)
        with pytest.raises(CacheTooSmall):
            await read_text(large)
        assert await read_text(large) == ""
        assert not generator.jobs
        with pytest.raises(InputError):
            start_job(generator, new=0)
        del unread
        await check_works(generator)

    run_scenario(tokenizer, act)


def test_a_failed_step_reaches_every_job_and_later_jobs_run(tokenizer: Tokenizer) -> None:

    async def act(generator: AsyncGenerator) -> None:
        jobs = [start_job(generator, new=2000) for _ in range(12)]
        readers = [asyncio.create_task(read_text(job)) for job in jobs]
        await asyncio.sleep(0.02)
        generator.generator.model.broken = RuntimeError("out of memory")
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert {str(error) for error in outcomes} == {"out of memory"}
        generator.generator.model.broken = None
        await check_works(generator)

    run_scenario(tokenizer, act)


def test_close_while_jobs_run(tokenizer: Tokenizer) -> None:
    """The loops of consumers end; a later job raises an error."""

    async def act(generator: AsyncGenerator) -> None:
        jobs = [start_job(generator, new=2000) for _ in range(12)]  # eight run, four wait
        readers = [asyncio.create_task(read_text(job)) for job in jobs]
        await asyncio.sleep(0.02)
        late_job = start_job(generator)
        await generator.close()
        texts = await asyncio.gather(*readers)
        assert all(len(text) < 2000 for text in texts)
        for job in (late_job, start_job(generator)):
            with pytest.raises(InputError, match="closed"):
                await read_text(job)
        await generator.close()

    run_scenario(tokenizer, act)


def test_close_at_once(tokenizer: Tokenizer) -> None:
    async def act(generator: AsyncGenerator) -> None:
        await generator.close()

    run_scenario(tokenizer, act)


def test_the_event_loop_is_not_blocked(tokenizer: Tokenizer) -> None:
    """Steps run in another thread."""

    async def act(generator: AsyncGenerator) -> None:
        reader = asyncio.create_task(read_text(start_job(generator, new=50)))
        ticks = 0
        while not reader.done():
            await asyncio.sleep(0)
            ticks += 1
        assert ticks > 100

    run_scenario(tokenizer, act)


@pytest.mark.parametrize("seed", range(3))
def test_consumers_that_come_and_go(tokenizer: Tokenizer, seed: int) -> None:
    """Random consumers stop early, are cancelled or have failing jobs; the others receive every result."""
    rng = Random(seed)

    async def consumer(generator: AsyncGenerator, n: int) -> None:
        await asyncio.sleep(rng.random() * 0.1)
        start, new, draw = n % 20, rng.randint(1, 40), rng.random()
        filters = [FilterFailingAfterTwo()] if draw < 0.15 else None
        job = start_job(generator, LETTERS[start : start + 3], new, filters=filters)
        if draw > 0.85:
            asyncio.get_running_loop().call_later(rng.random() * 0.05, lambda: start_task(job.cancel()))
        text = ""
        async for result in job:
            text += str(result.get("text", ""))
            if 0.15 < draw < 0.4 and len(text) > 5:
                await job.cancel()
                break
        expected = (LETTERS * 3)[start + 3 : start + 3 + new]
        assert expected.startswith(text)
        if 0.4 < draw < 0.85:
            assert text == expected

    tasks: set[asyncio.Task[None]] = set()

    def start_task(coroutine: Coroutine[Any, Any, None]) -> None:
        tasks.add(asyncio.get_running_loop().create_task(coroutine))

    async def act(generator: AsyncGenerator) -> None:
        await asyncio.gather(*(consumer(generator, n) for n in range(60)))
        await asyncio.sleep(0.06)
        await asyncio.gather(*tasks)
        await check_works(generator)

    run_scenario(tokenizer, act)


async def check_works_in_time(generator: AsyncGenerator) -> None:
    async with asyncio.timeout(TIMEOUT):
        await check_works(generator)


def test_a_generator_goes_on_in_the_next_event_loop(tokenizer: Tokenizer) -> None:
    """Scripts call asyncio.run once for each request, and each call has a loop of its own."""

    async def start_generator() -> AsyncGenerator:
        generator = AsyncGenerator(SlowModel(), ScriptedCache(), tokenizer)
        await check_works_in_time(generator)
        async for result in start_job(generator, new=4000):  # never finished, nor cancelled
            if result["stage"] == "streaming":
                break
        return generator

    generator = asyncio.run(start_generator())
    for _ in range(2):
        asyncio.run(check_works_in_time(generator))
        assert (generator.jobs, generator.generator.num_remaining_jobs()) == ({}, 0)
    asyncio.run(generator.close())
    asyncio.run(generator.close())
    with pytest.raises(InputError, match="closed"):
        asyncio.run(check_works_in_time(generator))


def test_a_generator_is_refused_while_its_event_loop_is_open(tokenizer: Tokenizer) -> None:
    async def make() -> AsyncGenerator:
        return AsyncGenerator(SlowModel(), ScriptedCache(), tokenizer)

    first_loop = asyncio.new_event_loop()
    generator = first_loop.run_until_complete(make())
    with pytest.raises(InputError, match="at work in another event loop"):
        asyncio.run(check_works_in_time(generator))
    first_loop.run_until_complete(check_works_in_time(generator))
    first_loop.run_until_complete(generator.close())
    first_loop.close()


def test_cancelling_the_iteration_task_is_reported(tokenizer: Tokenizer) -> None:
    async def main(generator: AsyncGenerator) -> None:
        generator.iteration_task.cancel()
        await asyncio.wait([generator.iteration_task])
        with pytest.raises(InputError, match="task of this generator was cancelled"):
            start_job(generator)

    run_scenario(tokenizer, main)
