"""Load time of a model, compared with reading the bytes of its files: `python -m benchmarks.load`.

Writes a model of random weights once, then in turn reads its files into one small buffer, reads them into
fresh memory of their size, and loads them on the CPU. Files come from the page cache, unless `--cold` drops
them first. A load ends with the weights in memory of its own, so the read into fresh memory is the fair
comparison. On a shared machine only the ratios mean something.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from exlm import Config, Model
from exlm.bench.shapes import Shape
from exlm.env import cache_folder
from exlm.formats.host_buffers import trim_heap

from .synthetic import LLAMA_7B, write_dense, write_exl2

BUFFER = 4 * 2**20
MAX_RATIO = 1.5
PAUSE_SECONDS = 2.5  # seconds; after about this time a VM's host reclaims freed memory

LLAMA_500M = Shape(hidden=2048, layers=8, mlp=5632, heads=16, kv_heads=16, vocab=32000)
MODELS: dict[str, tuple[str, str, Callable[[Path], Path]]] = {
    "exl2": ("7B, EXL2 4.1 bpw", "float32", lambda folder: write_exl2(folder, LLAMA_7B)),
    "dense": ("0.5B, dense float16", "float16", lambda folder: write_dense(folder, LLAMA_500M)),
}
"""(description, compute precision, function that writes the folder)"""


class Times(NamedTuple):
    """Seconds of one repetition."""

    buffer: float
    memory: float
    load: float


def read_into_buffer(files: list[Path]) -> None:
    """Read every byte into the same few megabytes: the page cache's speed."""
    buffer = memoryview(bytearray(BUFFER))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_into_memory(files: list[Path]) -> list[torch.Tensor]:
    """Read every byte into newly allocated memory."""
    tensors = []
    for path in files:
        target = torch.empty(path.stat().st_size, dtype=torch.uint8)
        view = target.numpy().data
        with path.open("rb", buffering=0) as file:
            while view:
                view = view[file.readinto(view) :]
        tensors.append(target)
    return tensors


def load(folder: Path, dtype: str) -> Model:
    """Load the model on the CPU."""
    config = Config(folder)
    config.device, config.dtype = "cpu", dtype
    model = Model(config)
    model.load()
    return model


class MemoryReusingTimer:
    """Times functions that each allocate the memory that the last one's result occupied.

    A result is freed just before the next one is made. So every repetition finds free memory in the same
    state, and none waits for the host of a virtual machine to provide some.
    """

    def __init__(self, files: list[Path], cold: bool) -> None:
        self._files = files
        self._cold = cold
        self._results: list[object] = []

    def time(self, work: Callable[[], object], *, frees: bool = True) -> float:
        """Seconds of `work`; its result is kept until the next call with `frees`."""
        if frees:
            time.sleep(PAUSE_SECONDS)
            self._results.clear()
            gc.collect()
            trim_heap()  # so that the next tensors are in fresh memory
        if self._cold:
            _drop_from_page_cache(self._files)
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        self._results.append(result)
        return seconds


def measure(folder: Path, dtype: str, repeats: int, cold: bool) -> list[Times]:
    """The times of each repetition, after one load that is not counted."""
    files = sorted(folder.glob("*.safetensors"))
    timer = MemoryReusingTimer(files, cold)
    timer.time(lambda: load(folder, dtype))
    return [
        Times(
            timer.time(lambda: read_into_buffer(files), frees=False),
            timer.time(lambda: read_into_memory(files)),
            timer.time(lambda: load(folder, dtype)),
        )
        for _ in range(repeats)
    ]


def show(console: Console, title: str, rows: list[Times]) -> None:
    """Print each repetition and the medians."""
    table = Table(title=title)
    for name in ("seconds", "read (buffer)", "read (fresh)", "load", "load/buffer", "load/fresh"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        ratios = (row.load / row.buffer, row.load / row.memory)
        table.add_row(str(number), *(f"{one:.3f}" for one in row), *(f"{one:.2f}" for one in ratios))
    middle = Times(*(median(column) for column in zip(*rows, strict=True)))
    ratios = (median(row.load / row.buffer for row in rows), median(row.load / row.memory for row in rows))
    table.add_section()
    table.add_row("median", *(f"{one:.3f}" for one in middle), *(f"{one:.2f}" for one in ratios))
    console.print(table)
    verdict = "met" if ratios[1] <= MAX_RATIO else "missed"
    console.print(f"At most {MAX_RATIO} times the read into fresh memory: {verdict}.\n")


def main() -> None:
    """Write missing models, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description="Loading next to reading.")
    parser.add_argument("models", nargs="*", metavar="model", help=f"{' or '.join(MODELS)} (default: all)")
    parser.add_argument("--folder", type=Path, help="where the models are kept (default: exlm's cache)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="torch's threads (default: its own choice)")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache each time")
    chosen = parser.parse_args()
    if unknown := set(chosen.models) - set(MODELS):
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    root = chosen.folder or cache_folder() / "bench"
    console = Console()
    for name in chosen.models or MODELS:
        title, dtype, write = MODELS[name]
        with console.status(f"Writing {root / name}, unless it is there"):
            folder = write(root / name)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        with console.status(f"Measuring {title}"):
            rows = measure(folder, dtype, chosen.repeats, chosen.cold)
        cores = f"{os.cpu_count()} cores, torch with {torch.get_num_threads()} threads"
        show(console, f"{title}, {size / 1e9:.2f} GB, {cores}{', cold' if chosen.cold else ''}", rows)


def _drop_from_page_cache(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
