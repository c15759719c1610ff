"""Which caller receives which results, in which order, and which thread runs the step, for `iterate`,
`generate`, `LLM` and `AsyncGenerator` where several of them use one generator."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exlm import LLM, AsyncGenerator, AsyncJob, Generator, InputError, Job, Settings, Tokenizer
from tests import tiny
from tests.generator.scripted import (
    HashingRunner,
    ScriptedCache,
    ScriptedModel,
    ids,
    make_generator,
    make_job,
    make_tokenizer,
    run,
    streaming_results,
)

GREEDY = Settings.greedy()
TIMEOUT = 30.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def generator(tokenizer: Tokenizer) -> Generator:
    return make_generator(tokenizer)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(tiny.make_chat_folder(tmp_path / "m"), max_seq_len=512) as llm:
        yield llm


def settings_with_hook(hook: Callable[[Any], object]) -> Settings:
    return Settings.greedy(post_sampling_hooks=[hook])


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A started thread, and the list that will contain the result or error of the function."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, results


def stages(results: list[Any]) -> list[tuple[int, str]]:
    return [(result["serial"], result["stage"]) for result in results]


class Gate:
    """A runner whose decode pass blocks until `open` is set."""

    def __init__(self, generator: Generator) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.threads: set[int] = set()
        runner: HashingRunner = generator.model.runners[0]
        decode = runner.decode

        def wait(*arguments: Any) -> Any:
            self.threads.add(threading.get_ident())
            self.reached.set()
            assert self.open.wait(TIMEOUT)
            return decode(*arguments)

        runner.decode = wait  # type: ignore[method-assign]


# Order


def test_a_step_reports_job_by_job_in_the_order_they_started(generator: Generator) -> None:
    rounds = run(generator, make_job("abc", 2), make_job("bcd", 2))
    first, second = map(stages, rounds)
    assert first == [(serial, stage) for stage in ("started", "prefill", "streaming") for serial in (0, 1)]
    assert second == [(0, "streaming"), (1, "streaming")]


def test_results_of_steps_that_another_call_ran_come_first_and_in_order(generator: Generator) -> None:
    first, second = make_job("abc", 6), make_job("bcd", 6)
    generator.enqueue([first, second])
    rounds = run(make_generator(generator.tokenizer), make_job("abc"), make_job("bcd"))
    expected = [stages(results) for results in rounds]
    assert generator.generate("xyz", 3, gen_settings=GREEDY, completion_only=True) == "abc"
    received = stages(generator.iterate())
    assert received == [pair for results in expected[:4] for pair in results]  # 3 steps, and the one of the call
    assert [stages(results) for results in run(generator)] == expected[4:]
    assert [first.full_completion, second.full_completion] == ["defghi", "efghij"]


def test_iterate_takes_a_step_even_if_results_are_left(generator: Generator) -> None:
    generator.enqueue(make_job("abc", 20))
    generator.generate("xyz", 3, gen_settings=GREEDY)
    assert sum(result["stage"] == "streaming" for result in generator.iterate()) == 4


def test_generate_returns_in_the_order_of_the_prompts(generator: Generator) -> None:
    """The shorter one ends first."""
    texts = generator.generate(["abc", "klm"], 5, gen_settings=GREEDY, stop_conditions=[ids("p")[0, 0].item()])
    assert texts == ["abcdefgh", "klmno"]


# Whose results


def test_iterate_never_returns_results_of_a_generate_call(generator: Generator) -> None:
    listed: list[Any] = []
    own = make_job("abc", 4)

    def enqueue_and_note(_: Any) -> None:
        if own.serial_number < 0:
            generator.enqueue(own)

    generator.generate("xyz", 8, gen_settings=settings_with_hook(enqueue_and_note))
    while generator.num_remaining_jobs():
        listed += generator.iterate()
    assert {result["job"] for result in listed} == {own}
    assert own.full_completion == "defg"


def test_a_failing_job_of_a_generate_call_leaves_other_jobs_alone(generator: Generator) -> None:
    def fail(_: Any) -> None:
        raise KeyError("trap")

    failing = make_job("abc", 9)
    generator.enqueue(failing)
    with pytest.raises(InputError, match="trap"):
        generator.generate(["klm", "xyz"], 9, gen_settings=[GREEDY, settings_with_hook(fail)])
    assert generator.num_remaining_jobs() == 1
    last = [result for result in streaming_results(run(generator)) if result["eos"]]
    assert [result["job"] for result in last] == [failing]
    assert generator.pages.num_free_pages == generator.pages.num_pages


def test_a_stream_that_others_ran_to_its_end_takes_no_step(llm: LLM) -> None:
    expected = str(llm.generate("abc", settings=GREEDY, max_new_tokens=12))
    stream = llm.stream("abc", settings=GREEDY, max_new_tokens=12)
    first = next(stream)
    llm.generator.generate("xyz", 30, gen_settings=GREEDY)
    runner: Any = llm.generator._engine.runner
    runner.decode = None  # a further pass would fail
    assert first + "".join(stream) == expected


# What is counted


def test_remaining_jobs_wait_run_or_have_an_end_that_was_not_read(generator: Generator, llm: LLM) -> None:
    first, second = make_job("abc", 2), make_job("bcd", 3)
    assert generator.num_remaining_jobs() == 0
    generator.enqueue([first, second])
    assert (generator.num_remaining_jobs(), generator.num_pending_jobs, generator.num_active_jobs) == (2, 2, 0)
    generator.generate("xyz", 2, gen_settings=GREEDY)
    assert first.is_finished
    assert (generator.num_remaining_jobs(), generator.num_pending_jobs, generator.num_active_jobs) == (2, 0, 1)
    generator.iterate()
    assert second.is_finished
    assert generator.num_remaining_jobs() == 0
    assert generator.iterate() == []

    stream = llm.stream("abc", settings=GREEDY, max_new_tokens=12)
    next(stream)
    assert llm.generator.num_remaining_jobs() == 1, "running, and read by another call"
    llm.generator.generate("xyz", 30, gen_settings=GREEDY)
    assert llm.generator.num_remaining_jobs() == 0, "its end is the stream's to read"
    assert "".join(stream)


# Cancelling


def test_a_cancelled_job_gives_no_further_result(generator: Generator) -> None:
    cancelled, running = make_job("abc", 9), make_job("bcd", 9)
    generator.enqueue([cancelled, running])
    generator.generate("xyz", 4, gen_settings=GREEDY)
    generator.cancel(cancelled)
    generator.cancel(cancelled)
    found = [result for results in run(generator) for result in results]
    assert {result["job"] for result in found} == {running}
    assert running.full_completion == "efghijklm"


def test_results_of_a_finished_job_go_with_its_cancellation(generator: Generator) -> None:
    finished = make_job("abc", 2)
    generator.enqueue(finished)
    generator.generate("xyz", 4, gen_settings=GREEDY)
    assert finished.is_finished
    generator.cancel(finished)
    assert generator.num_remaining_jobs() == 0
    assert generator.iterate() == []


@pytest.mark.parametrize("clear", [False, True])
def test_a_job_cancelled_in_its_first_step_gives_no_result_at_all(generator: Generator, clear: bool) -> None:
    """Its start and its prompt were reported in that step, which is not over."""

    def drop(_: Any) -> None:
        if clear:
            generator.clear_queue()
        else:
            generator.cancel(cancelled)

    cancelled = make_job("abc", 9, settings=settings_with_hook(drop))
    generator.enqueue(cancelled)
    assert generator.iterate() == []
    assert generator.num_remaining_jobs() == 0
    assert generator.pages.num_free_pages == generator.pages.num_pages


def test_clearing_the_queue_drops_results_that_were_not_read(generator: Generator) -> None:
    generator.enqueue([make_job("abc", 2), make_job("bcd", 9)])
    generator.generate("xyz", 4, gen_settings=GREEDY)
    generator.clear_queue()
    assert generator.num_remaining_jobs() == 0
    assert generator.iterate() == []


def test_a_call_whose_queue_was_cleared_raises_and_the_next_one_works(generator: Generator) -> None:
    def clear(_: Any) -> None:
        generator.clear_queue()

    with pytest.raises(InputError, match="dropped before its end"):
        generator.generate(["abc", "klm"], 5, gen_settings=[GREEDY, settings_with_hook(clear)])
    assert generator.num_remaining_jobs() == 0
    assert generator.generate("abc", 3, gen_settings=GREEDY) == "abcdef"


# Nested calls


@pytest.mark.parametrize("call", ["iterate", "generate"])
def test_a_nested_call_fails_its_own_job_and_leaves_nothing(generator: Generator, call: str) -> None:
    def nested(_: Any) -> None:
        if call == "iterate":
            generator.iterate()
        else:
            generator.generate("xyz", 2, gen_settings=GREEDY)

    bad, good = make_job("abc", 5, settings=settings_with_hook(nested)), make_job("bcd", 5)
    last = {result["job"]: result for result in streaming_results(run(generator, bad, good)) if result["eos"]}
    assert "called the generator during its step" in str(last[bad]["error"])
    assert good.full_completion == "efghi"
    assert set(last) == {bad, good}
    assert generator.pages.num_free_pages == generator.pages.num_pages


def test_a_hook_may_ask_what_is_left(generator: Generator) -> None:
    remaining: list[int] = []
    settings = settings_with_hook(lambda _: remaining.append(generator.num_remaining_jobs()))
    run(generator, make_job("abc", 2, settings=settings))
    assert remaining == [1, 1]


# Abandoned streams


def test_an_abandoned_stream_is_dropped_before_the_next_call_looks(llm: LLM) -> None:
    stream = llm.stream("abc", settings=GREEDY, max_new_tokens=100)
    next(stream)
    assert llm.generator.num_remaining_jobs() == 1
    del stream
    gc.collect()
    assert llm.generator.num_remaining_jobs() == 0
    assert llm.generator.pages.num_free_pages == llm.generator.pages.num_pages


def test_an_abandoned_stream_leaves_no_result_to_others(llm: LLM) -> None:
    stream = llm.stream("abc", settings=GREEDY, max_new_tokens=100)
    next(stream)
    other_job = Job(llm.tokenizer.encode("xyz"), 9, gen_settings=GREEDY)
    llm.generator.enqueue(other_job)
    llm.generator.iterate()
    stream.close()
    received = []
    while llm.generator.num_remaining_jobs():
        received += llm.generator.iterate()
    assert {result["job"] for result in received} == {other_job}


# Threads


def test_one_thread_runs_the_step_and_the_other_waits_for_it(generator: Generator) -> None:
    gate = Gate(generator)
    first, first_text = in_thread(lambda: generator.generate("abc", 3, gen_settings=GREEDY))
    assert gate.reached.wait(TIMEOUT)
    second, second_text = in_thread(lambda: generator.generate("klm", 3, gen_settings=GREEDY))
    second.join(0.05)
    assert second.is_alive()
    assert len(gate.threads) == 1
    assert generator.num_active_jobs == 1, "the other's job waits for the end of the step"
    gate.open.set()
    for thread in (first, second):
        thread.join(TIMEOUT)
    assert (first_text, second_text) == (["abcdef"], ["klmnop"])


def test_an_llm_call_beside_an_iterate_loop_in_another_thread(llm: LLM) -> None:
    generator = llm.generator
    expected = [str(llm.generate(prompt, settings=GREEDY, max_new_tokens=20)) for prompt in ("abc", "xyz")]
    long_job = Job(
        llm.tokenizer.encode("abc", add_bos=llm.tokenizer.wants_bos),
        20,
        gen_settings=GREEDY,
        stop_conditions=llm.tokenizer.eos_token_ids,
    )
    generator.enqueue(long_job)

    def loop() -> str:
        text = ""
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                assert result["job"] is long_job
                text += result.get("text", "")
        return text

    thread, text = in_thread(loop)
    concurrent = [str(llm.generate("xyz", settings=GREEDY, max_new_tokens=20)) for _ in range(5)]
    thread.join(TIMEOUT)
    assert text == [expected[0]]
    assert concurrent == [expected[1]] * 5


# asyncio


def test_generate_in_a_thread_beside_async_jobs(tokenizer: Tokenizer) -> None:
    async def read(job: AsyncJob) -> str:
        return "".join([str(result.get("text", "")) async for result in job])

    async def main() -> None:
        generator = AsyncGenerator(ScriptedModel(), ScriptedCache(), tokenizer)
        async with asyncio.timeout(TIMEOUT):
            for _ in range(5):
                texts = await asyncio.gather(
                    *[read(AsyncJob(generator, ids("abc"), 20, gen_settings=GREEDY)) for _ in range(3)],
                    asyncio.to_thread(generator.generator.generate, "klm", 20, gen_settings=GREEDY),
                )
                assert texts == ["defghijklmnopqrstuvw"] * 3 + ["klmnopqrstuvwxyzabcdefg"]
            assert not generator.jobs
            await generator.close()

    asyncio.run(main())


def test_an_async_job_that_nothing_reads_runs_to_its_end(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        generator = AsyncGenerator(ScriptedModel(), ScriptedCache(), tokenizer)
        unread = AsyncJob(generator, ids("abc"), 5, gen_settings=GREEDY)
        async with asyncio.timeout(TIMEOUT):
            async for result in unread:
                assert result["stage"] == "started"
                break
            while generator.jobs or not unread.job.is_finished:
                await asyncio.sleep(0.001)
            assert unread.job.full_completion == "defgh"
            assert generator.generator.num_remaining_jobs() == 0
            await generator.close()

    asyncio.run(main())


# What was lost before each job's results had a queue


def test_a_step_that_raises_keeps_the_results_of_earlier_steps(generator: Generator) -> None:
    own = make_job("abc", 9)
    generator.enqueue(own)
    generator.generate("xyz", 4, gen_settings=GREEDY)
    runner = generator.model.runners[0]
    decode = runner.decode

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    runner.decode = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        generator.iterate()
    runner.decode = decode
    text = "".join([result.get("text", "") for result in streaming_results(run(generator))])
    assert text == own.full_completion == "defghijkl"


def test_a_call_whose_job_was_dropped_raises_while_others_run(generator: Generator) -> None:
    """Regression: the call ran steps for the other jobs until they had ended."""

    def replace(_: Any) -> None:
        generator.clear_queue()
        generator.enqueue(other)

    other = make_job("bcd", 200)
    with pytest.raises(InputError, match="dropped before its end"):
        generator.generate("abc", 5, gen_settings=settings_with_hook(replace))
    assert other.new_tokens <= 1
    assert not other.is_finished


def test_a_cancelled_job_of_another_generator_keeps_its_results(generator: Generator) -> None:
    own, other = make_job("abc", 3), make_generator(generator.tokenizer)
    generator.enqueue(own)
    other.cancel(own)
    assert len(streaming_results(run(generator))) == 3


def test_a_job_enqueued_beside_async_jobs_is_read_by_iterate(tokenizer: Tokenizer) -> None:
    """Regression: the async generator received its results and had no consumer for them."""

    async def main() -> None:
        generator = AsyncGenerator(ScriptedModel(), ScriptedCache(), tokenizer)
        own = make_job("abc", 4)
        async with asyncio.timeout(TIMEOUT):
            generator.generator.enqueue(own)
            async for _ in AsyncJob(generator, ids("klm"), 9, gen_settings=GREEDY):
                pass
            results = streaming_results([[dict(result) for result in generator.generator.iterate()]])
            assert "".join([result["text"] for result in results]) == "defg"
            await generator.close()

    asyncio.run(main())


def test_an_async_job_whose_queue_was_cleared_raises(tokenizer: Tokenizer) -> None:
    """Regression: its consumer waited for ever."""

    async def main() -> None:
        generator = AsyncGenerator(ScriptedModel(), ScriptedCache(), tokenizer)

        async def read() -> None:
            async for result in AsyncJob(generator, ids("abc"), 2000, gen_settings=GREEDY):
                if result["stage"] == "streaming":
                    generator.generator.clear_queue()

        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(InputError, match="dropped before its end"):
                await read()
            await generator.close()

    asyncio.run(main())
