"""Sampling time, compared with plain multinomial sampling: `python -m benchmarks.sampler`.

Times are multiples of `torch.multinomial(torch.softmax(logits))` of the same shape in the same run. A step
does what the generator does: sample, fetch the tokens, append each to its sequence. On a GPU the device time
is measured as well, with steps queued behind a pause so that the device never waits for the host. `--host`
measures only the host's share of a GPU step, on any machine: nothing is launched then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from exlm.env import cap_onednn_isa
from exlm.kernels.launch import KernelLaunch
from exlm.sampling import Sampler, SamplerState, SamplingRequest, Settings, gpu_kernels

BATCHES = (1, 16, 64)
VOCABULARIES = (32_000, 152_064)
HISTORY = 1000
SPREAD = 3.0  # standard deviation of the logits: as in real text, a few tokens have most of the probability
LOGIT_SETS = 4  # sets of logits, used in turn so that none stays in L2
LIKELY_TOKENS = 16  # likely tokens of each row
CYCLES_PER_MICROSECOND = 6000
"""Device cycles in a microsecond of the host, with which the pause is long enough to queue all steps."""

MEASURE_SECONDS = 1.0  # measuring time for one cell on a CPU

CHAT: dict[str, Any] = {
    "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "token_repetition_penalty": 1.05,
}  # fmt: skip
PENALTIES: dict[str, Any] = {
    "token_repetition_penalty": 1.05, "token_frequency_penalty": 0.02, "token_presence_penalty": 0.02,
    "dry_multiplier": 0.8,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 1.0, "top_k": 1, "top_p": 0.0, "token_repetition_penalty": 1.0},
    "chat": CHAT,
    "top-p": {"temperature": 0.8, "top_k": 0, "top_p": 0.9, "token_repetition_penalty": 1.0},
    "min-p, XTC, DRY": {
        "temperature": 1.2, "temperature_last": True, "top_k": 0, "top_p": 0.0, "min_p": 0.05,
        "token_repetition_penalty": 1.0, "dry_multiplier": 0.8, "xtc_probability": 0.5,
    },
    "full kit": CHAT | PENALTIES | {
        "top_k": 200, "top_p": 0.98, "top_a": 0.01, "min_p": 0.01, "tfs": 0.98, "typical": 0.98,
        "mirostat": True, "mirostat_tau": 4.0, "min_temp": 0.5, "max_temp": 1.5, "smoothing_factor": 0.1,
        "skew": 0.1, "xtc_probability": 0.5,
    },
}  # fmt: skip
"""The sampler settings to measure; the last also has a logit bias and disallowed tokens."""
HOST_SETTINGS = ("greedy", "chat", "top-p", "full kit")


class Cell(NamedTuple):
    """One measurement in microseconds per step; `device` is the GPU's own time, None on a CPU."""

    where: str
    settings: str
    batch: int
    vocabulary: int
    step: float
    unit: float
    device: float | None
    unit_device: float | None


def make_rows(name: str, batch: int, vocabulary: int) -> list[SamplingRequest]:
    """Rows with sequences of a thousand tokens, in which some tokens repeat."""
    settings = Settings(**SETTINGS[name])
    extra: dict[str, Any] = {}
    if name == "full kit":
        settings.token_bias = torch.zeros(vocabulary)
        extra["blocked"] = [1, 2, 3]
    rows = []
    for seed in range(batch):
        rng = Random(seed)
        text = [int(vocabulary * rng.random() ** 3) for _ in range(HISTORY)]
        rows.append(SamplingRequest(settings, SamplerState(settings, seed, text), **extra))
    return rows


def _likely(batch: int, vocabulary: int) -> list[list[int]]:
    """The likely tokens of each row: few for each set of logits, so that sequences repeat themselves."""
    rng = Random(0)
    likely = [[rng.sample(range(vocabulary), LIKELY_TOKENS) for _ in range(batch)] for _ in range(LOGIT_SETS)]
    return [[rng.choice(tokens) for tokens in likely[turn % LOGIT_SETS]] for turn in range(1024 * LOGIT_SETS)]


