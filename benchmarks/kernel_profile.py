"""GPU time of each kernel in decode steps and a prompt: `python -m benchmarks.kernel_profile --shape llama-3-8b`.

A model of random weights runs in `Generator`, first without the profiler, for the time of a step, then with it. The
table has a kernel's launches in a step, its microseconds and its share of all kernels'. With programmatic dependent
launch kernels overlap. Where the busy time is less than the step's, the GPU waited.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from exlm import CACHES, Generator, Job, Settings, Tokenizer
from exlm.bench.benchmark import BenchmarkConfig, loaded_model
from exlm.bench.shapes import SHAPES
from exlm.bench.timing import free_memory, prompt_ids, tokens_needed
from exlm.model import Model

WARMUP_STEPS, TIMED_STEPS, PROFILED_STEPS = 8, 64, 8
MAX_TABLE_ROWS = 24


class KernelTimes(NamedTuple):
    """What the profiler saw."""

    by_kernel: dict[str, tuple[int, float]]  # (launches, microseconds)
    busy: float  # microseconds in which at least one kernel ran


def kernel_times(work: Callable[[], object]) -> KernelTimes:
    """The kernels that `work` runs; of those that start early (PDL), waiting for the one before counts as well."""
    activity: Any = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA, activity.CPU]) as profile:
        work()
        torch.cuda.synchronize()
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    intervals: list[tuple[float, float]] = []
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::", "", event.name)
            found[name][0] += 1
            found[name][1] += event.time_range.elapsed_us()
            intervals.append((event.time_range.start, event.time_range.end))
    busy = end = 0.0
    for start, stop in sorted(intervals):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return KernelTimes({name: (int(count), took) for name, (count, took) in found.items()}, busy)


def table(title: str, times: KernelTimes, steps: int, step_seconds: float) -> Table:
    """Kernels by time."""
    kernels, total = times.by_kernel, sum(took for _, took in times.by_kernel.values())
    result = Table("kernel", "launches", "µs", "share", title=title, box=SIMPLE_HEAD)
    result.caption = f"busy {times.busy / steps / 1e3:.3f} ms of a step of {step_seconds * 1e3:.3f} ms"
    for name, (count, took) in sorted(kernels.items(), key=lambda item: -item[1][1])[:MAX_TABLE_ROWS]:
        result.add_row(name[:80], f"{count / steps:.1f}", f"{took / steps:.1f}", f"{took / total:.1%}")
    return result


class Runs:
    """A model's prompts and decode steps in a generator of their own."""

    def __init__(self, model: Model, tokenizer: Tokenizer, cache: str, rows: int, context: int) -> None:
        free_memory(torch.device("cuda", 0))
        steps = WARMUP_STEPS + TIMED_STEPS + PROFILED_STEPS
        kv_cache = CACHES[cache](model, max_seq_len=tokens_needed(rows, context, steps))
        self._generator = Generator(model, kv_cache, tokenizer, max_batch_size=rows)
        self._vocab, self._rows, self._context, self._steps = model.config.vocab_size, rows, context, steps

    def prompt(self, number: int) -> float:
        """Seconds of one prompt, up to its first token."""
        self._generator.enqueue(self._job(number, 1))
        return _seconds(self._drain)

    def decode(self) -> tuple[float, KernelTimes]:
        """Seconds of a decode step, and the kernels of PROFILED_STEPS."""
        jobs = [self._job(row, self._steps + 64) for row in range(self._rows)]
        self._generator.enqueue(jobs)
        while not all(job.new_tokens for job in jobs):
            self._generator.iterate()
        self._iterate(WARMUP_STEPS)
        took = _seconds(lambda: self._iterate(TIMED_STEPS)) / TIMED_STEPS
        kernels = kernel_times(lambda: self._iterate(PROFILED_STEPS))
        self._generator.clear_queue()
        return took, kernels

    def _iterate(self, steps: int) -> None:
        for _ in range(steps):
            self._generator.iterate()

    def _drain(self) -> None:
        while self._generator.num_remaining_jobs():
            for result in self._generator.iterate():
                if result["stage"] == "streaming" and "error" in result:
                    raise result["error"]

    def _job(self, number: int, new: int) -> Job:
        return Job(prompt_ids(number, self._context, self._vocab), new, gen_settings=Settings.greedy())


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b", choices=list(SHAPES))
    parser.add_argument("--format", default="exl2")
    parser.add_argument("--cache", default="fp16", choices=list(CACHES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512], help="of decode steps, with the first rows")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt; 0: none")
    chosen = parser.parse_args()
    console = Console(width=130)
    sizes = [(rows, chosen.contexts[0]) for rows in chosen.rows]
    sizes += [(chosen.rows[0], context) for context in chosen.contexts[1:]]
    config = BenchmarkConfig(
        shape=chosen.shape,
        format=chosen.format,
        contexts=tuple(chosen.contexts),
        prompt=max(1, chosen.prompt),
        tokens=128,
    )
    with loaded_model(config, torch.device("cuda", 0)) as (model, load_seconds):
        tokenizer = Tokenizer(model.config)
        console.print(f"loaded in {load_seconds:.1f} s")
        for rows, context in sizes:
            step, kernels = Runs(model, tokenizer, chosen.cache, rows, context).decode()
            title = f"{rows} rows, {context} tokens: {rows / step:.1f} tok/s"
            console.print(table(title, kernels, PROFILED_STEPS, step))
        if chosen.prompt:
            runs = Runs(model, tokenizer, chosen.cache, 1, chosen.prompt)
            took = [runs.prompt(number) for number in range(3)][-1]
            kernels = kernel_times(lambda: runs.prompt(3))
            console.print(table(f"prompt: {chosen.prompt / took:.0f} tok/s", kernels, 1, took))


if __name__ == "__main__":
    main()
