"""Several who write to one cache: each text is right, or its maker is told that the cache was taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from exlm import Cache, Generator, InputError, Job, Model, Settings, Tokenizer
from exlm.legacy import BaseGenerator, StreamingGenerator

GREEDY = Settings.greedy()
PROMPT, OTHER = "The history of the city of", "import os\n\ndef main(" * 60
NEW = 12
OVERWRITTEN_MESSAGE = "Another caller has written to the cache"

OtherWriter = Callable[[Model, Cache, Tokenizer], object]

OTHER_WRITERS: dict[str, OtherWriter] = {
    "forward": lambda model, cache, tokenizer: model.forward(tokenizer.encode(OTHER), cache),
    "base": lambda model, cache, tokenizer: BaseGenerator(model, cache, tokenizer).generate_simple(
        OTHER, GREEDY, 9
    ),
    "streaming": lambda model, cache, tokenizer: StreamingGenerator(model, cache, tokenizer).begin_stream_ex(
        tokenizer.encode(OTHER), GREEDY
    ),
    "dynamic": lambda model, cache, tokenizer: Generator(model, cache, tokenizer).generate(
        OTHER, 9, gen_settings=GREEDY
    ),
}


@pytest.fixture(params=OTHER_WRITERS.values(), ids=OTHER_WRITERS)
def intrude(request: pytest.FixtureRequest) -> OtherWriter:
    intruder: OtherWriter = request.param
    return intruder


def make_job(tokenizer: Tokenizer) -> Job:
    return Job(tokenizer.encode(PROMPT), NEW, gen_settings=GREEDY)


def expected(model: Model, tokenizer: Tokenizer) -> str:
    alone = Generator(model, Cache(model, max_seq_len=512), tokenizer)
    said: str = alone.generate(PROMPT, NEW, gen_settings=GREEDY, completion_only=True)
    return said


def finish(machine: Generator) -> dict[Job, object]:
    """The end of every job: its text, or what went wrong."""
    ends: dict[Job, object] = {}
    while machine.num_remaining_jobs():
        for result in machine.iterate():
            if result["eos"]:
                ends[result["job"]] = result.get("error") or result["full_completion"]
    return ends


def test_running_jobs_end_and_waiting_ones_go_on(
    model: Model, tokenizer: Tokenizer, intrude: OtherWriter
) -> None:
    wanted = expected(model, tokenizer)
    cache = Cache(model, max_seq_len=1024)
    machine = Generator(model, cache, tokenizer, max_batch_size=1)
    running, waiting = make_job(tokenizer), make_job(tokenizer)
    machine.enqueue([running, waiting])
    for _ in range(4):
        machine.iterate()
    intrude(model, cache, tokenizer)
    ends = finish(machine)
    assert isinstance(ends[running], InputError)
    assert str(ends[running]).startswith(OVERWRITTEN_MESSAGE)
    assert ends[waiting] == wanted
    assert machine.pages.num_free_pages == machine.pages.num_pages
    assert machine.generate(PROMPT, NEW, gen_settings=GREEDY, completion_only=True) == wanted


def test_what_was_cached_when_a_job_was_queued_may_be_gone_when_it_starts(
    model: Model, tokenizer: Tokenizer, intrude: OtherWriter
) -> None:
    wanted = expected(model, tokenizer)
    cache = Cache(model, max_seq_len=1024)
    machine = Generator(model, cache, tokenizer)
    machine.generate(PROMPT, NEW, gen_settings=GREEDY)
    job = make_job(tokenizer)
    machine.enqueue(job)
    intrude(model, cache, tokenizer)
    assert finish(machine) == {job: wanted}
    assert job.cached_tokens == 0


def test_a_stream_raises_and_the_next_one_is_right(
    model: Model, tokenizer: Tokenizer, intrude: OtherWriter
) -> None:
    wanted = expected(model, tokenizer)
    cache = Cache(model, max_seq_len=1024)
    machine = StreamingGenerator(model, cache, tokenizer)
    machine.set_stop_conditions([])
    prompt = tokenizer.encode(PROMPT)
    machine.begin_stream_ex(prompt, GREEDY)
    machine.stream_ex()
    intrude(model, cache, tokenizer)
    length = cache.current_seq_len
    with pytest.raises(InputError, match=OVERWRITTEN_MESSAGE):
        machine.stream_ex()
    assert cache.current_seq_len == length  # it is the other's now
    machine.begin_stream_ex(prompt, GREEDY)
    assert "".join(machine.stream_ex()["chunk"] for _ in range(NEW)) == wanted


def test_callers_that_do_not_overlap_both_succeed(
    model: Model, tokenizer: Tokenizer, intrude: OtherWriter
) -> None:
    wanted = expected(model, tokenizer)
    cache = Cache(model, max_seq_len=1024)
    machine = Generator(model, cache, tokenizer)
    for _ in range(3):
        assert machine.generate(PROMPT, NEW, gen_settings=GREEDY, completion_only=True) == wanted
        intrude(model, cache, tokenizer)
        cache.current_seq_len = 0
