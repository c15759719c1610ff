"""Greedy answers of a real 4.0 bpw model have the same ids in every configuration.

Alone or in a batch, in long chunks or short, from a cold cache or a warm one, with drafts, with batch mates
that are cancelled. The perplexity of coded caches, token by token, is in tests/model/test_cache_quality.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from exlm import (
    Cache,
    CacheFP8,
    CacheQ4,
    CacheQ6,
    CacheQ8,
    Config,
    Generator,
    Job,
    Model,
    Settings,
    Tokenizer,
)

NEW = 10
STARTS = [
    "The history of the city",
    "import os\n\ndef main(",
    "In 1995, the",
    "The first season of the ser",
    "def __init__(self",
    "A",
]
LONG = "The history of the city of London, and of the people who lived there. " * 20
"""Over 256 tokens, so that it needs several chunks of 256."""

Ids = list[int]
Half = partial(Cache, dtype="float16")


class GreedyReference:
    """A model, and its greedy answers to each prompt computed with plain forward passes, without a generator."""

    def __init__(self, folder: Path) -> None:
        self.model = Model(Config(folder))
        self.model.load()
        self.tokenizer = Tokenizer(self.model.config)
        self.prompts = [self.tokenizer.encode(text) for text in [*STARTS, LONG]]
        self.expected = [self.forward(self.model, prompt) for prompt in self.prompts]

    @staticmethod
    def forward(model: Model, prompt: torch.Tensor) -> Ids:
        cache = Half(model, max_seq_len=1024)
        logits = model.forward(prompt, cache, last_id_only=True)
        ids: Ids = []
        while len(ids) < NEW:
            ids.append(int(logits[0, -1].argmax()))
            logits = model.forward(torch.tensor([ids[-1:]]), cache)
        return ids

    def generator(self, kind: Any = Half, tokens: int = 16384, **options: Any) -> Generator:
        return Generator(self.model, kind(self.model, max_seq_len=tokens), self.tokenizer, **options)

    def jobs(self, indices: Iterable[int], max_new_tokens: int = NEW) -> list[Job]:
        return [Job(self.prompts[i], max_new_tokens, gen_settings=Settings.greedy()) for i in indices]


class TokenCollector:
    """Collects the ids that jobs have generated so far."""

    def __init__(self, generator: Generator, jobs: Sequence[Job]) -> None:
        self.generator = generator
        self.tokens: dict[int, Ids] = {id(job): [] for job in jobs}
        generator.enqueue(list(jobs))

    def step(self) -> None:
        for result in self.generator.iterate():
            if result["stage"] == "streaming" and "token_ids" in result:
                self.tokens[id(result["job"])] += result["token_ids"][0].tolist()

    def tokens_of(self, jobs: Sequence[Job]) -> list[Ids]:
        return [self.tokens[id(job)] for job in jobs]


def finish(generator: Generator, jobs: Sequence[Job]) -> list[Ids]:
    """Run the jobs to their end; return the ids of each."""
    collector = TokenCollector(generator, jobs)
    while generator.num_remaining_jobs():
        collector.step()
    return collector.tokens_of(jobs)


@pytest.fixture(scope="module")
def reference(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> GreedyReference:
    folder = fixtures_dir / "tiny-lm-exl2-4.0bpw"
    return GreedyReference(folder)


def test_single_job_cold_and_from_the_prefix_cache(reference: GreedyReference) -> None:
    """One by one in chunks of 256; then again in one batch, where no prompt is computed anew."""
    generator = reference.generator(max_chunk_size=256)
    every_prompt = range(len(reference.prompts))
    assert [finish(generator, reference.jobs([i]))[0] for i in every_prompt] == reference.expected
    warm = reference.jobs(every_prompt)
    assert finish(generator, warm) == reference.expected
    assert [job.cached_tokens for job in warm] == [prompt.shape[1] - 1 for prompt in reference.prompts]


@pytest.mark.parametrize("size", [2, 7, 32])
@pytest.mark.parametrize("chunk", [256, 2048])
def test_in_batches_of_any_size(reference: GreedyReference, size: int, chunk: int) -> None:
    """The cache is cold, and the long prompt, in chunks of 256, joins the batch a step later."""
    generator = reference.generator(max_chunk_size=chunk)
    indices = [(6 - i) % len(reference.prompts) for i in range(size)]
    assert finish(generator, reference.jobs(indices)) == [reference.expected[i] for i in indices]


@pytest.mark.parametrize("drafted", ["ngram", "model"])
def test_with_speculative_decoding(reference: GreedyReference, drafted: str) -> None:
    """Alone and in a batch, cold and warm."""
    options: dict[str, Any] = {"use_ngram_draft": True, "max_ngram": 2}  # so that one token is enough for a guess
    if drafted == "model":
        options = {"draft_model": reference.model, "draft_cache": Half(reference.model, max_seq_len=16384)}
    engine = reference.generator(**options)
    every_prompt = range(len(reference.prompts))
    assert finish(engine, reference.jobs([6])) == [reference.expected[6]]
    jobs = reference.jobs(every_prompt)
    assert finish(engine, jobs) == reference.expected
    assert sum(job.accepted_draft_tokens for job in jobs) > (0 if drafted == "ngram" else 4 * len(jobs))


@pytest.mark.parametrize("seed", [0, 1])
def test_with_cancelled_batch_mates(reference: GreedyReference, seed: int) -> None:
    """Jobs are cancelled at random steps, some before they start; the cache is too small for all of them."""
    rng = Random(seed)
    generator = reference.generator(tokens=2048, max_batch_size=6, max_chunk_size=256)
    indices = [rng.randrange(len(reference.prompts)) for _ in range(6)]
    to_finish = reference.jobs(indices)
    to_cancel = reference.jobs((rng.randrange(len(reference.prompts)) for _ in range(12)), max_new_tokens=200)
    jobs = [*to_finish, *to_cancel]
    rng.shuffle(jobs)
    collector = TokenCollector(generator, jobs)
    while not all(job.is_finished for job in to_finish):
        collector.step()
        if to_cancel and rng.random() < 0.5:
            generator.cancel(to_cancel.pop(rng.randrange(len(to_cancel))))
    generator.clear_queue()
    assert collector.tokens_of(to_finish) == [reference.expected[i] for i in indices]


@pytest.mark.parametrize("kind", [CacheQ8, CacheQ6, CacheQ4, CacheFP8])
def test_quantised_caches_single_and_batched(reference: GreedyReference, kind: Any) -> None:
    indices = [0, 2, 6]
    generator = reference.generator(kind, 4096)
    single = [finish(generator, reference.jobs([i], max_new_tokens=6))[0] for i in indices]
    assert finish(reference.generator(kind, 4096), reference.jobs(indices, max_new_tokens=6)) == single
