"""One generator, several threads: each receives its own texts, in one batch."""

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
    machine = generator(components)
    return [machine.generate(prompt, NEW, gen_settings=GREEDY) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Threads take turns after every few lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def generator(components: tuple[Model, Tokenizer]) -> Generator:
    return Generator(components[0], Cache(components[0], max_seq_len=4096), components[1])


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each gives in a thread of its own; an error is what it gives."""
    found: dict[int, Any] = {}
    begin = threading.Barrier(len(calls))

    def run(place: int, call: Callable[[], Any]) -> None:
        begin.wait()
        try:
            found[place] = call()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[place] for place in range(len(calls))]


def test_texts_are_the_same_as_one_by_one(components: tuple[Model, Tokenizer], single_texts: list[str]) -> None:
    """Rounds ran into each other: IndexError from the sampler's tables, or worse."""
    machine = generator(components)

    def ask(prompt: str) -> Callable[[], str]:
        return lambda: machine.generate(prompt, NEW, gen_settings=GREEDY)  # type: ignore[no-any-return]

    for _ in range(3):
        assert at_once(*map(ask, PROMPTS)) == single_texts
    assert not machine.num_remaining_jobs()
    check_invariants(machine.pages, [])


def test_an_iterate_loop_beside_generate_calls(components: tuple[Model, Tokenizer], single_texts: list[str]) -> None:
    """A thread that iterates gets results of its own jobs only."""
    machine = generator(components)
    jobs = [Job(components[1].encode(prompt), NEW, gen_settings=GREEDY) for prompt in PROMPTS[:4]]
    machine.enqueue(jobs)

    def loop() -> list[str]:
        texts = dict.fromkeys(jobs, "")
        while not all(job.is_finished for job in jobs) or machine.num_remaining_jobs():
            for result in machine.iterate():
                texts[result["job"]] += result.get("text", "")
        return [prompt + text for prompt, text in zip(PROMPTS, texts.values(), strict=False)]

    def call() -> list[str]:
        return machine.generate(PROMPTS[4:], NEW, gen_settings=GREEDY)  # type: ignore[no-any-return]

    assert at_once(loop, call) == [single_texts[:4], single_texts[4:]]


def test_cancelling_from_another_thread(components: tuple[Model, Tokenizer], single_texts: list[str]) -> None:
    machine = generator(components)
    jobs = [Job(components[1].encode(prompt), 200, gen_settings=GREEDY) for prompt in PROMPTS]
    machine.enqueue(jobs)

    def cancel() -> None:
        for job in jobs:
            machine.cancel(job)

    def loop() -> None:
        while machine.num_remaining_jobs():
            machine.iterate()

    assert at_once(loop, cancel) == [None, None]
    assert machine.pages.num_free_pages == machine.pages.num_pages
    check_invariants(machine.pages, [])
    assert machine.generate(PROMPTS[0], NEW, gen_settings=GREEDY) == single_texts[0]


class Where(Filter):
    """Remembers in which thread a job first asks it something."""

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
    """A grammar is compiled anew for each job, which may take a third of a second."""

    async def main() -> Where:
        where = Where(None, components[1])
        machine = AsyncGenerator(components[0], Cache(components[0], max_seq_len=4096), components[1])
        job = AsyncJob(machine, components[1].encode("abc"), max_new_tokens=3, filters=[where])
        results = [result async for result in job]
        assert results[-1]["new_tokens"] == 3
        await machine.close()
        return where

    assert asyncio.run(main()).thread not in (None, threading.main_thread())
