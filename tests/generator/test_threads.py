"""Several threads use one generator in one batch; each receives its own texts."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from exlm import AsyncGenerator, AsyncJob, Cache, Config, Filter, Generator, Job, Model, Settings, Tokenizer
from tests import tiny
from tests.generator.page_table_oracle import check_invariants

PROMPTS = [f"prompt number {i}" for i in range(8)]
GREEDY = Settings.greedy()
NEW = 20


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    config = Config(tiny.make_chat_folder(tmp_path_factory.mktemp("threads") / "m"))
    model = Model(config)
    model.load()
    return model, Tokenizer(config)


@pytest.fixture(scope="module")
def single_texts(components: tuple[Model, Tokenizer]) -> list[str]:
    generator = make_generator(components)
    return [generator.generate(prompt, NEW, gen_settings=GREEDY) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def switch_threads_often() -> Iterator[None]:
    """Let the interpreter switch threads after every few lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def make_generator(components: tuple[Model, Tokenizer]) -> Generator:
    return Generator(components[0], Cache(components[0], max_seq_len=4096), components[1])


def run_concurrently(*functions: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread of its own; return their results or errors in order."""
    results: dict[int, Any] = {}
    barrier = threading.Barrier(len(functions))

    def run(index: int, function: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            results[index] = function()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(functions))]


def test_texts_are_the_same_as_one_by_one(components: tuple[Model, Tokenizer], single_texts: list[str]) -> None:
    """Regression: concurrent steps raised IndexError from the sampler's tables, or worse."""
    generator = make_generator(components)

    def make_call(prompt: str) -> Callable[[], str]:
        return lambda: generator.generate(prompt, NEW, gen_settings=GREEDY)  # type: ignore[no-any-return]

    for _ in range(3):
        assert run_concurrently(*map(make_call, PROMPTS)) == single_texts
    assert not generator.num_remaining_jobs()
    check_invariants(generator.pages, [])


def test_an_iterate_loop_beside_generate_calls(components: tuple[Model, Tokenizer], single_texts: list[str]) -> None:
    """A thread that iterates receives results of its own jobs only."""
    generator = make_generator(components)
    jobs = [Job(components[1].encode(prompt), NEW, gen_settings=GREEDY) for prompt in PROMPTS[:4]]
    generator.enqueue(jobs)

    def loop() -> list[str]:
        texts = dict.fromkeys(jobs, "")
        while not all(job.is_finished for job in jobs) or generator.num_remaining_jobs():
            for result in generator.iterate():
                texts[result["job"]] += result.get("text", "")
        return [prompt + text for prompt, text in zip(PROMPTS, texts.values(), strict=False)]

    def generate_texts() -> list[str]:
        return generator.generate(PROMPTS[4:], NEW, gen_settings=GREEDY)  # type: ignore[no-any-return]

    assert run_concurrently(loop, generate_texts) == [single_texts[:4], single_texts[4:]]


def test_cancelling_from_another_thread(components: tuple[Model, Tokenizer], single_texts: list[str]) -> None:
    generator = make_generator(components)
    jobs = [Job(components[1].encode(prompt), 200, gen_settings=GREEDY) for prompt in PROMPTS]
    generator.enqueue(jobs)

    def cancel() -> None:
        for job in jobs:
            generator.cancel(job)

    def loop() -> None:
        while generator.num_remaining_jobs():
            generator.iterate()

    assert run_concurrently(loop, cancel) == [None, None]
    assert generator.pages.num_free_pages == generator.pages.num_pages
    check_invariants(generator.pages, [])
    assert generator.generate(PROMPTS[0], NEW, gen_settings=GREEDY) == single_texts[0]


class Where(Filter):
    """A filter that records the thread that uses it first."""

    thread: threading.Thread | None = None

    def can_mask_logits(self) -> bool:
        self.thread = self.thread or threading.current_thread()
        return False

    def begin(self, prefix_str: Any) -> None:
        return

    def feed(self, token: Any) -> None:
        return

    def next(self) -> Any:
        return {5, 6, 7}, set()


def test_a_job_with_filters_is_prepared_beside_the_event_loop(components: tuple[Model, Tokenizer]) -> None:
    """A grammar is compiled for each job, which may take a third of a second."""

    async def main() -> Where:
        where = Where(None, components[1])
        generator = AsyncGenerator(components[0], Cache(components[0], max_seq_len=4096), components[1])
        job = AsyncJob(generator, components[1].encode("abc"), max_new_tokens=3, filters=[where])
        results = [result async for result in job]
        assert results[-1]["new_tokens"] == 3
        await generator.close()
        return where

    assert asyncio.run(main()).thread not in (None, threading.main_thread())
