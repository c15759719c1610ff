"""How long loading a model takes, next to reading the bytes of its files: `python -m benchmarks.load`.

Writes a synthetic model once, then takes turns: the files read into one small buffer, read into fresh memory
as large as they are, and loaded. Everything comes from the page cache, so the disk is as fast as disks get.
Loading must end with the weights in memory of its own, so the fair measure is the read into fresh memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from exlm import Config, Model
from exlm.settings import cache_folder

from .synthetic import LLAMA_7B, Shape, write_dense, write_exl2

BUFFER = 4 * 2**20
TARGET = 1.5

GIGABYTE = Shape(hidden=2048, layers=8, mlp=5632, heads=16, kv_heads=16, vocab=32000)
MODELS: dict[str, tuple[str, str, Callable[[Path], Path]]] = {
    "exl2": ("7B, EXL2 4.1 bpw", "float32", lambda folder: write_exl2(folder, LLAMA_7B)),
    "dense": ("0.5B, dense float16", "float16", lambda folder: write_dense(folder, GIGABYTE)),
}
"""Words, the precision to compute in, and who writes the folder."""


def read_into_buffer(files: list[Path]) -> None:
    """Read every byte into the same few megabytes: what the page cache gives at most."""
    buffer = memoryview(bytearray(BUFFER))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_into_memory(files: list[Path]) -> list[torch.Tensor]:
    """Read every byte into memory that nobody has touched before."""
    kept = []
    for path in files:
        target = torch.empty(path.stat().st_size, dtype=torch.uint8)
        view, at = memoryview(target.numpy()), 0  # type: ignore[arg-type]
        with path.open("rb", buffering=0) as file:
            while at < len(view):
                at += file.readinto(view[at : at + 2**30])
        kept.append(target)
    return kept


def load(folder: Path, dtype: str) -> Model:
    """Load the model on the CPU."""
    config = Config(folder)
    config.device, config.dtype = "cpu", dtype
    model = Model(config)
    model.load()
    return model


def timed(work: Callable[[], object]) -> float:
    """Seconds until `work` returns; what it returns is freed after the clock has stopped."""
    gc.collect()
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def measure(folder: Path, dtype: str, repeats: int) -> list[tuple[float, float, float]]:
    """Seconds of (buffer, memory, load) for each repetition."""
    files = sorted(folder.glob("*.safetensors"))
    read_into_buffer(files)
    timed(lambda: load(folder, dtype))  # what the first load alone pays for: imports, thread pools
    return [
        (
            timed(lambda: read_into_buffer(files)),
            timed(lambda: read_into_memory(files)),
            timed(lambda: load(folder, dtype)),
        )
        for _ in range(repeats)
    ]


def show(console: Console, title: str, size: int, rows: list[tuple[float, float, float]]) -> None:
    """A line for each repetition, and their medians."""
    table = Table(title=f"{title}, {size / 1e9:.2f} GB, seconds")
    columns = ("", "read, one buffer", "read, fresh memory", "load", "load / buffer", "load / fresh")
    for name in columns:
        table.add_column(name, justify="right")
    for number, (buffer, memory, loaded) in enumerate(rows, 1):
        times = (f"{one:.3f}" for one in (buffer, memory, loaded))
        table.add_row(str(number), *times, f"{loaded / buffer:.2f}", f"{loaded / memory:.2f}")
    middle = [median(column) for column in zip(*rows, strict=True)]
    ratios = [median(row[2] / row[n] for row in rows) for n in (0, 1)]
    table.add_section()
    table.add_row("median", *(f"{one:.3f}" for one in middle), *(f"{one:.2f}" for one in ratios))
    console.print(table)
    verdict = "met" if ratios[1] <= TARGET else "missed"
    console.print(f"Target: at most {TARGET} times the read into fresh memory: {verdict}.\n")


def main() -> None:
    """Parse, write what is missing, measure, print."""
    parser = argparse.ArgumentParser(description="Loading next to reading.")
    parser.add_argument("--folder", type=Path, help="where the models are kept (default: exlm's cache)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)} (default: all)")
    chosen = parser.parse_args()
    if unknown := set(chosen.models) - set(MODELS):
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    root = chosen.folder or cache_folder() / "bench"
    console = Console()
    console.print(f"{os.cpu_count()} cores, torch with {torch.get_num_threads()} threads, {root}")
    for name in chosen.models or MODELS:
        title, dtype, write = MODELS[name]
        with console.status(f"Writing {root / name}, unless it is there"):
            folder = write(root / name)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        with console.status(f"Measuring {title}"):
            rows = measure(folder, dtype, chosen.repeats)
        show(console, title, size, rows)


if __name__ == "__main__":
    main()
