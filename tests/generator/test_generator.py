"""The public Generator on a real trained model gives the same text by every route."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import (
    AsyncGenerator,
    AsyncJob,
    Cache,
    CacheFP8,
    CacheQ4,
    CacheQ8,
    Config,
    Generator,
    InputError,
    Job,
    Model,
    NotLoaded,
    Settings,
    Tokenizer,
)
from exlm.legacy import StreamingGenerator

PROMPTS = ["The history of the city", "import os\n\ndef main(", "In 1995, the", "The first season of the ser"]


@pytest.fixture(scope="module")
def loaded(fixtures_dir: Path) -> tuple[Model, Tokenizer]:
    config = Config(fixtures_dir / "tiny-lm")
    model = Model(config)
    model.load()
    return model, Tokenizer(config)


def make_generator(loaded: tuple[Model, Tokenizer], tokens: int = 4096, **options: Any) -> Generator:
    model, tokenizer = loaded
    return Generator(model, Cache(model, max_seq_len=tokens), tokenizer, **options)


def greedy(generator: Generator, prompt: Any, max_new_tokens: int = 30, **options: Any) -> Any:
    return generator.generate(prompt, max_new_tokens, gen_settings=Settings.greedy(), **options)


@pytest.fixture(scope="module")
def single_texts(loaded: tuple[Model, Tokenizer]) -> list[str]:
    """The greedy text of each prompt, computed alone and token by token with plain forward passes."""
    model, tokenizer = loaded
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        for _ in range(30):
            ids = torch.cat((ids, model.forward(ids, last_id_only=True)[:, -1].argmax(-1, keepdim=True)), 1)
        texts.append(tokenizer.decode(ids[0]))
    return texts


def test_greedy_text_is_the_same_alone_and_in_batches(loaded: Any, single_texts: list[str]) -> None:
    generator = make_generator(loaded)
    assert [greedy(generator, prompt) for prompt in PROMPTS] == single_texts
    for size in (2, 7, 32):
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(size)]
        cold = make_generator(loaded, tokens=16384)
        assert greedy(cold, prompts) == [single_texts[i % len(PROMPTS)] for i in range(size)]
    assert greedy(generator, PROMPTS) == single_texts  # with a warm cache


def test_speculation_changes_only_the_number_of_passes(loaded: Any, single_texts: list[str]) -> None:
    model, _ = loaded
    ngram = make_generator(loaded, use_ngram_draft=True)
    texts, last = greedy(ngram, PROMPTS, return_last_results=True)
    assert texts == single_texts
    assert all("accepted_draft_tokens" in result for result in last)
    drafted = make_generator(loaded, draft_model=model, draft_cache=Cache(model, max_seq_len=4096))
    texts, last = greedy(drafted, PROMPTS, return_last_results=True)
    assert texts == single_texts
    assert [result["new_tokens"] for result in last] == [30] * 4
    assert sum(result["accepted_draft_tokens"] for result in last) >= 4 * 20
    assert sum(result["rejected_draft_tokens"] for result in last) == 0


@pytest.mark.parametrize("kind", [CacheQ8, CacheQ4, CacheFP8])
def test_quantised_caches_alone_and_in_a_batch(loaded: Any, kind: Any) -> None:
    model, tokenizer = loaded
    texts = []
    for batch in (False, True):
        generator = Generator(model, kind(model, max_seq_len=4096), tokenizer)
        texts.append(greedy(generator, PROMPTS) if batch else [greedy(generator, p) for p in PROMPTS])
    assert texts[0] == texts[1]


def test_long_prompts_in_chunks_and_from_the_cache(loaded: Any) -> None:
    long = " ".join(PROMPTS) * 12
    small, large = make_generator(loaded, max_chunk_size=256), make_generator(loaded, max_chunk_size=2048)
    text, first = greedy(small, long, return_last_results=True)
    assert greedy(large, long) == text
    cached_text, second = greedy(small, long, return_last_results=True)
    assert cached_text == text
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == second["prompt_tokens"] - 1


def test_seeds(loaded: Any) -> None:
    generator = make_generator(loaded)
    settings = Settings(temperature=1.2, top_k=0, top_p=0.95)
    texts = generator.generate(PROMPTS, 20, seed=7, gen_settings=settings)
    assert generator.generate(PROMPTS, 20, seed=7, gen_settings=settings) == texts
    assert generator.generate(PROMPTS[2], 20, seed=9, gen_settings=settings) == texts[2]
    assert generator.generate(PROMPTS, 20, seed=8, gen_settings=settings) != texts


def test_documented_arguments(loaded: Any) -> None:
    generator = make_generator(loaded)
    text = greedy(generator, PROMPTS[0], 10)
    assert greedy(generator, PROMPTS[0], 10, completion_only=True) == text[len(PROMPTS[0]) :]
    assert greedy(generator, [], 5) == []
    stopped = greedy(generator, PROMPTS[0], 30, stop_conditions=["\n"], completion_only=True)
    assert "\n" not in stopped
    banned = greedy(generator, PROMPTS[0], 30, banned_strings=["soviet"], completion_only=True)
    assert "soviet" not in banned.lower()
    healed = greedy(generator, "The history of the c", 10, token_healing=True)
    assert healed.startswith("The history of the c")
    with pytest.raises(InputError, match="gen_settings"):
        generator.generate(PROMPTS, 5, gen_settings=[Settings.greedy()])
    with pytest.raises(InputError, match="Unexpected type in prompt"):
        greedy(generator, [1, 2])
    with pytest.warns(UserWarning, match="no argument 'unknown_argument'"):
        assert greedy(generator, PROMPTS[0], 10, unknown_argument=1) == text
    assert generator.num_remaining_jobs() == 0


def test_stop_iterators_apply_to_every_prompt(loaded: Any) -> None:
    generator, prompts = make_generator(loaded), [PROMPTS[0]] * 2
    texts = greedy(generator, prompts, banned_strings=map(str.upper, ["soviet"]), completion_only=True)
    assert all("soviet" not in text.lower() for text in texts)
    texts = greedy(generator, prompts, stop_conditions=(string for string in ["ov"]), completion_only=True)
    assert all("ov" not in text for text in texts)


def test_guidance_at_one_is_plain_text(loaded: Any) -> None:
    generator = make_generator(loaded)
    settings = Settings.greedy()
    settings.cfg_scale = 1.0
    pair = (PROMPTS[0], PROMPTS[1])
    assert generator.generate(pair, 20, gen_settings=settings) == greedy(generator, PROMPTS[0], 20)
    with pytest.raises(InputError, match="guidance"):
        generator.generate(PROMPTS[0], 5, gen_settings=settings)


def test_other_jobs_run_during_generate_and_keep_their_results(loaded: Any) -> None:
    generator = make_generator(loaded)
    _, tokenizer = loaded
    other = Job(tokenizer.encode(PROMPTS[1]), 12, gen_settings=Settings.greedy(), identifier="other")
    generator.enqueue(other)
    greedy(generator, PROMPTS[0], 5)
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    assert {result["identifier"] for result in results} == {"other"}
    assert len([r for r in results if r["stage"] == "streaming"]) == 12


def test_a_job_that_finished_during_generate_counts_until_its_result_is_read(loaded: Any) -> None:
    generator = make_generator(loaded)
    _, tokenizer = loaded
    generator.enqueue(Job(tokenizer.encode(PROMPTS[1]), 3, gen_settings=Settings.greedy()))
    greedy(generator, PROMPTS[0], 12)
    assert generator.num_remaining_jobs() == 1
    generator.reset_page_table()  # it has left the cache
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    assert results[-1]["eos"]


@pytest.mark.parametrize("new", [3, 30], ids=["ended", "running"])
@pytest.mark.parametrize("clear_all", [False, True])
def test_a_job_cancelled_after_generate_gives_no_result(loaded: Any, new: int, clear_all: bool) -> None:
    generator = make_generator(loaded)
    _, tokenizer = loaded
    cancelled, running = (Job(tokenizer.encode(prompt), new, identifier=prompt) for prompt in PROMPTS[1:3])
    generator.enqueue([cancelled, running])
    greedy(generator, PROMPTS[0], 12)
    if clear_all:
        generator.clear_queue()
    else:
        generator.cancel(cancelled)
    identifiers = set()
    while generator.num_remaining_jobs():
        identifiers |= {result["identifier"] for result in generator.iterate()}
    assert identifiers == (set() if clear_all else {PROMPTS[2]})
    assert generator.iterate() == []


def test_abort(loaded: Any) -> None:
    generator, stop = make_generator(loaded), threading.Event()
    stop.set()
    assert greedy(generator, PROMPTS, 50, abort_event=stop) is None
    assert generator.num_remaining_jobs() == 0


def test_a_job_that_fails_fails_alone(loaded: Any, single_texts: list[str]) -> None:
    """A filter that allows nothing ends its own job with an error; other jobs continue."""
    from exlm import Filter

    class Nothing(Filter):
        def begin(self, prefix_str: Any) -> None: ...

        def feed(self, token: Any) -> None: ...

        def next(self) -> Any:
            return set(), set()

    model, tokenizer = loaded
    generator = make_generator(loaded)
    jobs = [Job(tokenizer.encode(p), 30, gen_settings=Settings.greedy()) for p in PROMPTS[:2]]
    bad = Job(tokenizer.encode(PROMPTS[2]), 30, filters=[Nothing(model, tokenizer)])
    generator.enqueue([jobs[0], bad, jobs[1]])
    errors = []
    while generator.num_remaining_jobs():
        errors += [r["error"] for r in generator.iterate() if "error" in r]
    assert len(errors) == 1
    assert isinstance(errors[0], InputError)
    assert [PROMPTS[i] + job.full_completion for i, job in enumerate(jobs)] == single_texts[:2]


def test_a_refused_generate_leaves_nothing_queued(loaded: Any) -> None:
    generator = make_generator(loaded, tokens=512)
    with pytest.raises(InputError, match="pages"):
        greedy(generator, [PROMPTS[0], PROMPTS[1] * 200], 20)
    assert generator.num_remaining_jobs() == 0
    assert greedy(generator, PROMPTS[0], 3)


def test_a_failing_job_of_generate_drops_the_others(loaded: Any, single_texts: list[str]) -> None:
    """The error is raised as soon as it happens; jobs of other callers lose no results."""
    generator = make_generator(loaded)
    _, tokenizer = loaded
    other = Job(tokenizer.encode(PROMPTS[1]), 30, gen_settings=Settings.greedy())
    generator.enqueue(other)

    def broken(result: Any) -> None:
        raise RuntimeError("oops")

    settings = [Settings.greedy(), Settings.greedy(post_sampling_hooks=[broken]), Settings.greedy()]
    with pytest.raises(InputError, match="oops"):
        generator.generate(PROMPTS[:3], 1000, gen_settings=settings)
    assert generator.pending_jobs + generator.active_jobs == [other]
    while generator.num_remaining_jobs():
        generator.iterate()
    assert PROMPTS[1] + other.full_completion == single_texts[1]
    assert greedy(generator, PROMPTS) == single_texts


def test_public_attributes(loaded: Any) -> None:
    model, tokenizer = loaded
    generator = make_generator(loaded, max_queue=9, num_draft_tokens=3)
    assert (generator.model, generator.tokenizer, generator.cache.max_seq_len) == (model, tokenizer, 4096)
    assert (generator.draft_model, generator.draft_cache, generator.current_loras) == (None, None, None)
    assert (generator.max_batch_size, generator.max_chunk_size) == (model.config.max_input_len // 8, 2048)
    assert (generator.max_total_tokens, generator.max_pages, generator.page_size) == (4096, 16, 256)
    assert generator.max_seq_len == model.config.max_seq_len
    assert generator.padded_vocab_size % 32 == 0
    assert 0 <= generator.padded_vocab_size - model.config.vocab_size < 32
    assert (generator.num_draft_tokens, generator.paged, generator.max_queue) == (0, True, 9)
    assert (generator.pending_jobs, generator.active_jobs) == ([], [])
    assert make_generator(loaded, use_ngram_draft=True, num_draft_tokens=3).num_draft_tokens == 3
    assert make_generator(loaded, use_ngram_draft=True, max_q_size=16).num_draft_tokens == 15
    assert make_generator(loaded, use_ngram_draft="auto").num_draft_tokens == 7  # this model is on a CPU
    cache = Cache(model, max_seq_len=4096)
    assert make_generator(loaded, use_ngram_draft="auto", draft_model=model, draft_cache=cache).num_draft_tokens == 4


def test_unpaged_means_one_at_a_time(loaded: Any, single_texts: list[str]) -> None:
    generator = make_generator(loaded, paged=False)
    assert (generator.paged, generator.max_batch_size, generator.page_size) == (False, 1, 256)
    assert greedy(generator, PROMPTS) == single_texts
    settings = Settings.greedy(cfg_scale=1.5)
    with pytest.raises(InputError, match="minimum batch size of 2"):
        generator.generate((PROMPTS[0], PROMPTS[1]), 5, gen_settings=settings)
    assert greedy(generator, PROMPTS[0]) == single_texts[0]


@pytest.mark.parametrize("chunk", [1, 100, 255, 300])
def test_chunks_of_any_size_without_pages(loaded: Any, chunk: int) -> None:
    long = " ".join(PROMPTS) * (2 if chunk == 1 else 12)
    generator = make_generator(loaded, paged=False, max_chunk_size=chunk)
    assert generator.max_chunk_size == chunk
    ids = generator.tokenizer.encode(long)
    generator.enqueue(Job(ids, 8, gen_settings=Settings.greedy()))
    steps, text = [0], ""
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            steps += [result["curr_progress"]] if result["stage"] == "prefill" else []
            text += result.get("text", "")
    read = [later - earlier for earlier, later in pairwise(steps)]
    assert max(read) == min(chunk, 256)  # as far as the next page begins, where that is within reach
    assert steps[-1] == ids.shape[1] - 1
    assert text == greedy(make_generator(loaded), long, 8, completion_only=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_chunk_size": 100}, "multiple of 256"),
        ({"max_chunk_size": 4096}, "max_input_len"),
        ({"max_chunk_size": 4096, "paged": False}, "max_chunk_size must be at most the model's max_input"),
        ({"max_chunk_size": 0, "paged": False}, "max_chunk_size must be a whole number of at least 1"),
        ({"max_seq_len": 10**6}, "requested seq len"),
        ({"use_ngram_draft": True, "draft_model": object()}, "both draft model and ngram"),
        ({"draft_model": object()}, "Must supply cache"),
        ({"use_ngram_draft": True, "num_draft_tokens": 0}, "num_draft_tokens"),
        ({"use_ngram_draft": True, "num_draft_tokens": 8}, "less than max_q_size, found 8 and 8"),
        ({"use_ngram_draft": True, "max_q_size": 1}, "less than max_q_size, found 1 and 1"),
        ({"max_q_size": 0}, "max_q_size"),
        ({"max_queue": 0}, "max_queue"),
        ({"max_batch_size": -1}, "max_batch_size"),
    ],
)
def test_invalid_generators(loaded: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_generator(loaded, **options)


def test_caches_that_do_not_fit(loaded: Any) -> None:
    model, tokenizer = loaded
    with pytest.raises(InputError, match="multiple of 256"):
        Generator(model, Cache(model, max_seq_len=300), tokenizer)
    with pytest.raises(InputError, match="batch_size = 1"):
        Generator(model, Cache(model, batch_size=2, max_seq_len=512), tokenizer)


def test_async_jobs(loaded: Any, single_texts: list[str]) -> None:
    model, tokenizer = loaded

    async def read(generator: AsyncGenerator, prompt: str) -> str:
        job = AsyncJob(generator, tokenizer.encode(prompt), 30, gen_settings=Settings.greedy())
        return prompt + "".join([result.get("text", "") async for result in job])  # type: ignore[misc]

    async def main() -> None:
        generator = AsyncGenerator(model, Cache(model, max_seq_len=4096), tokenizer)
        assert await asyncio.gather(*(read(generator, prompt) for prompt in PROMPTS)) == single_texts
        with pytest.raises(InputError, match="exceed the model's length"):
            await read(generator, PROMPTS[0] * 500)
        waiting = AsyncJob(generator, tokenizer.encode(PROMPTS[0]), 2000, gen_settings=Settings.greedy())

        async def listen() -> int:
            return len([result async for result in waiting])

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0.1)
        await waiting.cancel()
        assert await asyncio.wait_for(listener, 10) >= 1
        assert await read(generator, PROMPTS[1]) == single_texts[1]
        await generator.close()

    asyncio.run(main())


def test_a_cache_written_by_another_caller_is_not_reused(loaded: tuple[Model, Tokenizer]) -> None:
    generator, prompt = make_generator(loaded), PROMPTS[0] * 40
    cold_text, cold = greedy(generator, prompt, 4, return_last_results=True)
    warm_text, warm = greedy(generator, prompt, 4, return_last_results=True)
    loaded[0].forward(torch.zeros(1, 300, dtype=torch.long), generator.cache, preprocess_only=True)
    generator.cache.current_seq_len = 0
    fresh_text, result = greedy(generator, prompt, 4, return_last_results=True)
    assert cold_text == warm_text == fresh_text
    assert warm["cached_tokens"] > cold["cached_tokens"] == result["cached_tokens"] == 0


def test_max_seq_len_raised_after_loading_is_ignored(fixtures_dir: Path) -> None:
    """The rotary tables end at the loaded length."""
    config = Config(fixtures_dir / "tiny-lm")
    config.max_seq_len = 300
    model = Model(config)
    model.load()
    config.max_seq_len = 4096
    tokenizer = Tokenizer(config)
    ids, settings = tokenizer.encode(PROMPTS[0] * 80)[:, :296], Settings.greedy()
    assert Cache(model).max_seq_len == 300
    generator = Generator(model, Cache(model, max_seq_len=512), tokenizer)
    with pytest.raises(InputError, match="296 prompt and 9 new tokens exceed the model's length of 300"):
        generator.enqueue(Job(ids, 9, gen_settings=settings))
    stream = StreamingGenerator(model, Cache(model, max_seq_len=512), tokenizer)
    stream.set_stop_conditions([])
    stream.begin_stream_ex(ids, settings)
    for _ in range(9):
        stream.stream_ex()
    assert stream.full()
    model.unload()
    model.load()
    assert Generator(model, Cache(model, max_seq_len=512), tokenizer).max_seq_len == 4096
    config.max_seq_len = 200  # less may be asked for at any time
    assert Generator(model, Cache(model, max_seq_len=512), tokenizer).max_seq_len == 200


def test_a_generator_does_not_keep_the_weights_of_an_unloaded_model(fixtures_dir: Path) -> None:
    """Scripts that try several models often still reference the last one's generator and cache."""
    model = Model(Config(fixtures_dir / "tiny-lm"))
    model.load()
    cache, tokenizer = Cache(model, max_seq_len=512), Tokenizer(model.config)
    generator = Generator(model, cache, tokenizer)
    text = greedy(generator, PROMPTS[0])
    weights = weakref.ref(model._require_loaded().decoder)
    model.unload()
    gc.collect()
    assert weights() is None
    for _ in range(2):
        with pytest.raises(NotLoaded, match="The model was unloaded, so this generator cannot continue"):
            greedy(generator, PROMPTS[0])
    assert generator.num_remaining_jobs() == 0
    model.load()
    assert greedy(Generator(model, cache, tokenizer), PROMPTS[0]) == text


