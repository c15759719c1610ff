"""Who receives which results, in which order, and which thread runs the step: the contract of `iterate`,
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
    job,
    make_generator,
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
def machine(tokenizer: Tokenizer) -> Generator:
    return make_generator(tokenizer)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(tiny.make_chat_folder(tmp_path / "m"), max_seq_len=512) as made:
        yield made


def hooked(hook: Callable[[Any], object]) -> Settings:
    return Settings.greedy(post_sampling_hooks=[hook])


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A started thread, and the list that what the call returns or raises will be in."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, found


def stages(results: list[Any]) -> list[tuple[int, str]]:
    return [(result["serial"], result["stage"]) for result in results]


class Gate:
    """Holds the thread that runs a decode pass until `open` is set."""

    def __init__(self, machine: Generator) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.threads: set[int] = set()
        runner: HashingRunner = machine.model.runners[0]
        decode = runner.decode

        def wait(*arguments: Any) -> Any:
            self.threads.add(threading.get_ident())
            self.reached.set()
            assert self.open.wait(TIMEOUT)
            return decode(*arguments)

        runner.decode = wait  # type: ignore[method-assign]


# Order


def test_a_step_reports_job_by_job_in_the_order_they_started(machine: Generator) -> None:
    rounds = run(machine, job("abc", 2), job("bcd", 2))
    first, second = map(stages, rounds)
    assert first == [(serial, stage) for stage in ("started", "prefill", "streaming") for serial in (0, 1)]
    assert second == [(0, "streaming"), (1, "streaming")]


def test_results_of_steps_that_another_call_ran_come_first_and_in_order(machine: Generator) -> None:
    one, two = job("abc", 6), job("bcd", 6)
    machine.enqueue([one, two])
    expected = [stages(results) for results in run(make_generator(machine.tokenizer), job("abc"), job("bcd"))]
    assert machine.generate("xyz", 3, gen_settings=GREEDY, completion_only=True) == "abc"
    found = stages(machine.iterate())
    assert found == [pair for results in expected[:4] for pair in results]  # 3 steps, and the one of the call
    assert [stages(results) for results in run(machine)] == expected[4:]
    assert [one.full_completion, two.full_completion] == ["defghi", "efghij"]


def test_iterate_takes_a_step_even_if_results_are_left(machine: Generator) -> None:
    machine.enqueue(job("abc", 20))
    machine.generate("xyz", 3, gen_settings=GREEDY)
    assert sum(result["stage"] == "streaming" for result in machine.iterate()) == 4


def test_generate_returns_in_the_order_of_the_prompts(machine: Generator) -> None:
    """The shorter one ends first."""
    texts = machine.generate(["abc", "klm"], 5, gen_settings=GREEDY, stop_conditions=[ids("p")[0, 0].item()])
    assert texts == ["abcdefgh", "klmno"]


# Whose results


def test_iterate_never_returns_results_of_a_generate_call(machine: Generator) -> None:
    listed: list[Any] = []
    own = job("abc", 4)

    def enqueue_and_note(_: Any) -> None:
        if own.serial_number < 0:
            machine.enqueue(own)

    machine.generate("xyz", 8, gen_settings=hooked(enqueue_and_note))
    while machine.num_remaining_jobs():
        listed += machine.iterate()
    assert {result["job"] for result in listed} == {own}
    assert own.full_completion == "defg"


def test_a_failing_job_of_a_generate_call_leaves_other_jobs_alone(machine: Generator) -> None:
    def fail(_: Any) -> None:
        raise KeyError("trap")

    own = job("abc", 9)
    machine.enqueue(own)
    with pytest.raises(InputError, match="trap"):
        machine.generate(["klm", "xyz"], 9, gen_settings=[GREEDY, hooked(fail)])
    assert machine.num_remaining_jobs() == 1
    ends = [result for result in streaming_results(run(machine)) if result["eos"]]
    assert [result["job"] for result in ends] == [own]
    assert machine.pages.num_free_pages == machine.pages.num_pages


def test_a_stream_that_others_ran_to_its_end_takes_no_step(llm: LLM) -> None:
    expected = str(llm.generate("abc", settings=GREEDY, max_new_tokens=12))
    stream = llm.stream("abc", settings=GREEDY, max_new_tokens=12)
    first = next(stream)
    llm.generator.generate("xyz", 30, gen_settings=GREEDY)
    runner: Any = llm.generator._engine.runner
    runner.decode = None  # a further pass would fail
    assert first + "".join(stream) == expected


# What is counted


def test_remaining_jobs_wait_run_or_have_an_end_that_was_not_read(machine: Generator, llm: LLM) -> None:
    first, second = job("abc", 2), job("bcd", 3)
    assert machine.num_remaining_jobs() == 0
    machine.enqueue([first, second])
    assert (machine.num_remaining_jobs(), machine.num_pending_jobs, machine.num_active_jobs) == (2, 2, 0)
    machine.generate("xyz", 2, gen_settings=GREEDY)
    assert first.is_finished
    assert (machine.num_remaining_jobs(), machine.num_pending_jobs, machine.num_active_jobs) == (2, 0, 1)
    machine.iterate()
    assert second.is_finished
    assert machine.num_remaining_jobs() == 0
    assert machine.iterate() == []

    stream = llm.stream("abc", settings=GREEDY, max_new_tokens=12)
    next(stream)
    assert llm.generator.num_remaining_jobs() == 1, "running, and read by another call"
    llm.generator.generate("xyz", 30, gen_settings=GREEDY)
    assert llm.generator.num_remaining_jobs() == 0, "its end is the stream's to read"
    assert "".join(stream)


# Cancelling


def test_a_cancelled_job_gives_no_further_result(machine: Generator) -> None:
    gone, kept = job("abc", 9), job("bcd", 9)
    machine.enqueue([gone, kept])
    machine.generate("xyz", 4, gen_settings=GREEDY)
    machine.cancel(gone)
    machine.cancel(gone)
    found = [result for results in run(machine) for result in results]
    assert {result["job"] for result in found} == {kept}
    assert kept.full_completion == "efghijklm"


def test_results_of_a_finished_job_go_with_its_cancellation(machine: Generator) -> None:
    done = job("abc", 2)
    machine.enqueue(done)
    machine.generate("xyz", 4, gen_settings=GREEDY)
    assert done.is_finished
    machine.cancel(done)
    assert machine.num_remaining_jobs() == 0
    assert machine.iterate() == []


@pytest.mark.parametrize("clear", [False, True])
def test_a_job_cancelled_in_its_first_step_gives_no_result_at_all(machine: Generator, clear: bool) -> None:
    """Its start and its prompt were reported in that step, which is not over."""

    def drop(_: Any) -> None:
        if clear:
            machine.clear_queue()
        else:
            machine.cancel(gone)

    gone = job("abc", 9, settings=hooked(drop))
    machine.enqueue(gone)
    assert machine.iterate() == []
    assert machine.num_remaining_jobs() == 0
    assert machine.pages.num_free_pages == machine.pages.num_pages


def test_clearing_the_queue_drops_results_that_were_not_read(machine: Generator) -> None:
    machine.enqueue([job("abc", 2), job("bcd", 9)])
    machine.generate("xyz", 4, gen_settings=GREEDY)
    machine.clear_queue()
    assert machine.num_remaining_jobs() == 0
    assert machine.iterate() == []


def test_a_call_whose_queue_was_cleared_raises_and_the_next_one_works(machine: Generator) -> None:
    def clear(_: Any) -> None:
        machine.clear_queue()

    with pytest.raises(InputError, match="dropped before its end"):
        machine.generate(["abc", "klm"], 5, gen_settings=[GREEDY, hooked(clear)])
    assert machine.num_remaining_jobs() == 0
    assert machine.generate("abc", 3, gen_settings=GREEDY) == "abcdef"


# Nested calls


@pytest.mark.parametrize("call", ["iterate", "generate"])
def test_a_nested_call_fails_its_own_job_and_leaves_nothing(machine: Generator, call: str) -> None:
    def nested(_: Any) -> None:
        if call == "iterate":
            machine.iterate()
        else:
            machine.generate("xyz", 2, gen_settings=GREEDY)

    bad, good = job("abc", 5, settings=hooked(nested)), job("bcd", 5)
    ends = {result["job"]: result for result in streaming_results(run(machine, bad, good)) if result["eos"]}
    assert "asks the generator that waits for it" in str(ends[bad]["error"])
    assert good.full_completion == "efghi"
    assert set(ends) == {bad, good}
    assert machine.pages.num_free_pages == machine.pages.num_pages


def test_a_hook_may_ask_what_is_left(machine: Generator) -> None:
    found: list[int] = []
    run(machine, job("abc", 2, settings=hooked(lambda _: found.append(machine.num_remaining_jobs()))))
    assert found == [1, 1]


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
    beside = Job(llm.tokenizer.encode("xyz"), 9, gen_settings=GREEDY)
    llm.generator.enqueue(beside)
    llm.generator.iterate()
    stream.close()
    found = []
    while llm.generator.num_remaining_jobs():
        found += llm.generator.iterate()
    assert {result["job"] for result in found} == {beside}


# Threads


def test_one_thread_runs_the_step_and_the_other_waits_for_it(machine: Generator) -> None:
    gate = Gate(machine)
    first, first_text = in_thread(lambda: machine.generate("abc", 3, gen_settings=GREEDY))
    assert gate.reached.wait(TIMEOUT)
    second, second_text = in_thread(lambda: machine.generate("klm", 3, gen_settings=GREEDY))
    second.join(0.05)
    assert second.is_alive()
    assert len(gate.threads) == 1
    assert machine.num_active_jobs == 1, "the other's job waits for the end of the step"
    gate.open.set()
    for thread in (first, second):
        thread.join(TIMEOUT)
    assert (first_text, second_text) == (["abcdef"], ["klmnop"])


def test_an_llm_call_beside_an_iterate_loop_in_another_thread(llm: LLM) -> None:
    machine = llm.generator
    alone = [str(llm.generate(prompt, settings=GREEDY, max_new_tokens=20)) for prompt in ("abc", "xyz")]
    own = Job(
        llm.tokenizer.encode("abc", add_bos=llm.tokenizer.wants_bos),
        20,
        gen_settings=GREEDY,
        stop_conditions=llm.tokenizer.eos_token_ids,
    )
    machine.enqueue(own)

    def loop() -> str:
        text = ""
        while machine.num_remaining_jobs():
            for result in machine.iterate():
                assert result["job"] is own
                text += result.get("text", "")
        return text

    thread, text = in_thread(loop)
    beside = [str(llm.generate("xyz", settings=GREEDY, max_new_tokens=20)) for _ in range(5)]
    thread.join(TIMEOUT)
    assert text == [alone[0]]
    assert beside == [alone[1]] * 5


# asyncio


def test_generate_in_a_thread_beside_async_jobs(tokenizer: Tokenizer) -> None:
    async def read(one: AsyncJob) -> str:
        return "".join([str(result.get("text", "")) async for result in one])

    async def main() -> None:
        machine = AsyncGenerator(ScriptedModel(), ScriptedCache(), tokenizer)
        async with asyncio.timeout(TIMEOUT):
            for _ in range(5):
                texts = await asyncio.gather(
                    *[read(AsyncJob(machine, ids("abc"), 20, gen_settings=GREEDY)) for _ in range(3)],
                    asyncio.to_thread(machine.generator.generate, "klm", 20, gen_settings=GREEDY),
                )
                assert texts == ["defghijklmnopqrstuvw"] * 3 + ["klmnopqrstuvwxyzabcdefg"]
            assert not machine.jobs
            await machine.close()

    asyncio.run(main())


def test_an_async_job_that_nothing_reads_runs_to_its_end(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        machine = AsyncGenerator(ScriptedModel(), ScriptedCache(), tokenizer)
        unread = AsyncJob(machine, ids("abc"), 5, gen_settings=GREEDY)
        async with asyncio.timeout(TIMEOUT):
            async for result in unread:
                assert result["stage"] == "started"
                break
            while machine.jobs or not unread.job.is_finished:
                await asyncio.sleep(0.001)
            assert unread.job.full_completion == "defgh"
            assert machine.generator.num_remaining_jobs() == 0
            await machine.close()

    asyncio.run(main())


# What was lost before each job's results had a queue


def test_a_step_that_raises_keeps_the_results_of_earlier_steps(machine: Generator) -> None:
    own = job("abc", 9)
    machine.enqueue(own)
    machine.generate("xyz", 4, gen_settings=GREEDY)
    runner = machine.model.runners[0]
    decode = runner.decode

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    runner.decode = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        machine.iterate()
    runner.decode = decode
    text = "".join([result.get("text", "") for result in streaming_results(run(machine))])
    assert text == own.full_completion == "defghijkl"


def test_a_call_whose_job_was_dropped_raises_while_others_run(machine: Generator) -> None:
    """It ran steps for the others until they had ended."""

    def replace(_: Any) -> None:
        machine.clear_queue()
        machine.enqueue(other)

    other = job("bcd", 200)
    with pytest.raises(InputError, match="dropped before its end"):
        machine.generate("abc", 5, gen_settings=hooked(replace))
    assert other.new_tokens <= 1
    assert not other.is_finished


def test_a_cancelled_job_of_another_generator_keeps_its_results(machine: Generator) -> None:
    own, other = job("abc", 3), make_generator(machine.tokenizer)
    machine.enqueue(own)
    other.cancel(own)
    assert len(streaming_results(run(machine))) == 3


def test_a_job_enqueued_beside_async_jobs_is_read_by_iterate(tokenizer: Tokenizer) -> None:
    """Its results came to the async generator, which had no consumer for them."""

    async def main() -> None:
        machine = AsyncGenerator(ScriptedModel(), ScriptedCache(), tokenizer)
        own = job("abc", 4)
        async with asyncio.timeout(TIMEOUT):
            machine.generator.enqueue(own)
            async for _ in AsyncJob(machine, ids("klm"), 9, gen_settings=GREEDY):
                pass
            results = streaming_results([[dict(result) for result in machine.generator.iterate()]])
            assert "".join([result["text"] for result in results]) == "defg"
            await machine.close()

    asyncio.run(main())


def test_an_async_job_whose_queue_was_cleared_raises(tokenizer: Tokenizer) -> None:
    """Its consumer waited for ever."""

    async def main() -> None:
        machine = AsyncGenerator(ScriptedModel(), ScriptedCache(), tokenizer)

        async def read() -> None:
            async for result in AsyncJob(machine, ids("abc"), 2000, gen_settings=GREEDY):
                if result["stage"] == "streaming":
                    machine.generator.clear_queue()

        async with asyncio.timeout(TIMEOUT):
            with pytest.raises(InputError, match="dropped before its end"):
                await read()
            await machine.close()

    asyncio.run(main())
