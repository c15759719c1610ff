"""The benchmark: load a model or make one of random weights, measure it and the machine's roofline, report.

The roofline is the memory bandwidth and the GEMM throughput of the device; each measurement is reported as a
share of both.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from .. import CACHES, Cache, CacheBase, Config, InputError, Summary, Tokenizer, env, spec
from ..errors import Unsupported
from ..generator.state_table import SLOTS_PER_SEQUENCE
from ..kernels.cpu import bindings
from ..model.devices import free_bytes, pick_device
from ..model.loader import CacheOwnerInfo
from .report import BenchmarkRow, Report, bound
from .shapes import SHAPES
from .synthetic import SyntheticCheckpoint, synthetic_format, write_model_folder
from .system_info import describe_hardware, peak_memory, reset_peak_memory, seconds_since_start
from .timing import TAIL_TOKENS, TimedGenerator, TimedModel, Timing, free_memory, tokens_needed

PROMPT_REPEATS = 3
"""Prompts that are timed, of which the median is reported. As many run before them for warm-up, in which CUDA
graphs are captured and MoE kernels run with new sizes for the first time."""

MEMORY_RESERVE = 1 << 30
"""Bytes of device memory that a cache must leave for the model's workspace."""

READ_FLOATS = 64 << 20  # floats a CPU reads to measure its bandwidth
COPY_FLOATS = 1 << 29  # floats a GPU copies to measure its bandwidth
ROOFLINE_REPEATS = 5
INT8_ROUNDS, INT8_REPEATS = 1 << 13, 100  # of byte products, a tenth to half a millisecond each

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

    def planned_rows(self) -> list[BenchmarkRow]:
        """The rows to measure, in order, without results."""
        first, *longer = self.contexts
        sizes = [(batch, first) for batch in self.batches]
        sizes += [(self.batches[0], context) for context in longer]
        return [BenchmarkRow("prompt", self.caches[0], self.prompt, 1)] + [
            BenchmarkRow(work, cache, context, batch)
            for cache in self.caches
            for batch, context in sizes
            for work in (("decode", "ngram") if self.ngram else ("decode",))
        ]


class Roofline(NamedTuple):
    """The measured limits of a device."""

    bandwidth: float  # bytes/s: reading on the CPU, reading and writing of a copy on a GPU
    flops: float  # operations/s of one large matrix product in the model's precision


def run(config: BenchmarkConfig, on_progress: ProgressCallback = lambda *_: None) -> Report:
    """Make all measurements."""
    env.cap_onednn_isa()  # must come before torch computes anything
    device = pick_device(config.device or env.default_device())
    planned = config.planned_rows()
    total = len(planned) + 3
    on_progress("loading", 0, total)
    with loaded_model(config, device) as (model, load_seconds):
        tokenizer = Tokenizer(model.config)
        first_token_seconds = _generate_first_token(model, tokenizer)
        load_memory = peak_memory(device)
        on_progress("the machine", 2, total)
        summary, roofline = model.summary(), measure_roofline(device, model.backends[0].dtype)
        reset_peak_memory(device)  # the memory that measuring the roofline took does not count
        bench = _Benchmark(config, model, tokenizer, summary, roofline, device, *_step_costs(model, summary))
        rows = []
        for done, row in enumerate(planned, 3):
            on_progress(f"{row.work}, {row.cache} cache, {row.batch} × {row.context}", done, total)
            rows.append(bench.measure(row))
        on_progress("done", total, total)
        memory = max(load_memory, peak_memory(device))
        return bench.report(tuple(rows), load_seconds, first_token_seconds, memory)


@contextmanager
def loaded_model(config: BenchmarkConfig, device: torch.device) -> Iterator[tuple[TimedModel, float]]:
    """Load the model that a config names; yields it and the seconds that took, and unloads it at the end."""
    with tempfile.TemporaryDirectory(prefix="exlm-bench-") as folder:
        path = config.model
        if path is None:
            path = write_model_folder(Path(folder), SHAPES[config.shape], config.longest_sequence)
        model_config = Config(path)
        _check_length(config, model_config)
        model_config.device = str(device)
        # The sequence goes a few tokens beyond the last context.
        model_config.max_seq_len = max(model_config.max_seq_len, config.longest_sequence)
        model = TimedModel(model_config)
        if config.model is None:
            fmt = synthetic_format(config.format, config.bits)
            model.open_checkpoint = lambda frozen: SyntheticCheckpoint(frozen.spec, fmt, repetitive=config.ngram)
        start = time.perf_counter()
        model.load()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        try:
            yield model, time.perf_counter() - start
        finally:
            model.unload()


