"""Invalid arguments raise, unknown ones warn, by name and with a remedy, before a job runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import (
    AsyncGenerator,
    AsyncJob,
    Cache,
    Config,
    Generator,
    InputError,
    Job,
    Model,
    RegexFilter,
    SelectFilter,
    Settings,
)
from tests.generator import scripted
from tests.generator.test_engine import TOKENIZER, make_job


@pytest.mark.parametrize("number", [0, -1, 2**31, 1.5, True, None, "3"])
def test_a_job_makes_at_least_one_token(number: Any) -> None:
    with pytest.raises(InputError, match=r"max_new_tokens must be a whole number from 1 .* found"):
        make_job("abc", number)


def test_a_salt_must_be_text_or_bytes() -> None:
    assert (
        make_job("abc", 3, salt=None).cache_key_parts
        == make_job("abc", 3).cache_key_parts
        != make_job("abc", 3, salt="0").cache_key_parts
    )
    for salt in (0, 7):
        with pytest.raises(InputError, match=f"salt must be a text or bytes, found {salt}: write '{salt}'"):
            make_job("abc", 3, salt=salt)


def test_unknown_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Job has no argument 'stop_condition'. Did you mean 'stop_cond"):
        Job(TOKENIZER.encode("abc"), 3, stop_condition=[0])
    with pytest.raises(InputError, match=r"Job has no argument 'zzz'. Leave it out"):
        Job(TOKENIZER.encode("abc"), 3, zzz=None)
    with pytest.raises(InputError, match=r"Generator has no argument 'max_batch'. Did you mean 'max_batch_size'"):
        scripted.make_generator(scripted.make_tokenizer(tmp_path), max_batch=3)


def test_arguments_of_other_calls_warn(tmp_path: Path) -> None:
    """Several published programs pass it to Job; exllamav2 ignores it."""
    with pytest.warns(
        UserWarning, match=r"Job has no argument 'completion_only' .*: generate\(\) takes it"
    ) as warnings:
        Job(TOKENIZER.encode("abc"), 3, completion_only=True)
    assert warnings[0].filename == __file__
    with pytest.warns(UserWarning, match="'add_bos'"):
        Job(TOKENIZER.encode("abc"), 3, add_bos=False)
    with pytest.warns(UserWarning, match="Generator has no argument 'gen_settings' .*: a job, or generate"):
        generator = scripted.make_generator(scripted.make_tokenizer(tmp_path), gen_settings=Settings())
    assert generator.generate("abc", 3, gen_settings=Settings.greedy()) == "abcdef"


def test_async_classes_refuse_unknown_arguments(tmp_path: Path) -> None:
    async def create() -> None:
        generator = scripted.make_generator(scripted.make_tokenizer(tmp_path))
        async_generator = AsyncGenerator(generator.model, generator.cache, generator.tokenizer)
        with pytest.raises(InputError, match=r"Job has no argument 'max_tokens'. Did you mean 'max_new_tok"):
            AsyncJob(async_generator, TOKENIZER.encode("abc"), 3, max_tokens=3)
        await async_generator.close()

    asyncio.run(create())


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ({"completion_onyl": True}, "Did you mean 'completion_only'?"),
        ({"stop_condition": [5]}, "Did you mean 'stop_conditions'?"),
        ({"temperature": 0.5}, "Set it in gen_settings: Settings(temperature=…)."),
        ({"zzz": None}, "Leave it out."),
    ],
)
def test_generate_warns_of_unknown_arguments(tmp_path: Path, unknown: dict[str, Any], hint: str) -> None:
    generator = scripted.make_generator(scripted.make_tokenizer(tmp_path))
    with pytest.warns(UserWarning, match="has no argument") as warnings:
        assert generator.generate("abc", 3, gen_settings=Settings.greedy(), **unknown) == "abcdef"
    (name,) = unknown
    (warning,) = warnings
    assert str(warning.message) == f"generate() has no argument {name!r} and goes on without it. {hint}"
    assert warning.filename == __file__  # where it was called
    with pytest.warns(UserWarning, match="has no argument") as warnings:
        generator.generate(["abc", "d"], 3, **unknown, yyy=1)
    assert len(warnings) == 2  # one for each name, not for each prompt


def test_old_arguments_may_be_none(tmp_path: Path) -> None:
    generator = scripted.make_generator(scripted.make_tokenizer(tmp_path))
    options: dict[str, Any] = {"loras": None, "input_embeddings": None, "embeddings": None}
    assert generator.generate("abc", 3, gen_settings=Settings.greedy(), **options) == "abcdef"
    Job(TOKENIZER.encode("abc"), 3, **options)
    for name, value, remedy in (
        ("stop_token", 0, "use stop_conditions"),
        ("num_tokens", 3, "use max_new_tokens"),
        ("input_embeddings", torch.zeros(1, 2, 3), "use embeddings"),
        ("input_ids", TOKENIZER.encode("abc"), "use a Job, which takes ids"),
    ):
        with pytest.raises(InputError, match=rf"generate\(\) takes no {name}: {remedy}"):
            generator.generate("abc", 3, **{name: value})
    with pytest.raises(InputError, match="embeddings must be a list with one entry for each of 2 prompts"):
        generator.generate(["abc", "def"], 3, embeddings=[None])


@pytest.mark.parametrize("name", ["max_batch_size", "max_seq_len", "max_chunk_size", "max_q_size", "max_ngram"])
def test_generator_sizes_must_be_whole_numbers(fixtures_dir: Path, name: str) -> None:
    model = Model(Config(fixtures_dir / "tiny-lm"))
    model.load()
    for size in ("x", 1.5, -1):
        with pytest.raises(InputError, match=rf"{name} must be a whole number of .*, found {size!r}"):
            Generator(model, Cache(model, max_seq_len=256), None, use_ngram_draft=True, **{name: size})


def test_generate_passes_job_arguments_on(tmp_path: Path) -> None:
    generator = scripted.make_generator(scripted.make_tokenizer(tmp_path))
    options: dict[str, Any] = {"identifier": 7, "max_skips": None, "return_probs": True, "salt": "ann"}
    _, last = generator.generate(["abc", "def"], 2, gen_settings=Settings.greedy(), return_last_results=True, **options)
    assert [result["identifier"] for result in last] == [7, 7]
    assert all("token_probs" in result for result in last)


@pytest.mark.parametrize("prefer_eos", [False, True])
def test_a_finished_grammar_ends_a_text_that_should_be_longer(tmp_path: Path, prefer_eos: bool) -> None:
    """`min_new_tokens` suppresses stop tokens, except where a filter allows no other token."""
    texts = scripted.make_tokenizer(tmp_path)
    generator = scripted.make_generator(texts)
    other_jobs = [scripted.make_job("abc", 12), scripted.make_job("xyz", 12)]
    options: dict[str, Any] = {
        "min_new_tokens": 10, "stop_conditions": [0], "filter_prefer_eos": prefer_eos,
    }  # fmt: skip
    grammar = scripted.make_job("abc", 12, filters=[RegexFilter(texts, "[x-z]{2}")], **options)
    option = scripted.make_job("abc", 12, filters=[SelectFilter(None, texts, ["cat"])], **options)
    results = scripted.streaming_results(scripted.run(generator, *other_jobs, grammar, option))
    last = {result["serial"]: result for result in results if result["eos"]}
    assert [last[n]["full_completion"] for n in range(2)] == ["defghijklmno", "abcdefghijkl"]
    assert (last[2]["eos_reason"], len(last[2]["full_completion"])) == ("end_filter", 2)
    assert (last[3]["eos_reason"], last[3]["full_completion"]) == ("end_filter", "cat")
    assert last[2]["new_tokens"] == 3
