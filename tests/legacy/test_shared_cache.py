"""Several generators on one cache: each text is correct, or its generator raises an error."""

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
    "base": lambda model, cache, tokenizer: BaseGenerator(model, cache, tokenizer).generate_simple(OTHER, GREEDY, 9),
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


def finish(generator: Generator) -> dict[Job, object]:
    """The end of every job: its text, or its error."""
    ends: dict[Job, object] = {}
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if result["eos"]:
                ends[result["job"]] = result.get("error") or result["full_completion"]
    return ends


def test_running_jobs_fail_and_queued_ones_run(model: Model, tokenizer: Tokenizer, intrude: OtherWriter) -> None:
    wanted = expected(model, tokenizer)
    cache = Cache(model, max_seq_len=1024)
    generator = Generator(model, cache, tokenizer, max_batch_size=1)
    running, waiting = make_job(tokenizer), make_job(tokenizer)
    generator.enqueue([running, waiting])
    for _ in range(4):
        generator.iterate()
    intrude(model, cache, tokenizer)
    ends = finish(generator)
    assert isinstance(ends[running], InputError)
    assert str(ends[running]).startswith(OVERWRITTEN_MESSAGE)
    assert ends[waiting] == wanted
    assert generator.pages.num_free_pages == generator.pages.num_pages
    assert generator.generate(PROMPT, NEW, gen_settings=GREEDY, completion_only=True) == wanted


def test_a_cached_prefix_may_be_lost_between_enqueue_and_start(
    model: Model, tokenizer: Tokenizer, intrude: OtherWriter
) -> None:
    wanted = expected(model, tokenizer)
    cache = Cache(model, max_seq_len=1024)
    generator = Generator(model, cache, tokenizer)
    generator.generate(PROMPT, NEW, gen_settings=GREEDY)
    job = make_job(tokenizer)
    generator.enqueue(job)
    intrude(model, cache, tokenizer)
    assert finish(generator) == {job: wanted}
    assert job.cached_tokens == 0


def test_an_overwritten_stream_raises_and_the_next_one_is_correct(
    model: Model, tokenizer: Tokenizer, intrude: OtherWriter
) -> None:
    wanted = expected(model, tokenizer)
    cache = Cache(model, max_seq_len=1024)
    generator = StreamingGenerator(model, cache, tokenizer)
    generator.set_stop_conditions([])
    prompt = tokenizer.encode(PROMPT)
    generator.begin_stream_ex(prompt, GREEDY)
    generator.stream_ex()
    intrude(model, cache, tokenizer)
    length = cache.current_seq_len
    with pytest.raises(InputError, match=OVERWRITTEN_MESSAGE):
        generator.stream_ex()
    assert cache.current_seq_len == length  # it is the other's now
    generator.begin_stream_ex(prompt, GREEDY)
    assert "".join(generator.stream_ex()["chunk"] for _ in range(NEW)) == wanted


def test_callers_that_do_not_overlap_both_succeed(model: Model, tokenizer: Tokenizer, intrude: OtherWriter) -> None:
    wanted = expected(model, tokenizer)
    cache = Cache(model, max_seq_len=1024)
    generator = Generator(model, cache, tokenizer)
    for _ in range(3):
        assert generator.generate(PROMPT, NEW, gen_settings=GREEDY, completion_only=True) == wanted
        intrude(model, cache, tokenizer)
        cache.current_seq_len = 0
