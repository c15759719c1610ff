"""Measures the wall-clock time of a loaded model in `Generator`: greedy, with sampling and text."""

from __future__ import annotations

import gc
import time
from typing import NamedTuple

import torch

from .. import CacheBase, Generator, Job, Settings, Tokenizer
from .synthetic import token_cycle
from .timers import TimedModel

WARMUP_STEPS = 3
"""Decode steps before timing starts: kernels may still be compiled in them."""

TAIL_TOKENS = 64
"""Tokens that each row is allowed beyond those timed: steps are slower or shorter near the end of a job."""


class Timing(NamedTuple):
    """Wall-clock time of a prompt or of some decode steps."""

    seconds: float
    tokens: int
    steps: int
    model_seconds: float  # part of `seconds` spent in forward passes


def tokens_needed(batch: int, context: int, new: int) -> int:
    """Cache size for a batch, in tokens: whole pages for every row."""
    return batch * -(-(context + new + TAIL_TOKENS) // CacheBase.page_size) * CacheBase.page_size


def prompt_ids(row: int, count: int, vocab: int, repetitive: bool = False) -> torch.Tensor:
    """(1, count) ordinary tokens, different for each row; repetitive ones cycle after the first token."""
    span = max(1, vocab - 300)
    low = min(300, vocab - span)
    if repetitive:
        said = token_cycle(vocab)
        return torch.tensor([[low + row % span, *(said[i % len(said)] for i in range(count - 1))]])
    return torch.tensor([[low + (7919 * (i + 1) * (row + 3)) % span for i in range(count)]])


class Workload:
    """A generator with a cache of its own."""

    def __init__(
        self, model: TimedModel, tokenizer: Tokenizer, cache: CacheBase, rows: int, ngram: bool = False
    ) -> None:
        self._watch = model.pass_timer
        self._vocab = model.config.vocab_size
        self._generator = Generator(model, cache, tokenizer, max_batch_size=rows, use_ngram_draft=ngram)

    def prompt(self, length: int, row: int = 0) -> Timing:
        """Time a prompt up to its first token."""
        self._watch.reset()
        job = self._job(row, length, 1)
        start = time.perf_counter()
        self._generator.enqueue(job)
        while self._generator.num_remaining_jobs():
            self._step()
        return Timing(time.perf_counter() - start, length, 1, self._watch.seconds())

    def decode(self, batch: int, context: int, new: int, repetitive: bool = False) -> Timing:
        """Time at least `new` tokens for each row of a full batch, after prompts of `context` tokens."""
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
        """One `iterate()`; raises the error of a job that failed."""
        for result in self._generator.iterate():
            if result["stage"] == "streaming" and "error" in result:
                raise result["error"]

    def _job(self, row: int, count: int, new: int, repetitive: bool = False) -> Job:
        ids = prompt_ids(row, count, self._vocab, repetitive)
        return Job(ids, new, gen_settings=Settings.greedy())


def free_memory(device: torch.device) -> None:
    """Free unreferenced memory, on the device as well."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
