"""The benchmark: load or make up a model, measure the machine's limits, then the model, and report."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import CACHES, Cache, Config, InputError, Summary, Tokenizer, env, spec
from ..model.devices import free_bytes, pick_device
from .report import Report, Row, bound
from .roofline import Roofline, measure_roofline
from .shapes import SHAPES
from .synthetic import SyntheticCheckpoint, write_model_folder
from .synthetic_weights import weight_format
from .system_info import facts, peak_memory, reset_peak_memory, seconds_since_start
from .timers import TimedModel
from .workload import TAIL_TOKENS, Timing, Workload, free_memory, tokens_needed

PROMPT_REPEATS = 3
"""Prompts that are timed, whose median counts, and as many before them for warm-up: CUDA graphs are captured
first, and MoE kernels meet new sizes."""


MEMORY_RESERVE = 1 << 30
"""Bytes of device memory that a cache must leave for the model's workspace."""

ProgressCallback = Callable[[str, int, int], object]
"""(description of the current step, steps done, steps in all)"""


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to measure: every batch size at the first context, every context with the first batch size."""

    model: Path | None = None  # or else a shape
    shape: str = "llama-2-7b"
    format: str = "exl2"
    bits: float | None = None
    device: str | None = None
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (512,)
    caches: tuple[str, ...] = ("fp16",)
    prompt: int = 2048
    tokens: int = 64
    ngram: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.model is None and self.shape not in SHAPES:
            raise InputError(f"--shape must be one of {', '.join(SHAPES)}, found {self.shape!r}.")
        if unknown := [name for name in self.caches if name not in CACHES]:
            raise InputError(f"--cache must be of {', '.join(CACHES)}, found {', '.join(unknown)}.")
        if not (self.batches and self.contexts and self.caches):
            raise InputError("There must be at least one batch, one context and one cache.")
        if min(*self.batches, *self.contexts, self.prompt, self.tokens) < 1:
            raise InputError("Batches, contexts, the prompt and the tokens are all at least 1.")

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt, *self.contexts) + self.tokens + TAIL_TOKENS

    def rows(self) -> list[Row]:
        """The measurements to make, in order, without results."""
        first, *longer = self.contexts
        shapes = [(batch, first) for batch in self.batches]
        shapes += [(self.batches[0], context) for context in longer]
        kinds = ["decode", "ngram"] if self.ngram else ["decode"]
        prompt = Row("prompt", self.caches[0], self.prompt, 1)
        return [prompt] + [
            Row(work, cache, context, batch)
            for cache in self.caches
            for batch, context in shapes
            for work in kinds
        ]


def run(config: BenchmarkConfig, on_progress: ProgressCallback = lambda *_: None) -> Report:
    """Make all measurements."""
    env.cap_onednn_isa()  # must come before torch computes anything
    device = pick_device(config.device or env.default_device())
    planned = config.rows()
    total = len(planned) + 3
    on_progress("loading", 0, total)
    with loaded_model(config, device) as (model, load_seconds):
        tokenizer = Tokenizer(model.config)
        first = _first_token(model, tokenizer)
        load_memory = peak_memory(device)
        on_progress("the machine", 2, total)
        summary, limits = model.summary(), measure_roofline(device, model.backends[0].dtype)
        reset_peak_memory(device)  # what measuring the machine took does not count
        bench = _Benchmark(model, tokenizer, summary, limits, device, *_step_costs(model, summary))
        rows = []
        for done, row in enumerate(planned, 3):
            words = f"{row.work}, {row.cache} cache, {row.batch} × {row.context}"
            on_progress(words, done, total)
            rows.append(bench.measure(row, config))
        on_progress("done", total, total)
        memory = max(load_memory, peak_memory(device))
        return _report(config, bench, tuple(rows), load_seconds, first, memory)


@contextmanager
def loaded_model(plan: BenchmarkConfig, device: torch.device) -> Iterator[tuple[TimedModel, float]]:
    """Load the model for the block; yields it and the seconds that took."""
    with tempfile.TemporaryDirectory(prefix="exlm-bench-") as folder:
        path = plan.model
        if path is None:
            path = write_model_folder(Path(folder), SHAPES[plan.shape], plan.longest_sequence)
        config = Config(path)
        _check_length(plan, config)
        config.device = str(device)
        config.max_seq_len = max(
            config.max_seq_len, plan.longest_sequence
        )  # the sequence goes a few tokens beyond the last context
        model = TimedModel(config)
        if plan.model is None:
            stored = weight_format(plan.format, plan.bits)
            model.open_checkpoint = lambda frozen: SyntheticCheckpoint(
                frozen.spec, stored, repetitive=plan.ngram
            )
        start = time.perf_counter()
        model.load()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        try:
            yield model, time.perf_counter() - start
        finally:
            model.unload()


def _check_length(plan: BenchmarkConfig, config: Config) -> None:
    """Refuse sequences longer than the model's context; random weights get any length."""
    for option, longest in (("--context", max(plan.contexts)), ("--prompt", plan.prompt)):
        if longest > config.max_seq_len:
            raise InputError(
                f"{option} {longest} is more than this model has: {config.max_seq_len} tokens. Ask for less, "
                "or measure a --shape, which can be of any length."
            )


