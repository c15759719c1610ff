"""Seed 002: the principle of dynamic text generation, one test for each item of the checklist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exllamav2.generator.filters import ExLlamaV2SelectFilter
from exlm import GrammarFilter, JsonSchemaFilter, RegexFilter
from tests.seeds.conftest import PROMPT, drain

Answer = Callable[..., str]
Settings = ExLlamaV2Sampler.Settings


def make_job(tokenizer: ExLlamaV2Tokenizer, prompt: str, count: int, **options: Any) -> ExLlamaV2DynamicJob:
    options = {"gen_settings": Settings.greedy()} | options
    return ExLlamaV2DynamicJob(tokenizer.encode(prompt), count, **options)


def test_item_067_the_stages_come_in_order(generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator.enqueue(make_job(tokenizer, PROMPT, 5))
    assert generator.num_remaining_jobs() == 1
    stages = [result["stage"] for result in drain(generator)]
    assert stages == ["started", "prefill", *["streaming"] * 5]


def test_item_068_long_prompts_are_read_in_chunks(
    model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
) -> None:
    made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, max_chunk_size=256)
    ids = torch.arange(700)[None] % 1000 + 10
    made.enqueue(ExLlamaV2DynamicJob(ids, 2))
    results = drain(made)
    progress = [(r["curr_progress"], r["max_progress"]) for r in results if r["stage"] == "prefill"]
    assert progress == [(256, 699), (512, 699), (699, 699)]


def test_item_069_speculation_changes_the_speed_and_not_the_text(
    model: ExLlamaV2,
    draft_model: ExLlamaV2,
    cache: ExLlamaV2Cache,
    tokenizer: ExLlamaV2Tokenizer,
    answer: Answer,
) -> None:
    made = ExLlamaV2DynamicGenerator(
        model,
        cache,
        tokenizer,
        draft_model=draft_model,
        draft_cache=ExLlamaV2Cache(draft_model, max_seq_len=2048),
        num_draft_tokens=4,
    )
    made.enqueue(make_job(tokenizer, PROMPT, 24))
    counts, text = [], ""
    while made.num_remaining_jobs():
        streamed = [result for result in made.iterate() if result["stage"] == "streaming"]
        counts.append(len(streamed))
        text += "".join(result.get("text", "") for result in streamed)
    assert text == answer(PROMPT, 24)
    assert sum(counts) == 24
    assert max(counts) > 1
    assert len(counts) < 24


def test_item_070_the_reason_of_the_end_is_named(
    generator: ExLlamaV2DynamicGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    made = ExLlamaV2SelectFilter(model, tokenizer, [" was"])
    jobs = {
        "max_new_tokens": make_job(tokenizer, PROMPT, 5),
        "stop_token": make_job(tokenizer, PROMPT, 50, stop_conditions=[tokenizer.single_id(".")]),
        "stop_string": make_job(tokenizer, PROMPT, 50, stop_conditions=["girl"]),
        "end_filter": make_job(tokenizer, PROMPT, 50, filters=[made]),
    }
    generator.enqueue(list(jobs.values()))
    ends = {id(result["job"]): result for result in drain(generator) if result["eos"]}
    assert {reason: ends[id(one)]["eos_reason"] for reason, one in jobs.items()} == {r: r for r in jobs}


def test_item_071_the_streamed_text_is_the_completion(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, answer: Answer
) -> None:
    generator.enqueue(make_job(tokenizer, PROMPT, 20, stop_conditions=["never said"]))
    results = [result for result in drain(generator) if result["stage"] == "streaming"]
    text = "".join(result.get("text", "") for result in results)
    assert text == results[-1]["full_completion"] == answer(PROMPT, 20)
    ids = torch.cat([result["token_ids"] for result in results if "token_ids" in result], 1)
    assert tokenizer.decode(ids)[0] == text


def test_item_072_a_list_of_prompts_is_one_batch(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, answer: Answer
) -> None:
    prompts = [PROMPT, "The", "#include"]
    jobs = [make_job(tokenizer, prompt, 6) for prompt in prompts]
    generator.enqueue(jobs)
    rounds = 0
    while generator.num_remaining_jobs():
        generator.iterate()
        rounds += 1
    assert rounds <= 7
    assert [one.full_completion for one in jobs] == [answer(prompt, 6) for prompt in prompts]


def test_item_073_healing_takes_back_the_last_token(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    prompt = "Once upon a "
    one = make_job(tokenizer, prompt, 6, token_healing=True)
    ids = tokenizer.encode(prompt)[0].tolist()
    assert one.sequences[0].ids == ids[:-1]
    generator.enqueue(one)
    results = drain(generator)
    healed = one.sequences[0].ids[len(ids) - 1]
    assert tokenizer.get_id_to_piece_list()[healed] == " time"
    assert one.full_completion.startswith("time")
    assert results[-1]["new_tokens"] == 6  # the healed one is not among them


def test_item_074_banned_strings_are_taken_back(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    generator.enqueue(make_job(tokenizer, PROMPT, 24, banned_strings=["Little Girl"]))
    results = drain(generator)
    suppressed = [result["suppressed_text"] for result in results if "suppressed_text" in result]
    assert suppressed
    assert all("little girl" in text.lower() for text in suppressed)
    text = results[-1]["full_completion"]
    assert "little girl" not in text.lower()
    assert results[-1]["new_tokens"] == 24


@pytest.mark.parametrize("kind", ["grammar", "schema", "regex"])
def test_item_075_constrained_decoding(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, kind: str
) -> None:
    made, expected = {
        "grammar": (GrammarFilter(tokenizer, 'start: "to" | "fro"'), {"to", "fro"}),
        "schema": (JsonSchemaFilter(tokenizer, {"enum": [1, True]}), {"1", "true"}),
        "regex": (RegexFilter(tokenizer, "a(b|c)d"), {"abd", "acd"}),
    }[kind]
    texts = {generator.generate("So", 12, filters=[made], completion_only=True, seed=s) for s in range(3)}
    assert texts <= expected


def test_item_076_guidance_mixes_two_prompts(
    generator: ExLlamaV2DynamicGenerator,
    model: ExLlamaV2,
    tokenizer: ExLlamaV2Tokenizer,
    answer: Answer,
) -> None:
    wanted, unwanted = PROMPT, "The Canadian province"
    assert generator.generate(
        (wanted, unwanted), 8, gen_settings=Settings.greedy(cfg_scale=1.0), completion_only=True
    ) == answer(wanted, 8)
    scale = 1.8
    rows = [tokenizer.encode(prompt) for prompt in (wanted, unwanted)]
    for _ in range(8):  # the formula, by hand
        cond, uncond = (model.forward(row)[:, -1].log_softmax(-1) for row in rows)
        token = (uncond + scale * (cond - uncond)).argmax(-1, keepdim=True)
        rows = [torch.cat([row, token], 1) for row in rows]
    expected = tokenizer.decode(rows[0])[0]
    found = generator.generate((wanted, unwanted), 8, gen_settings=Settings.greedy(cfg_scale=scale))
    assert found == expected


def test_item_077_jobs_and_the_streaming_generator_are_alternatives(
    generator: ExLlamaV2DynamicGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, answer: Answer
) -> None:
    generator.enqueue(make_job(tokenizer, PROMPT, 10))
    by_job = "".join(result.get("text", "") for result in drain(generator))
    streaming = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    streaming.begin_stream_ex(tokenizer.encode(PROMPT), Settings.greedy())
    streamed = "".join(streaming.stream_ex()["chunk"] for _ in range(10))
    assert by_job == streamed == answer(PROMPT, 10)


def test_item_078_the_sampling_strategy_shapes_the_output(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    def spread(**fields: Any) -> Counter[int]:
        settings = Settings(**{"token_repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0} | fields)
        jobs = [ExLlamaV2DynamicJob(tokenizer.encode(PROMPT), 1, gen_settings=settings, seed=s) for s in range(60)]
        generator.enqueue(jobs)
        drain(generator)
        return Counter(one.sequences[0].ids[-1] for one in jobs)

    hot, cold = spread(temperature=3.0), spread(temperature=0.3)
    assert len(hot) > 2 * len(cold)
    assert len(spread(temperature=3.0, top_k=3)) <= 3
    assert len(spread(temperature=1.0, top_p=0.01)) == 1
    assert len(spread(temperature=3.0, min_p=0.9)) < len(hot)
