"""A loaded model put to work through `Generator`: sampling and text included, greedy, timed by the wall.

What the times mean is said elsewhere.
"""

from __future__ import annotations

import gc
import time
from typing import NamedTuple

import torch

from .. import CacheBase, Generator, Job, Settings, Tokenizer
from .synthetic import token_cycle
from .timers import TimedModel

PAGE = 256
WARMUP_STEPS = 3
"""Steps of a batch that are not counted: kernels may still be made in them."""

TAIL_TOKENS = 64
"""Tokens that a row could go on for: at the end of a text passes may be shorter, and are not counted."""


class Timing(NamedTuple):
    """What a stretch of work took."""

    seconds: float
    tokens: int
    steps: int
    model_seconds: float  # seconds of it in the model


def tokens_needed(batch: int, context: int, new: int) -> int:
    """Whole pages of every row."""
    return batch * -(-(context + new + TAIL_TOKENS) // PAGE) * PAGE


def prompt_ids(row: int, count: int, vocab: int, repetitive: bool = False) -> torch.Tensor:
    """(1, count) plain tokens, others for each row; or the same few again and again, but for the first."""
    span = max(1, vocab - 300)
    low = min(300, vocab - span)
    if repetitive:
        said = token_cycle(vocab)
        return torch.tensor([[low + row % span, *(said[i % len(said)] for i in range(count - 1))]])
    return torch.tensor([[low + (7919 * (i + 1) * (row + 3)) % span for i in range(count)]])


class Workload:
    """One generator over a cache of its own."""

    def __init__(
        self, model: TimedModel, tokenizer: Tokenizer, cache: CacheBase, rows: int, ngram: bool = False
    ) -> None:
        self._watch = model.pass_timer
        self._vocab = model.config.vocab_size
        self._generator = Generator(model, cache, tokenizer, max_batch_size=rows, use_ngram_draft=ngram)

    def prompt(self, length: int, row: int = 0) -> Timing:
        """From a prompt to its first token."""
        self._watch.reset()
        job = self._job(row, length, 1)
        start = time.perf_counter()
        self._generator.enqueue(job)
        while self._generator.num_remaining_jobs():
            self._step()
        return Timing(time.perf_counter() - start, length, 1, self._watch.seconds())

    def decode(self, batch: int, context: int, new: int, repetitive: bool = False) -> Timing:
        """At least `new` tokens for each row of a full batch, behind prompts of `context` tokens."""
        jobs = [self._job(row, context, new + TAIL_TOKENS, repetitive) for row in range(batch)]
        self._generator.enqueue(jobs)
        while not all(job.new_tokens for job in jobs):
            self._step()
        for _ in range(WARMUP_STEPS):
            self._step()
        self._watch.reset()
        before, steps = sum(job.new_tokens for job in jobs), 0
        wanted = min(job.new_tokens for job in jobs) + new
        start = time.perf_counter()
        while min([job.new_tokens for job in jobs]) < wanted:
            self._step()
            steps += 1
        seconds = time.perf_counter() - start
        made = sum(job.new_tokens for job in jobs) - before
        self._generator.clear_queue()
        return Timing(seconds, made, steps, self._watch.seconds())

    def _step(self) -> None:
        """One round; a job that fails fails the measurement."""
        for result in self._generator.iterate():
            if result["stage"] == "streaming" and "error" in result:
                raise result["error"]

    def _job(self, row: int, count: int, new: int, repetitive: bool = False) -> Job:
        ids = prompt_ids(row, count, self._vocab, repetitive)
        return Job(ids, new, gen_settings=Settings.greedy())


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