def _first_token(model: TimedModel, tokenizer: Tokenizer) -> float | None:
    """Seconds from the start of this process to its first token."""
    Workload(model, tokenizer, Cache(model, max_seq_len=256), 1).prompt(8)
    return seconds_since_start()


@dataclass(frozen=True)
class _Benchmark:
    """A loaded model, and the limits it is compared with."""

    model: TimedModel
    tokenizer: Tokenizer
    summary: Summary
    roofline: Roofline
    device: torch.device
    bytes_per_step: int  # of the weights that a decode step reads
    products_per_token: int  # multiply-adds for one token

    def measure(self, row: Row, plan: BenchmarkConfig) -> Row:
        """Make one measurement; the row is returned without results if its cache does not fit."""
        kind = CACHES[row.cache]
        # Every timed prompt is a different one, so that none is found in the prefix cache.
        times = PROMPT_REPEATS + 1 if row.work == "prompt" else 1
        tokens = tokens_needed(row.batch, row.context, plan.tokens) * times
        held = sum(kind(self.model, max_seq_len=tokens, lazy=True).layer_bytes())
        free_memory(self.device)
        if held + MEMORY_RESERVE > free_bytes(self.device):
            return row
        work = Workload(
            self.model, self.tokenizer, kind(self.model, max_seq_len=tokens), row.batch, row.work == "ngram"
        )
        if row.work == "prompt":
            timings = [work.prompt(row.context, row=other) for other in range(2 * PROMPT_REPEATS)]
            return self._rated(row, sorted(timings[PROMPT_REPEATS:])[PROMPT_REPEATS // 2], 0.0, row.context)
        before = max(1, row.context - plan.tokens // 2)  # centre the timed steps on the context
        timing = work.decode(row.batch, before, plan.tokens, plan.ngram)
        seen = row.batch * (before + plan.tokens / 2)
        return self._rated(row, timing, held / tokens * seen, row.batch)

    def _rated(self, row: Row, timing: Timing, cached: float, products: int) -> Row:
        """Turn a timing into rates and shares of the limits; a step also reads `cached` bytes of KV cache."""
        step = timing.seconds / timing.steps
        read = self.bytes_per_step + round(cached)
        idle = max(0.0, 1 - timing.model_seconds / timing.seconds)
        bandwidth = read / step / self.roofline.bandwidth
        share = 2 * self.products_per_token * products / step / self.roofline.flops
        return Row(
            row.work,
            _cache_name(row.cache, self.model.cache_dtype),
            row.context,
            row.batch,
            timing.tokens / timing.seconds,
            step,
            read,
            bandwidth,
            share,
            idle,
            bound(bandwidth, share, idle, self.device.type == "cuda"),
            timing.tokens / timing.steps / row.batch,
        )


def _step_costs(model: TimedModel, summary: Summary) -> tuple[int, int]:
    """(bytes of weights a decode step reads, as stored in files; multiply-adds for one token).

    Of a mixture of experts those that one token uses count; a tied head has the embedding's bytes.
    """
    source = model.open_checkpoint(model.config.freeze())
    read = products = 0.0
    for m in summary.matrices:
        share = 1.0
        if ".experts." in m.role:
            moe = summary.spec.layers[int(m.role.split(".")[1])].mlp
            share = moe.active / moe.experts if isinstance(moe, spec.Moe) else 1.0
        read += share * (m.nbytes or source.describe("embed")[1])
        products += share * m.in_features * m.out_features
    return round(read), round(products)


def _cache_name(name: str, dtype: torch.dtype) -> str:
    """The cache type to show: fp16 is bf16 if the model computes in that."""
    return "bf16" if name == "fp16" and dtype is torch.bfloat16 else name


def _report(
    plan: BenchmarkConfig,
    bench: _Benchmark,
    rows: tuple[Row, ...],
    load: float,
    first: float | None,
    memory: int,
) -> Report:
    summary, device = bench.summary, bench.device
    layers = [m for m in summary.matrices if m.role != "head"]
    forms = Counter(m.form for m in layers)
    return Report(
        model=plan.shape if plan.model is None else plan.model.name,
        form=forms.most_common(1)[0][0],
        parameters=summary.parameters,
        weights=bench.bytes_per_step,
        bits=8 * sum(m.nbytes for m in layers) / sum(m.in_features * m.out_features for m in layers),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        backends=tuple(name for name, _ in Counter(m.backend for m in summary.matrices).most_common()),
        threads=torch.get_num_threads(),
        load=load,
        first=first,
        memory=memory,
        bandwidth=bench.roofline.bandwidth,
        products=bench.roofline.flops,
        rows=rows,
        system={fact.name: fact.value for fact in facts()},
    )
