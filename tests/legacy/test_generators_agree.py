"""Every generator gives the same tokens for the same prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from exlm import AsyncGenerator, AsyncJob, Cache, Generator, Job, Model, Settings, Tokenizer
from exlm.legacy import BaseGenerator, StreamingGenerator

PROMPTS = ["import os\n\ndef main(", "The first season of the ser"]
NEW = 16


def oracle(model: Model, ids: torch.Tensor) -> list[int]:
    """Greedy tokens, one forward pass over the whole text for each."""
    start = ids.shape[1]
    for _ in range(NEW):
        ids = torch.cat((ids, model.forward(ids, last_id_only=True)[:, -1].argmax(-1, keepdim=True)), 1)
    found: list[int] = ids[0, start:].tolist()
    return found


def from_base(model: Model, tokenizer: Tokenizer, prompt: str) -> list[int]:
    generator = BaseGenerator(model, Cache(model, max_seq_len=100), tokenizer)
    generator.generate_simple(prompt, Settings.greedy(), NEW, stop_token=None)
    assert generator.sequence_ids is not None
    found: list[int] = generator.sequence_ids[0, -NEW:].tolist()
    return found


def from_streaming(model: Model, tokenizer: Tokenizer, prompt: str, **options: Any) -> list[int]:
    generator = StreamingGenerator(model, Cache(model, max_seq_len=100), tokenizer, **options)
    generator.set_stop_conditions([])
    generator.begin_stream_ex(tokenizer.encode(prompt), Settings.greedy())
    return [int(generator.stream_ex()["chunk_token_ids"]) for _ in range(NEW)]


def from_dynamic(model: Model, tokenizer: Tokenizer, prompt: str) -> list[int]:
    generator = Generator(model, Cache(model, max_seq_len=256), tokenizer)
    generator.enqueue(Job(tokenizer.encode(prompt), NEW, gen_settings=Settings.greedy()))
    found: list[int] = []
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if "token_ids" in result:
                found += result["token_ids"][0].tolist()
    return found


async def from_async(model: Model, tokenizer: Tokenizer, prompt: str) -> list[int]:
    generator = AsyncGenerator(model, Cache(model, max_seq_len=256), tokenizer)
    found: list[int] = []
    async for result in AsyncJob(generator, tokenizer.encode(prompt), NEW, gen_settings=Settings.greedy()):
        if "token_ids" in result:
            found += result["token_ids"][0].tolist()
    await generator.close()
    return found


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens(prompt: str, model: Model, draft: Model, tokenizer: Tokenizer) -> None:
    expected = oracle(model, tokenizer.encode(prompt))
    assert from_base(model, tokenizer, prompt) == expected
    assert from_streaming(model, tokenizer, prompt) == expected
    assert from_streaming(model, tokenizer, prompt, draft_model=draft) == expected
    assert from_dynamic(model, tokenizer, prompt) == expected
    assert asyncio.run(from_async(model, tokenizer, prompt)) == expected


def test_healing(model: Model, tokenizer: Tokenizer) -> None:
    prompt, greedy = "The first season of the ser", Settings.greedy()
    whole = Generator(model, Cache(model, max_seq_len=256), tokenizer)
    expected = whole.generate(prompt, 11, gen_settings=greedy, token_healing=True)
    base = BaseGenerator(model, Cache(model, max_seq_len=100), tokenizer)
    assert base.generate_simple(prompt, greedy, 12, token_healing=True) == expected
    stream = StreamingGenerator(model, Cache(model, max_seq_len=100), tokenizer)
    stream.begin_stream_ex(tokenizer.encode(prompt), greedy, token_healing=True)
    assert prompt + "".join(stream.stream_ex()["chunk"] for _ in range(11)) == expected
