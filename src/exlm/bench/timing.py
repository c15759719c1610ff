"""Times a loaded model in `Generator`: prompts, and decode steps with sampling and text, all greedy.

A `TimedModel` also sums up the time in its forward passes; for the rest of a step the device is idle.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import CacheBase, Generator, Job, Settings, Tokenizer
from ..model import Model
from ..model.model_runner import PagedModelRunner
from .synthetic import token_cycle

FORWARD_METHODS = ("prefill", "decode", "decode_next")
"""The runner's methods that run a forward pass."""

WARMUP_STEPS = 3
"""Decode steps before timing starts: kernels may still be compiled in them."""

TAIL_TOKENS = 64
"""Tokens that each row is allowed beyond those timed: steps are slower or shorter near the end of a job."""


class ForwardTimer:
    """Sums up the duration of forward passes, measured on the device."""

    def __init__(self) -> None:
        self._host_seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        self._host_seconds = 0.0
        self._events.clear()

    def wrap(self, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Make a function add its duration to the sum, without synchronising with the device."""
        return self._with_events(forward) if device.type == "cuda" else self._on_host(forward)

    def seconds(self) -> float:
        """Seconds in passes since the last reset; synchronises with a GPU."""
        if self._events:
            torch.cuda.synchronize()
        return float(self._host_seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3)

    def _on_host(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = forward(*args)
            self._host_seconds += time.perf_counter() - start
            return result

        return timed

    def _with_events(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        cuda: Any = torch.cuda  # its events have no types

        def timed(*args: Any) -> Any:
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            result = forward(*args)
            end.record()
            self._events.append((begin, end))
            return result

        return timed


class TimedRunner:
    """Wraps a runner and times its forward passes."""

    def __init__(self, inner: PagedModelRunner, timer: ForwardTimer) -> None:
        self._inner = inner
        for method_name in FORWARD_METHODS:
            setattr(self, method_name, timer.wrap(getattr(inner, method_name), inner.device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TimedModel(Model):
    """A model whose runners time their forward passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forward_timer = ForwardTimer()

    def runner(self, cache: CacheBase) -> Any:
        """The model's runner, with timing."""
        return TimedRunner(super().runner(cache), self.forward_timer)


class Timing(NamedTuple):
    """Wall-clock time of a prompt or of some decode steps."""

    seconds: float
    tokens: int
    steps: int
    forward_seconds: float  # part of `seconds` spent in forward passes


def tokens_needed(batch: int, context: int, new: int) -> int:
    """Cache size for a batch, in tokens: whole pages for every row."""
    return batch * -(-(context + new + TAIL_TOKENS) // CacheBase.page_size) * CacheBase.page_size


def prompt_ids(row: int, count: int, vocab: int, repetitive: bool = False) -> torch.Tensor:
    """(1, count) ordinary tokens, different for each row; repetitive ones cycle after the first token."""
    span = max(1, vocab - 300)
    low = min(300, vocab - span)
    if repetitive:
        cycle = token_cycle(vocab)
        return torch.tensor([[low + row % span, *(cycle[i % len(cycle)] for i in range(count - 1))]])
    return torch.tensor([[low + (7919 * (i + 1) * (row + 3)) % span for i in range(count)]])


class TimedGenerator:
    """Times the jobs of a generator that has a cache of its own."""

    def __init__(
        self, model: TimedModel, tokenizer: Tokenizer, cache: CacheBase, rows: int, ngram: bool = False
    ) -> None:
        self._forward_timer = model.forward_timer
        self._vocab = model.config.vocab_size
        self._generator = Generator(model, cache, tokenizer, max_batch_size=rows, use_ngram_draft=ngram)

    def time_prompt(self, length: int, row: int = 0) -> Timing:
        """Time a prompt up to its first token."""
        self._forward_timer.reset()
        job = self._job(row, length, 1)
        start = time.perf_counter()
        self._generator.enqueue(job)
        while self._generator.num_remaining_jobs():
            self._step()
        return Timing(time.perf_counter() - start, length, 1, self._forward_timer.seconds())

    def time_decode(self, batch: int, context: int, new: int, repetitive: bool = False) -> Timing:
        """Time at least `new` tokens for each row of a full batch, after prompts of `context` tokens."""
        jobs = [self._job(row, context, new + TAIL_TOKENS, repetitive) for row in range(batch)]
        self._generator.enqueue(jobs)
        while not all(job.new_tokens for job in jobs):
            self._step()
        for _ in range(WARMUP_STEPS):
            self._step()
        self._forward_timer.reset()
        before, steps = sum(job.new_tokens for job in jobs), 0
        target = min(job.new_tokens for job in jobs) + new
        start = time.perf_counter()
        while min([job.new_tokens for job in jobs]) < target:
            self._step()
            steps += 1
        seconds = time.perf_counter() - start
        generated = sum(job.new_tokens for job in jobs) - before
        self._generator.clear_queue()
        return Timing(seconds, generated, steps, self._forward_timer.seconds())

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
