"""Seed 000: ExLlamaV2DynamicGenerator.generate, one test for each item of the checklist."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2MMEmbedding,
    ExLlamaV2Sampler,
)
from exllamav2.generator.filters import ExLlamaV2Filter, ExLlamaV2SelectFilter
from exlm import JsonSchemaFilter, RegexFilter
from tests.seeds.conftest import PROMPT, drain

Answer = Callable[..., str]
Settings = ExLlamaV2Sampler.Settings

DEFAULTS = {
    **dict.fromkeys(["min_new_tokens"], 0),
    **dict.fromkeys(
        [
            *["token_healing", "encode_special_tokens", "decode_special_tokens", "add_bos"],
            *["completion_only", "filter_prefer_eos", "return_last_results"],
        ],
        False,
    ),
    **dict.fromkeys(
        ["seed", "gen_settings", "stop_conditions", "abort_event", "filters", "embeddings", "banned_strings"]
    ),
}


def test_item_001_both_names_are_importable_from_the_generator_package() -> None:
    import exllamav2.generator as package

    assert package.ExLlamaV2DynamicGenerator is ExLlamaV2DynamicGenerator
    assert package.ExLlamaV2Sampler is ExLlamaV2Sampler


def test_item_002_generate_returns_when_everything_is_finished(generator: ExLlamaV2DynamicGenerator) -> None:
    texts = generator.generate([PROMPT, "The"], 8)
    assert all(isinstance(text, str) for text in texts)
    assert generator.num_remaining_jobs() == 0
    assert generator.iterate() == []


def test_item_003_the_caller_passes_only_text(generator: ExLlamaV2DynamicGenerator, answer: Answer) -> None:
    text = generator.generate(PROMPT, 12, gen_settings=Settings.greedy())
    assert text == PROMPT + answer(PROMPT, 12)


def test_item_004_keywords_and_defaults() -> None:
    parameters = dict(inspect.signature(ExLlamaV2DynamicGenerator.generate).parameters)
    assert list(parameters)[:3] == ["self", "prompt", "max_new_tokens"]
    assert parameters["max_new_tokens"].default is inspect.Parameter.empty
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
    assert [p.kind for p in parameters.values()][-1] is inspect.Parameter.VAR_KEYWORD


def test_item_004_extra_arguments_are_tolerated(
    generator: ExLlamaV2DynamicGenerator, greedy: Settings, answer: Answer
) -> None:
    with pytest.warns(UserWarning, match=r"has no argument 'my_option' and goes on without it") as seen:
        text = generator.generate(PROMPT, 4, gen_settings=greedy, my_option=1)
    assert text == PROMPT + answer(PROMPT, 4)
    assert [warning.filename for warning in seen] == [__file__]


def test_item_004_further_arguments_reach_the_job(generator: ExLlamaV2DynamicGenerator) -> None:
    text, result = generator.generate(PROMPT, 4, identifier="me", max_skips=None, return_last_results=True)
    assert result["identifier"] == "me"
    assert text.startswith(PROMPT)


def test_item_005_a_string_gives_a_string(generator: ExLlamaV2DynamicGenerator) -> None:
    assert isinstance(generator.generate(prompt=PROMPT, max_new_tokens=3), str)


def test_item_006_a_list_gives_a_list_in_order(
    generator: ExLlamaV2DynamicGenerator, greedy: Settings, answer: Answer
) -> None:
    prompts = [PROMPT, "The Canadian province of", "#include <"]
    texts = generator.generate(prompts, 10, gen_settings=greedy)
    assert texts == [prompt + answer(prompt, 10) for prompt in prompts]
    assert generator.generate([], 10) == []


def test_item_007_prompts_of_a_batch_run_concurrently(
    generator: ExLlamaV2DynamicGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    step = generator._engine.step
    monkeypatch.setattr(generator._engine, "step", lambda: (rounds.append(1), step())[1])
    generator.generate([f"{n} little" for n in range(6)], 12)
    assert len(rounds) <= 14


def test_item_008_what_does_not_fit_waits_and_completes(
    model: ExLlamaV2,
    tokenizer: ExLlamaV2Tokenizer,
    greedy: Settings,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    running: list[int] = []
    step = small._engine.step
    monkeypatch.setattr(small._engine, "step", lambda: (step(), running.append(len(small.active_jobs)))[0])
    prompts = [f"Chapter {n}" for n in range(5)]
    texts = small.generate(prompts, 6, gen_settings=greedy)
    assert texts == [prompt + answer(prompt, 6) for prompt in prompts]
    assert max(running) == 2  # there are two pages


@pytest.mark.parametrize("drafting", [{}, {"use_ngram_draft": True, "num_draft_tokens": 3}])
def test_item_009_exactly_max_new_tokens(
    model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer, drafting: dict[str, Any]
) -> None:
    made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, **drafting)
    for wanted in (1, 2, 7, 20):
        _, result = made.generate(PROMPT, wanted, return_last_results=True)
        assert result["new_tokens"] == wanted
        assert result["eos_reason"] == "max_new_tokens"


def test_item_010_stop_tokens_wait_for_min_new_tokens(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, greedy: Settings, answer: Answer
) -> None:
    first = int(tokenizer.encode(answer(PROMPT, 1))[0, 0])
    stops: dict[str, Any] = {"stop_conditions": [first], "gen_settings": greedy, "return_last_results": True}
    _, result = generator.generate(PROMPT, 20, **stops)
    assert (result["eos_reason"], result["new_tokens"]) == ("stop_token", 1)
    _, result = generator.generate(PROMPT, 20, min_new_tokens=5, **stops)
    assert result["new_tokens"] > 5
    assert first not in result["job"].sequences[0].ids[tokenizer.num_tokens(PROMPT) :][:5]
    _, result = generator.generate(
        PROMPT, 20, min_new_tokens=15, gen_settings=greedy, stop_conditions=["girl"], return_last_results=True
    )
    assert result["eos_reason"] == "stop_string"
    assert result["new_tokens"] < 15


def test_item_011_a_seed_makes_it_reproducible(generator: ExLlamaV2DynamicGenerator) -> None:
    def text(seed: int | None) -> str:
        return str(generator.generate(PROMPT, 12, seed=seed))

    texts = [text(seed) for seed in (5, 6, 7)]
    assert text(7) == texts[2]
    assert len(set(texts)) > 1
    assert len({text(None) for _ in range(4)}) > 1


def test_item_012_prompt_i_of_a_batch_uses_seed_plus_i(generator: ExLlamaV2DynamicGenerator) -> None:
    texts = generator.generate([PROMPT] * 3, 12, seed=7)
    assert texts == [generator.generate(PROMPT, 12, seed=7 + i) for i in range(3)]
    assert texts == generator.generate([PROMPT] * 3, 12, seed=7)
    assert len(set(texts)) > 1


def test_item_013_sampler_settings_take_effect(generator: ExLlamaV2DynamicGenerator, answer: Answer) -> None:
    for settings in (Settings(top_k=1), Settings(temperature=0.0), Settings(top_p=1e-6)):
        settings.token_repetition_penalty = 1.0
        assert generator.generate(PROMPT, 12, gen_settings=settings) == PROMPT + answer(PROMPT, 12)
    repeated = Settings.greedy(token_repetition_penalty=3.0)
    ids = generator.tokenizer.encode(generator.generate("#####", 12, gen_settings=repeated, completion_only=True))
    assert len(set(ids[0].tolist())) == ids.shape[1]
    assert generator.generate(PROMPT, 9, seed=1) == generator.generate(PROMPT, 9, seed=1, gen_settings=Settings())


def test_item_014_token_healing_keeps_the_prompt_and_repairs_its_end(
    generator: ExLlamaV2DynamicGenerator, greedy: Settings
) -> None:
    plain, healed = (
        generator.generate("Once upon a ", 8, gen_settings=greedy, token_healing=on) for on in (False, True)
    )
    assert healed.startswith("Once upon a time, there was")  # not "Once upon a  time"
    assert plain.startswith("Once upon a ")
    assert "time" not in plain


def test_item_015_special_text_in_a_prompt(generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    def prompt(special: bool) -> list[int]:
        options = {"encode_special_tokens": special, "return_last_results": True}
        _, result = generator.generate("<|im_start|>user", 1, **options)
        assert result["prompt_tokens"] == len(result["job"].prompts[0])
        return list(result["job"].prompts[0])

    mark = tokenizer.single_id("<|im_start|>")
    assert prompt(True) == [mark, *tokenizer.encode("user")[0].tolist()]
    assert mark not in prompt(False)
    assert tokenizer.decode(torch.tensor(prompt(False))) == "<|im_start|>user"


def test_item_016_special_tokens_in_the_output(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    settings = Settings.greedy()
    settings.allow_tokens(tokenizer, ["<|im_start|>"])
    options: dict[str, Any] = {"gen_settings": settings, "completion_only": True}
    assert generator.generate(PROMPT, 2, decode_special_tokens=True, **options) == "<|im_start|>" * 2
    assert generator.generate(PROMPT, 2, **options) == ""


def test_item_017_stop_conditions_mix_strings_and_ids(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, greedy: Settings
) -> None:
    period = tokenizer.single_id(".")
    options: dict[str, Any] = {"gen_settings": greedy, "completion_only": True, "return_last_results": True}
    text, result = generator.generate(PROMPT, 60, stop_conditions=[period, "never said"], **options)
    assert result["eos_reason"] == "stop_token"
    assert "." not in text
    text, result = generator.generate(PROMPT, 60, stop_conditions=["Tim", tokenizer.eos_token_id], **options)
    assert (result["eos_reason"], result["eos_triggering_string"]) == ("stop_string", "Tim")
    assert text.endswith("named ")


@pytest.mark.parametrize("stop", ["little girl named", "tle gi", "ttl", " named Tim.\nJ"])
def test_item_018_stop_strings_across_and_inside_tokens(
    generator: ExLlamaV2DynamicGenerator, greedy: Settings, answer: Answer, stop: str
) -> None:
    whole = answer(PROMPT, 24)
    text = generator.generate(PROMPT, 24, gen_settings=greedy, stop_conditions=[stop], completion_only=True)
    assert text == whole[: whole.index(stop)]


def test_item_019_add_bos(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, greedy: Settings, answer: Answer
) -> None:
    text, result = generator.generate(PROMPT, 10, add_bos=True, gen_settings=greedy, return_last_results=True)
    assert text == PROMPT + answer(PROMPT, 10, add_bos=True)
    assert result["prompt_tokens"] == tokenizer.encode(PROMPT).shape[1] + 1
    assert result["job"].prompts[0][0] == tokenizer.bos_token_id


def test_item_020_another_thread_aborts(generator: ExLlamaV2DynamicGenerator) -> None:
    abort, seen = threading.Event(), []

    def fifth(result: Any) -> None:
        seen.append(result)
        if len(seen) == 5:
            thread = threading.Thread(target=abort.set)
            thread.start()
            thread.join()

    hooked = [Settings(post_sampling_hooks=[fifth]), Settings()]
    assert generator.generate([PROMPT, "The"], 1000, gen_settings=hooked, abort_event=abort) is None
    assert len(seen) <= 6
    assert generator.num_remaining_jobs() == 0
    assert generator.generate(PROMPT, 2).startswith(PROMPT)


def test_item_021_completion_only(generator: ExLlamaV2DynamicGenerator, greedy: Settings) -> None:
    whole = generator.generate(PROMPT, 8, gen_settings=greedy)
    assert whole == PROMPT + generator.generate(PROMPT, 8, gen_settings=greedy, completion_only=True)


def test_item_022_filters_constrain_the_output(
    generator: ExLlamaV2DynamicGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    def text(made: ExLlamaV2Filter, limit: int = 60) -> str:
        return str(generator.generate(PROMPT, limit, filters=[made], completion_only=True, seed=3))

    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    found = json.loads(text(JsonSchemaFilter(tokenizer, schema, compact=True)))
    assert isinstance(found["a"], bool)
    assert found["b"] in ("x", "y")
    year = text(RegexFilter(tokenizer, "[0-9]{4}-[0-9]{2}"))
    assert len(year) == 7
    assert year[:4].isdigit()
    assert text(ExLlamaV2SelectFilter(model, tokenizer, [" yes", " no"])) in (" yes", " no")


def test_item_023_one_list_of_filters_for_each_prompt(
    generator: ExLlamaV2DynamicGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    made = ExLlamaV2SelectFilter(model, tokenizer, [" yes", " no"])
    texts = generator.generate(["A", "B", "C"], 8, filters=[[made], None, [made]], completion_only=True)
    assert {texts[0], texts[2]} <= {" yes", " no"}
    assert texts[1] not in (" yes", " no")
    for wrong in ([[made]], [made, None, None, None]):
        with pytest.raises(AssertionError, match="filters must be a list with one entry for each of 3 prompts"):
            generator.generate(["A", "B", "C"], 8, filters=wrong)


def test_item_024_eos_is_preferred_as_soon_as_it_is_allowed(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, greedy: Settings
) -> None:
    def text(prefer: bool) -> str:
        made = RegexFilter(tokenizer, "[a-z]+")
        options = {
            "gen_settings": greedy,
            "stop_conditions": [tokenizer.eos_token_id],
            "completion_only": True,
        }
        return str(generator.generate(PROMPT, 12, filters=[made], filter_prefer_eos=prefer, **options))

    assert tokenizer.encode(text(True)).shape[1] == 1
    assert len(text(False)) > len(text(True))


def test_item_025_return_last_results(generator: ExLlamaV2DynamicGenerator) -> None:
    text, result = generator.generate(PROMPT, 3, return_last_results=True)
    assert (type(text), type(result)) == (str, dict)
    texts, results = generator.generate([PROMPT, "The"], 3, return_last_results=True)
    assert len(texts) == len(results) == 2
    assert all(type(one) is dict and one["eos"] for one in results)


def test_item_026_what_a_last_result_holds(generator: ExLlamaV2DynamicGenerator) -> None:
    text, result = generator.generate(PROMPT, 5, return_last_results=True, completion_only=True)
    assert result["full_completion"] == text
    assert result["new_tokens"] == 5
    assert result["prompt_tokens"] == generator.tokenizer.encode(PROMPT).shape[1]
    assert result["eos_reason"] == "max_new_tokens"
    assert result["cached_pages"] == result["cached_tokens"] == 0
    assert min(result["time_enqueued"], result["time_prefill"], result["time_generate"]) >= 0
    assert result["text"]


def test_item_027_embeddings_stand_where_their_aliases_do(
    generator: ExLlamaV2DynamicGenerator, model: ExLlamaV2, vectors: Callable[[str], torch.Tensor]
) -> None:
    first, second = (
        ExLlamaV2MMEmbedding(model, vectors(words), text_alias=alias)
        for words, alias in ((" upon a time", "<picture>"), (" little girl", "<other>"))
    )
    options: dict[str, Any] = {"gen_settings": Settings.greedy(), "completion_only": True}
    plain = generator.generate([PROMPT, "A little girl"], 8, **options)
    assert generator.generate("Once<picture>", 8, embeddings=[first], **options) == plain[0]
    both = generator.generate(["Once<picture>", "A<other>"], 8, embeddings=[[first], [second]], **options)
    assert both == plain


def test_item_028_banned_strings_never_appear(generator: ExLlamaV2DynamicGenerator, greedy: Settings) -> None:
    options: dict[str, Any] = {"gen_settings": greedy, "completion_only": True}
    assert "little girl" in generator.generate(PROMPT, 40, **options)
    banned = ["LITTLE GIRL", "happy", " big"]
    text = generator.generate(PROMPT, 40, banned_strings=banned, **options)
    assert not any(one.lower() in text.lower() for one in banned)
    assert len(text) > 40


def test_item_029_guidance(generator: ExLlamaV2DynamicGenerator, greedy: Settings, answer: Answer) -> None:
    pair = (PROMPT, "The Canadian province")
    plain = generator.generate(pair, 8, gen_settings=Settings.greedy(cfg_scale=1.0))
    assert plain == PROMPT + answer(PROMPT, 8)
    other = generator.generate(pair, 8, gen_settings=Settings.greedy(cfg_scale=0.0), completion_only=True)
    assert other == answer(pair[1], 8)
    settings = [Settings.greedy(cfg_scale=1.5), greedy]
    strong, alone = generator.generate([pair, PROMPT], 8, gen_settings=settings)
    assert strong.startswith(PROMPT)
    assert alone == plain


def test_item_034_greedy_settings_are_the_argmax(generator: ExLlamaV2DynamicGenerator, answer: Answer) -> None:
    texts = {generator.generate(PROMPT, 16, gen_settings=Settings.greedy(), seed=seed) for seed in range(3)}
    assert texts == {PROMPT + answer(PROMPT, 16)}


def test_item_035_assigned_settings_count_at_the_next_generation(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, answer: Answer
) -> None:
    settings = Settings()
    settings.token_repetition_penalty = 1.0
    settings.top_k = 1
    assert generator.generate(PROMPT, 8, gen_settings=settings) == PROMPT + answer(PROMPT, 8)
    job = ExLlamaV2DynamicJob(tokenizer.encode(PROMPT), 8, gen_settings=settings)
    generator.enqueue(job)
    generator.iterate()
    bias = torch.full((2048,), -torch.inf)
    bias[5] = 0
    settings.token_bias = bias
    drain(generator)
    assert job.sequences[0].ids[-7:] == [5] * 7
