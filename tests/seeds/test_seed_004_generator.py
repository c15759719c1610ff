"""Seed 004, from a generator to text: one test for each item of the checklist, from 113 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exlm import InputError
from tests.seeds.conftest import PROMPT, drain, make_job, some_ids

Answer = Callable[..., str]
Settings = ExLlamaV2Sampler.Settings


def test_item_113_model_cache_and_tokenizer_make_a_generator(
    model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
) -> None:
    made = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    assert (made.model, made.cache, made.tokenizer) == (model, cache, tokenizer)
    assert made.generate(PROMPT, 2).startswith(PROMPT)


def test_item_114_prompts_are_cached(generator: ExLlamaV2DynamicGenerator) -> None:
    ids = some_ids(600)
    generator.enqueue(make_job(ids, 3))
    first = drain(generator)[-1]
    generator.enqueue(make_job(ids, 3))
    second = drain(generator)[-1]
    assert first["cached_tokens"] == 0
    assert (second["cached_pages"], second["cached_tokens"]) == (2, 599)
    assert second["full_completion"] == first["full_completion"]


def test_item_115_common_prefixes_share_pages(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1536), tokenizer)
    start = some_ids(768)
    jobs = [make_job(torch.cat([start, some_ids(20, 50 * n + 1)], 1), 4) for n in range(3)]
    made.enqueue(jobs)  # alone each needs four pages of the six
    made.iterate()
    assert len(made.active_jobs) == 3
    drain(made)
    assert [one.cached_pages for one in jobs] == [0, 3, 3]


def test_item_116_warming_up_changes_nothing(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, greedy: Settings) -> None:
    texts = []
    for warm in (True, False):
        made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
        if warm:
            made.warmup()
        text, result = made.generate(PROMPT, 6, gen_settings=greedy, return_last_results=True)
        assert result["cached_tokens"] == 0
        texts.append(text)
    assert texts[0] == texts[1]


def test_item_117_many_prompts_over_a_cache_of_one_row(generator: ExLlamaV2DynamicGenerator, answer: Answer) -> None:
    assert generator.cache.batch_size == generator.model.config.max_batch_size == 1
    prompts = [PROMPT, "The", "#include", "She was"]
    jobs = [make_job(generator.tokenizer.encode(prompt), 6) for prompt in prompts]
    generator.enqueue(jobs)
    generator.iterate()
    assert generator.active_jobs == jobs
    drain(generator)
    assert [one.full_completion for one in jobs] == [answer(prompt, 6) for prompt in prompts]


def test_item_118_batch_and_queue_sizes(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> None:
    # Without a batch size: as many rows of so many tokens as the model computes at once.
    for sizes, rows in (
        ({"max_batch_size": 2, "max_q_size": 1}, 2),
        ({"max_q_size": model.config.max_input_len // 3}, 3),
    ):
        made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, **sizes)
        assert made.max_batch_size == rows
        made.enqueue([make_job(some_ids(5, n), 4) for n in range(5)])
        most = 0
        while made.num_remaining_jobs():
            made.iterate()
            most = max(most, len(made.active_jobs))
        assert most == rows


def test_item_119_a_draft_model(
    model: ExLlamaV2,
    draft_model: ExLlamaV2,
    tokenizer: ExLlamaV2Tokenizer,
    answer: Answer,
    passes: list[int],
) -> None:
    whole = answer(PROMPT, 20)
    passes.clear()
    made = ExLlamaV2DynamicGenerator(
        model,
        ExLlamaV2Cache(model, max_seq_len=512),
        tokenizer,
        draft_model=draft_model,
        draft_cache=ExLlamaV2Cache(draft_model, max_seq_len=512),
    )
    text, result = made.generate(
        PROMPT, 20, gen_settings=Settings.greedy(), completion_only=True, return_last_results=True
    )
    assert text == whole
    assert result["accepted_draft_tokens"] > 5
    assert result["rejected_draft_tokens"] >= 0
    assert len(passes) <= 1 + 20 - result["accepted_draft_tokens"]


def test_item_120_one_prompt_or_a_list(generator: ExLlamaV2DynamicGenerator, greedy: Settings) -> None:
    one = generator.generate(PROMPT, 5, gen_settings=greedy)
    assert [one, one] == generator.generate([PROMPT, PROMPT], 5, gen_settings=greedy)


@pytest.mark.parametrize("stop", [".", "id of ."])
def test_item_121_ids_and_strings_stop(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, greedy: Settings, stop: str
) -> None:
    condition = tokenizer.single_id(".") if stop.startswith("id") else stop
    text = generator.generate(PROMPT, 40, gen_settings=greedy, stop_conditions=[condition], completion_only=True)
    assert text == ", there was a little girl named Tim"


def test_item_122_settings_for_all_or_for_each(generator: ExLlamaV2DynamicGenerator) -> None:
    greedy, hot = Settings.greedy(), Settings(temperature=5.0, top_k=0, top_p=1.0)
    shared = generator.generate([PROMPT] * 2, 8, gen_settings=greedy)
    assert shared[0] == shared[1]
    own = generator.generate([PROMPT] * 2, 8, gen_settings=[greedy, hot], seed=1)
    assert own[0] == shared[0]
    assert own[1] != shared[0]
    with pytest.raises(InputError, match="one entry for each of 2 prompts, found 3"):
        generator.generate([PROMPT] * 2, 8, gen_settings=[greedy] * 3)


def test_item_123_base_models_get_their_bos(
    generator: ExLlamaV2DynamicGenerator, greedy: Settings, answer: Answer
) -> None:
    text = generator.generate(PROMPT, 14, add_bos=True, gen_settings=greedy)
    assert text == PROMPT + answer(PROMPT, 14, add_bos=True)
    assert "named Lily" in text  # without BOS it is Tim


def test_item_124_healing_repairs_the_seam(generator: ExLlamaV2DynamicGenerator, greedy: Settings) -> None:
    for prompt in ("Once upon a ", "Once upon a t", "Once up"):
        text = generator.generate(prompt, 6, gen_settings=greedy, token_healing=True, add_bos=True)
        assert text.startswith("Once upon a time")


def test_item_125_settings_take_effect(generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    def ids(**fields: Any) -> list[int]:
        settings = Settings.greedy(**fields)
        generator.enqueue(made := ExLlamaV2DynamicJob(tokenizer.encode("####"), 10, gen_settings=settings))
        drain(generator)
        return made.sequences[0].ids[-10:]

    plain = ids()
    assert len(set(plain)) < 10
    for fields in (
        {"token_repetition_penalty": 3.0},
        {"token_frequency_penalty": 20.0},
        {"token_presence_penalty": 50.0},
        {"dry_multiplier": 50.0, "dry_sequence_breakers": {0}},
    ):
        assert ids(**fields) != plain
    settings = Settings(temperature=4.0, top_k=0, top_p=1.0, token_repetition_penalty=1.0)
    free = {generator.generate(PROMPT, 4, gen_settings=settings, seed=seed) for seed in range(4)}
    settings.top_k = 1
    assert len(free) > len({generator.generate(PROMPT, 4, gen_settings=settings, seed=s) for s in range(4)}) == 1


def test_item_126_thousands_of_jobs(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    made = ExLlamaV2DynamicGenerator(
        model, ExLlamaV2Cache(model, max_seq_len=128 * 256), tokenizer, max_batch_size=128, max_q_size=1
    )
    settings = Settings.greedy()
    jobs = [ExLlamaV2DynamicJob(some_ids(1, n), 1, gen_settings=settings, identifier=n) for n in range(2000)]
    assert made.enqueue(jobs) == list(range(2000))
    ended = [result["identifier"] for result in drain(made) if result["eos"]]
    assert sorted(ended) == list(range(2000))
