"""A greedy answer of the real 4.0 bpw model is the same ids however it is asked for.

Alone or in company, in long chunks or short, from a cold cache or a warm one, with guesses, with neighbours
that vanish. The perplexity of coded caches, token by token, is in tests/model/test_cache_quality.py.
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
"""Over 256 tokens, so that a chunk of 256 does not hold it."""

Ids = list[int]
Half = partial(Cache, dtype="float16")


class GreedyReference:
    """The model, and what it says to each prompt alone, by the plain forward pass without a generator."""

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
        said: Ids = []
        while len(said) < NEW:
            said.append(int(logits[0, -1].argmax()))
            logits = model.forward(torch.tensor([said[-1:]]), cache)
        return said

    def generator(self, kind: Any = Half, tokens: int = 16384, **options: Any) -> Generator:
        return Generator(self.model, kind(self.model, max_seq_len=tokens), self.tokenizer, **options)

    def jobs(self, indices: Iterable[int], new: int = NEW) -> list[Job]:
        return [Job(self.prompts[i], new, gen_settings=Settings.greedy()) for i in indices]


class TokenCollector:
    """What jobs have told so far, as ids."""

    def __init__(self, machine: Generator, jobs: Sequence[Job]) -> None:
        self.machine = machine
        self.tokens: dict[int, Ids] = {id(job): [] for job in jobs}
        machine.enqueue(list(jobs))

    def step(self) -> None:
        for result in self.machine.iterate():
            if result["stage"] == "streaming" and "token_ids" in result:
                self.tokens[id(result["job"])] += result["token_ids"][0].tolist()

    def tokens_of(self, jobs: Sequence[Job]) -> list[Ids]:
        return [self.tokens[id(job)] for job in jobs]


def finish(machine: Generator, jobs: Sequence[Job]) -> list[Ids]:
    """Run the jobs to their end; the ids each has told."""
    listener = TokenCollector(machine, jobs)
    while machine.num_remaining_jobs():
        listener.step()
    return listener.tokens_of(jobs)


@pytest.fixture(scope="module")
def reference(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> GreedyReference:
    folder = fixtures_dir / "tiny-lm-exl2-4.0bpw"
    return GreedyReference(folder)


def test_single_job_cold_and_from_the_prefix_cache(reference: GreedyReference) -> None:
    """One after the other, in chunks of 256; the second time, all in one batch, nothing is read again."""
    machine = reference.generator(max_chunk_size=256)
    every_prompt = range(len(reference.prompts))
    assert [finish(machine, reference.jobs([i]))[0] for i in every_prompt] == reference.expected
    warm = reference.jobs(every_prompt)
    assert finish(machine, warm) == reference.expected
    assert [job.cached_tokens for job in warm] == [prompt.shape[1] - 1 for prompt in reference.prompts]


@pytest.mark.parametrize("size", [2, 7, 32])
@pytest.mark.parametrize("chunk", [256, 2048])
def test_in_batches_of_any_size(reference: GreedyReference, size: int, chunk: int) -> None:
    """Cold, the long prompt among them, which in chunks of 256 joins a round later."""
    machine = reference.generator(max_chunk_size=chunk)
    places = [(6 - i) % len(reference.prompts) for i in range(size)]
    assert finish(machine, reference.jobs(places)) == [reference.expected[i] for i in places]


@pytest.mark.parametrize("drafted", ["ngram", "model"])
def test_with_speculative_decoding(reference: GreedyReference, drafted: str) -> None:
    """Alone and in a batch, cold and warm."""
    options: dict[str, Any] = {"use_ngram_draft": True}
    if drafted == "model":
        options = {"draft_model": reference.model, "draft_cache": Half(reference.model, max_seq_len=16384)}
    machine = reference.generator(**options)
    every_prompt = range(len(reference.prompts))
    assert finish(machine, reference.jobs([6])) == [reference.expected[6]]
    jobs = reference.jobs(every_prompt)
    assert finish(machine, jobs) == reference.expected
    assert sum(job.accepted_draft_tokens for job in jobs) > (0 if drafted == "ngram" else 4 * len(jobs))


@pytest.mark.parametrize("seed", [0, 1])
def test_with_cancelled_batch_mates(reference: GreedyReference, seed: int) -> None:
    """They come and go at random moments, some before they started, in a cache that is too small for all."""
    dice = Random(seed)
    machine = reference.generator(tokens=2048, max_batch_size=6, max_chunk_size=256)
    places = [dice.randrange(len(reference.prompts)) for _ in range(6)]
    staying = reference.jobs(places)
    going = reference.jobs((dice.randrange(len(reference.prompts)) for _ in range(12)), new=200)
    everyone = [*staying, *going]
    dice.shuffle(everyone)
    listener = TokenCollector(machine, everyone)
    while not all(job.is_finished for job in staying):
        listener.step()
        if going and dice.random() < 0.5:
            machine.cancel(going.pop(dice.randrange(len(going))))
    machine.clear_queue()
    assert listener.tokens_of(staying) == [reference.expected[i] for i in places]


@pytest.mark.parametrize("kind", [CacheQ8, CacheQ6, CacheQ4, CacheFP8])
def test_quantised_caches_single_and_batched(reference: GreedyReference, kind: Any) -> None:
    places = [0, 2, 6]
    machine = reference.generator(kind, 4096)
    alone = [finish(machine, reference.jobs([i], new=6))[0] for i in places]
    assert finish(reference.generator(kind, 4096), reference.jobs(places, new=6)) == alone