def test_generate_caps_max_new_tokens_at_the_models_length(fixtures_dir: Path) -> None:
    config = Config(fixtures_dir / "tiny-lm")
    config.max_seq_len = 300
    model = Model(config)
    model.load()
    generator = Generator(model, Cache(model, max_seq_len=512), Tokenizer(config))
    prompt = PROMPTS[0]
    length = generator.tokenizer.encode(prompt).shape[1]
    capped = rf"max_new_tokens is 400, and {300 - length} is used: the prompt has {length} tokens .* 300\."
    with pytest.warns(UserWarning, match=capped):
        text, last = greedy(generator, prompt, 400, return_last_results=True)
    assert last["new_tokens"] == 300 - length
    assert text == greedy(generator, prompt, 300 - length)
    with pytest.warns(UserWarning, match="is used") as warned:  # only for the prompt that needs it
        assert greedy(generator, [prompt, "a"], 300 - length + 1)[0] == text
    assert len(warned) == 1
    full = PROMPTS[0] * 80
    with pytest.raises(InputError, match=r"has \d+ tokens and the model's length is 300.* shorten"):
        greedy(generator, full, 1)
    with pytest.raises(InputError, match="exceed the model's length"):
        generator.enqueue(Job(generator.tokenizer.encode(prompt), 400, gen_settings=Settings.greedy()))
    assert generator.num_remaining_jobs() == 0
