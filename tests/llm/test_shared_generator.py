"""An LLM's generator, used beside the LLM: each caller receives the results of its own jobs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exlm import LLM, Job, Settings
from tests import tiny

GREEDY = Settings.greedy()
NEW = 12


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(tiny.make_chat_folder(tmp_path / "m"), max_seq_len=512) as made:
        yield made


@pytest.mark.parametrize("new", [3, 40])
def test_a_stream_keeps_its_results_during_generate(llm: LLM, new: int) -> None:
    """It lost what came meanwhile, in silence, or was told that it had been dropped."""
    expected = str(llm.generate("abc", settings=GREEDY, max_new_tokens=NEW))
    stream = llm.stream("abc", settings=GREEDY, max_new_tokens=NEW)
    first = next(stream)
    llm.generator.generate("xyz", new, gen_settings=GREEDY)
    assert first + "".join(stream) == expected


def test_a_stream_keeps_its_results_during_an_iterate_loop(llm: LLM) -> None:
    expected = str(llm.generate("abc", settings=GREEDY, max_new_tokens=NEW))
    stream = llm.stream("abc", settings=GREEDY, max_new_tokens=NEW)
    first, machine = next(stream), llm.generator
    job = Job(llm.tokenizer.encode("xyz"), 40, gen_settings=GREEDY)
    machine.enqueue(job)
    told = []
    while machine.num_remaining_jobs():
        told += machine.iterate()
    assert {result["job"] for result in told} == {job}
    assert first + "".join(stream) == expected


def test_a_job_keeps_its_results_beside_an_llm_call(llm: LLM) -> None:
    machine, ids = llm.generator, llm.tokenizer.encode("abc")
    machine.enqueue(Job(ids, NEW, gen_settings=GREEDY))
    llm.generate("xyz", settings=GREEDY, max_new_tokens=40)
    text = ""
    while machine.num_remaining_jobs():
        text += "".join([result.get("text", "") for result in machine.iterate()])
    assert text == machine.generate("abc", NEW, gen_settings=GREEDY, completion_only=True)


def test_garbage_collected_streams_block_no_other_call(llm: LLM) -> None:
    """By a thread in the midst of a round of the generator, while another has the LLM's turn."""
    expected = str(llm.generate("abc", settings=GREEDY, max_new_tokens=NEW))
    beside = llm.generator.generate("xyz", NEW, gen_settings=GREEDY)
    wrong: list[object] = []

    def ask() -> None:
        if str(llm.generate("abc", settings=GREEDY, max_new_tokens=NEW)) != expected:
            wrong.append("llm")

    def ask_beside() -> None:
        if llm.generator.generate("xyz", NEW, gen_settings=GREEDY) != beside:
            wrong.append("generator")

    def leave() -> None:
        stream = llm.stream("abc", settings=GREEDY, max_new_tokens=NEW)
        next(stream)
        ring: list[object] = [stream]
        ring.append(ring)

    def often(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                for _ in range(30):
                    work()
            except Exception as error:
                wrong.append(error)

        return run

    before = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    threads = [threading.Thread(target=often(work), daemon=True) for work in (ask, ask_beside, leave)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        gc.set_threshold(*before)
    assert not [thread for thread in threads if thread.is_alive()]
    assert not wrong