class Steps:
    """Successive steps with one kind of settings."""

    def __init__(self, name: str, batch: int, vocabulary: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = [
            (torch.randn(batch, vocabulary, generator=generator) * SPREAD).to(device) for _ in range(LOGIT_SETS)
        ]
        self.rows = make_rows(name, batch, vocabulary)
        self.sampler = Sampler(vocab_size=vocabulary)
        self.taken, self.vocabulary = 0, vocabulary
        self.likely = _likely(batch, vocabulary)

    def next_logits(self) -> Tensor:
        """The next logits."""
        self.taken += 1
        return self.logits[self.taken % LOGIT_SETS]

    def sample(self) -> None:
        """Sample without fetching the tokens."""
        self.sampler.launch(self.next_logits(), self.rows)
        for row, token in zip(self.rows, self.likely[self.taken % len(self.likely)], strict=True):
            row.state.accept(token)

    def step(self) -> None:
        """Sample, fetch the tokens, append them."""
        tokens = self.sampler.sample_batch(self.next_logits(), self.rows).tokens
        for row, token in zip(self.rows, tokens, strict=True):
            row.state.accept(token)

    def draw(self) -> Tensor:
        """Multinomial sampling without fetching."""
        return torch.multinomial(torch.softmax(self.next_logits(), -1), 1)

    def unit(self) -> None:
        """Multinomial sampling, with the tokens fetched."""
        self.draw().tolist()


def timed(work: Callable[[], object], seconds: float) -> float:
    """Microseconds of a call: the median of at least five, after two for warm-up."""
    work()
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


def timed_on_device(work: Callable[[], object], longest: float, count: int = 20) -> float:
    """Device time of a call in microseconds; the host needs at most `longest` for it."""
    cuda: Any = torch.cuda  # its events have no types
    results: list[float] = []
    for _ in range(5):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(int(CYCLES_PER_MICROSECOND * longest * count))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        results.append(begin.elapsed_time(end) * 1e3 / count)
    return median(results)


def measure(name: str, batch: int, vocabulary: int, device: torch.device) -> Cell:
    """Measure one kind of settings at one shape."""
    steps = Steps(name, batch, vocabulary, device)
    on_gpu = device.type == "cuda"
    seconds = MEASURE_SECONDS / 4 if on_gpu else MEASURE_SECONDS
    unit, step = timed(steps.unit, seconds / 2), timed(steps.step, seconds)
    busy: tuple[float, float] | tuple[None, None] = (None, None)
    if on_gpu:
        busy = timed_on_device(steps.sample, step), timed_on_device(steps.draw, unit)
    where = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return Cell(where, name, batch, vocabulary, step, unit, *busy)


def measure_host(name: str, batch: int, vocabulary: int) -> float:
    """Host time of a GPU step in microseconds, without kernel launches."""
    with (
        patch.object(gpu_kernels, "has_kernels_for", lambda device: True),
        patch.object(KernelLaunch, "__call__", lambda *args: None),
    ):
        return timed(Steps(name, batch, vocabulary, torch.device("cpu")).sample, MEASURE_SECONDS)


def show_host(console: Console, batches: list[int]) -> None:
    """Print the table of `measure_host`; the vocabulary size makes no difference."""
    table = Table(title=f"µs per step, the host alone, without launches; histories of {HISTORY} tokens")
    for title in ("settings", *map(str, batches)):
        table.add_column(title, justify="left" if title == "settings" else "right")
    for name in HOST_SETTINGS:
        with console.status(name):
            table.add_row(name, *(f"{measure_host(name, batch, VOCABULARIES[0]):.0f}" for batch in batches))
    console.print(table)


def show(console: Console, cells: list[Cell]) -> None:
    """Print a table for each device."""
    for where in dict.fromkeys(cell.where for cell in cells):
        table = Table(title=f"µs per step, {where}; histories of {HISTORY} tokens")
        for title in ("settings", "batch", "vocabulary", "step", "unit", "ratio", "device", "unit", "ratio"):
            table.add_column(title, justify="left" if title == "settings" else "right", no_wrap=True)
        for cell in cells:
            if cell.where != where:
                continue
            busy = ("", "", "")
            if cell.device is not None and cell.unit_device is not None:
                ratio = cell.device / cell.unit_device
                busy = (f"{cell.device:.0f}", f"{cell.unit_device:.0f}", f"{ratio:.2f}")
            shape = (cell.settings, str(cell.batch), str(cell.vocabulary))
            table.add_row(*shape, f"{cell.step:.0f}", f"{cell.unit:.0f}", f"{cell.step / cell.unit:.2f}", *busy)
        console.print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampler", description="The sampler's speed.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the CPU, and a GPU if there is one")
    parser.add_argument("--host", action="store_true", help="measure only the host time of GPU steps")
    parser.add_argument("--json", type=Path, help="write the numbers to a file, too")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), metavar="settings", choices=list(SETTINGS))
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--vocabularies", nargs="*", type=int, default=list(VOCABULARIES))
    parser.add_argument("--threads", type=int, default=2, help="torch's threads on the CPU (default: 2)")
    chosen = parser.parse_args()
    cap_onednn_isa()
    torch.set_num_threads(chosen.threads)
    console, cells = Console(width=110), []
    if chosen.host:
        show_host(console, chosen.batches)
        return
    devices = [chosen.device] if chosen.device else ["cpu"] + ["cuda"] * torch.cuda.is_available()
    for device in devices:
        for name in chosen.only:
            for vocabulary in chosen.vocabularies:
                for batch in chosen.batches:
                    with console.status(f"{device}: {name}, {batch} × {vocabulary}"):
                        cells.append(measure(name, batch, vocabulary, torch.device(device)))
    show(console, cells)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([cell._asdict() for cell in cells], indent=1))


if __name__ == "__main__":
    main()