def _check_length(config: BenchmarkConfig, model_config: Config) -> None:
    """Refuse sequences longer than the model's context; random weights get any length."""
    for option, longest in (("--context", max(config.contexts)), ("--prompt", config.prompt)):
        if longest > model_config.max_seq_len:
            raise InputError(
                f"{option} {longest} is more than this model has: {model_config.max_seq_len} tokens. "
                "Ask for less, or measure a --shape, which can be of any length."
            )


def _generate_first_token(model: TimedModel, tokenizer: Tokenizer) -> float | None:
    """Generate a token; returns the seconds from the start of this process."""
    TimedGenerator(model, tokenizer, Cache(model, max_seq_len=256), 1).time_prompt(8)
    return seconds_since_start()


@dataclass(frozen=True)
class _Benchmark:
    """A loaded model, and the limits it is compared with."""

    config: BenchmarkConfig
    model: TimedModel
    tokenizer: Tokenizer
    summary: Summary
    roofline: Roofline
    device: torch.device
    bytes_per_step: int  # of the weights that a decode step reads
    fmas_per_token: int

    def measure(self, row: BenchmarkRow) -> BenchmarkRow:
        """Make one measurement; it is returned without results if its cache does not fit."""
        config, cache_class = self.config, CACHES[row.cache]
        # Every timed prompt is a different one, so that none is found in the prefix cache.
        prompts = PROMPT_REPEATS + 1 if row.work == "prompt" else 1
        tokens = tokens_needed(row.batch, row.context, config.tokens) * prompts
        page_bytes, state_bytes = _cache_bytes(self.model, cache_class, tokens)
        free_memory(self.device)
        if page_bytes + SLOTS_PER_SEQUENCE * row.batch * state_bytes + MEMORY_RESERVE > free_bytes(self.device):
            return row
        cache = cache_class(self.model, max_seq_len=tokens)
        timed = TimedGenerator(self.model, self.tokenizer, cache, row.batch, row.work == "ngram")
        if row.work == "prompt":
            timings = [timed.time_prompt(row.context, row=other) for other in range(2 * PROMPT_REPEATS)]
            return self._with_results(row, sorted(timings[PROMPT_REPEATS:])[PROMPT_REPEATS // 2], 0.0, row.context)
        before = max(1, row.context - config.tokens // 2)  # centre the timed steps on the context
        timing = timed.time_decode(row.batch, before, config.tokens, config.ngram)
        pages_read = page_bytes / tokens * row.batch * (before + config.tokens / 2)
        states_moved = 2 * row.batch * state_bytes  # each is read and written
        return self._with_results(row, timing, pages_read + states_moved, row.batch)

    def _with_results(self, row: BenchmarkRow, timing: Timing, cache_bytes: float, tokens: int) -> BenchmarkRow:
        """The measurement of steps that each move `cache_bytes` of the cache and compute so many `tokens`."""
        step = timing.seconds / timing.steps
        read = self.bytes_per_step + round(cache_bytes)
        idle = max(0.0, 1 - timing.forward_seconds / timing.seconds)
        bandwidth = read / step / self.roofline.bandwidth
        flops = 2 * self.fmas_per_token * tokens / step / self.roofline.flops
        return replace(
            row,
            cache="bf16" if row.cache == "fp16" and self.model.cache_dtype is torch.bfloat16 else row.cache,
            tokens_per_second=timing.tokens / timing.seconds,
            step_seconds=step,
            bytes_read=read,
            bandwidth_share=bandwidth,
            flops_share=flops,
            idle_share=idle,
            bound=bound(bandwidth, flops, idle, self.device.type == "cuda"),
            tokens_per_row_step=timing.tokens / timing.steps / row.batch,
        )

    def report(
        self, rows: tuple[BenchmarkRow, ...], load_seconds: float, first_token: float | None, memory: int
    ) -> Report:
        """The measurements with the facts about the model and the machine."""
        config, summary, device = self.config, self.summary, self.device
        layers = [m for m in summary.matrices if m.role != "head"]
        return Report(
            model=config.shape if config.model is None else config.model.name,
            format=Counter(m.form for m in layers).most_common(1)[0][0],
            parameters=summary.parameters,
            weight_bytes=self.bytes_per_step,
            bits=8 * sum(m.nbytes for m in layers) / sum(m.in_features * m.out_features for m in layers),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            backends=tuple(name for name, _ in Counter(m.backend for m in summary.matrices).most_common()),
            threads=torch.get_num_threads(),
            load_seconds=load_seconds,
            first_token_seconds=first_token,
            peak_memory=memory,
            bandwidth=self.roofline.bandwidth,
            flops=self.roofline.flops,
            rows=rows,
            system=describe_hardware(),
        )


def _cache_bytes(model: TimedModel, cache_class: type[CacheBase], tokens: int) -> tuple[int, int]:
    """(bytes of a cache's pages for so many tokens, bytes of one sequence's recurrent state)."""
    cache = cache_class(model, max_seq_len=tokens, lazy=True)
    shapes = [replace(shape, state=None) for shape in model.cache_shapes]
    pages = cache_class(CacheOwnerInfo(shapes, model.cache_dtype), max_seq_len=tokens, lazy=True)
    return sum(pages.layer_bytes()), cache.state_bytes


def _step_costs(model: TimedModel, summary: Summary) -> tuple[int, int]:
    """(bytes of weights a decode step reads, as stored in files; fused multiply-adds for one token).

    Of a mixture of experts those that one token uses count; a tied head has the embedding's bytes.
    """
    checkpoint = model.open_checkpoint(model.config.freeze())
    read = fmas = 0.0
    for m in summary.matrices:
        share = 1.0
        if ".experts." in m.role:
            moe = summary.spec.layers[int(m.role.split(".")[1])].mlp
            share = moe.active / moe.experts if isinstance(moe, spec.Moe) else 1.0
        read += share * (m.nbytes or checkpoint.describe("embed")[1])
        fmas += share * m.in_features * m.out_features
    return round(read), round(fmas)


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure a device; the CPU with torch's number of threads."""
    if device.type == "cuda":
        return Roofline(_copy_bandwidth(device), _gemm_flops(8192, device, dtype))
    return Roofline(measure_read_bandwidth(), _gemm_flops(1024, device, dtype))


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Device time of `work`: the median of a few runs."""
    work()
    if device.type != "cuda":
        return median(_seconds(work) for _ in range(ROOFLINE_REPEATS))
    cuda: Any = torch.cuda
    times = []
    for _ in range(ROOFLINE_REPEATS):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return median(times)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_read_bandwidth() -> float:
    """Bytes/s that torch's threads read; the best of a few runs: what other programs use is not the memory's limit."""
    numbers = torch.ones(READ_FLOATS)
    numbers.sum()
    return float(numbers.nbytes / min(_seconds(numbers.sum) for _ in range(ROOFLINE_REPEATS)))


def measure_int8_peak(threads: int) -> float | None:
    """Operations/s of byte dot products by so many threads, two for each product; the best of many short runs.

    None where the C kernels cannot be loaded, or their instruction set has no byte dot product.
    """
    try:
        library = bindings.load(env.cache_folder() / "kernels")
    except Unsupported:
        return None
    operations = INT8_ROUNDS * library.int8_peak(1, threads)
    if not operations:
        return None
    return operations / min(_seconds(lambda: library.int8_peak(INT8_ROUNDS, threads)) for _ in range(INT8_REPEATS))


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.ones(COPY_FLOATS, device=device)
    target = torch.empty_like(source)
    return float(2 * source.nbytes / median_seconds(lambda: torch.neg(source, out=target), device))


def _gemm_flops(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return float(2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device))
