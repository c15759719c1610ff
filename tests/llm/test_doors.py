"""One request through every door (base, streaming, dynamic, async, LLM) gives the same greedy tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from exlm import LLM, AsyncGenerator, AsyncJob, Cache, Job, Lora, MMEmbedding, Settings
from exlm.legacy.base_generator import BaseGenerator
from exlm.legacy.streaming_generator import StreamingGenerator
from tests.docs.places import adapter

PROMPT = "The history of the city"
COUNT = 24
GREEDY = Settings.greedy()


@pytest.fixture(scope="module")
def llm(fixtures_dir: Path) -> Iterator[LLM]:
    with LLM(fixtures_dir / "tiny-lm-gptq-g128-act", max_seq_len=512) as loaded:
        yield loaded


@pytest.fixture
def cache(llm: LLM) -> Cache:
    return Cache(llm.model, max_seq_len=512)


def base(llm: LLM, cache: Cache) -> str:
    generator = BaseGenerator(llm.model, cache, llm.tokenizer)
    text = generator.generate_simple(PROMPT, GREEDY, COUNT, completion_only=True)
    assert isinstance(text, str)
    return text


def streaming(llm: LLM, cache: Cache) -> str:
    generator = StreamingGenerator(llm.model, cache, llm.tokenizer)
    generator.begin_stream_ex(llm.tokenizer.encode(PROMPT), GREEDY, max_new_tokens=COUNT)
    text, ended = "", False
    while not ended:
        chunk = generator.stream_ex()
        text, ended = text + chunk["chunk"], chunk["eos"]
    return text


def dynamic(llm: LLM, cache: Cache) -> str:
    job = Job(llm.tokenizer.encode(PROMPT), COUNT, gen_settings=GREEDY)
    llm.generator.enqueue(job)
    while not job.is_finished:
        llm.generator.iterate()
    return job.full_completion


def asynchronous(llm: LLM, cache: Cache) -> str:
    async def ask() -> str:
        generator = AsyncGenerator(llm.model, cache, llm.tokenizer)
        job = AsyncJob(generator, llm.tokenizer.encode(PROMPT), COUNT, gen_settings=GREEDY)
        text = "".join([str(result.get("text", "")) async for result in job])
        await generator.close()
        return text

    return asyncio.run(ask())


@pytest.mark.parametrize("door", [base, streaming, dynamic, asynchronous])
def test_every_door_leads_to_the_same_text(llm: LLM, cache: Cache, door: Callable[[LLM, Cache], str]) -> None:
    expected = llm.generate(PROMPT, max_new_tokens=COUNT, settings=GREEDY)
    assert expected.new_tokens == COUNT
    assert door(llm, cache) == expected.text


def test_adapters_pass_through(llm: LLM, fixtures_dir: Path, tmp_path: Path) -> None:
    lora = Lora.from_directory(llm.model, adapter(fixtures_dir / "tiny-lm", tmp_path, 3))
    plain, changed = (
        llm.generate(PROMPT, max_new_tokens=8, settings=GREEDY, loras=used).text for used in ([], lora)
    )
    assert plain != changed
    assert llm.generate(PROMPT, max_new_tokens=8, settings=GREEDY).text == plain
    assert "".join(llm.stream(PROMPT, max_new_tokens=8, settings=GREEDY, loras=lora)) == changed
    lora.unload()


def test_embeddings_go_where_their_alias_stands(llm: LLM) -> None:
    table = torch.randn(2, 5, llm.config.hidden_size)
    one, two = (MMEmbedding(llm.model, vectors) for vectors in table)
    around = llm.tokenizer.num_tokens("Look: ") + llm.tokenizer.num_tokens(" there")
    prompts = [f"Look: {picture.text_alias} there" for picture in (one, two)]
    answers = llm.generate(prompts, embeddings=[[one], [two]], max_new_tokens=4, settings=GREEDY)
    assert [answer.prompt_tokens for answer in answers] == [around + 5] * 2
    alone = llm.stream(prompts[1], embeddings=[two], max_new_tokens=4, settings=GREEDY)
    assert "".join(alone) == answers[1].text
    said = llm.chat(f"{one.text_alias}?", embeddings=[one], max_new_tokens=1)
    assert said.prompt_tokens == llm.chat("?", max_new_tokens=1).prompt_tokens + 5
