"""From the start of a process to its first token: `python -m benchmarks.first_token --device cuda`.

Writes an EXL2 model of random weights once, reads its files into the page cache, and starts fresh processes
that load it and generate one token. The first process may compile kernels and Python modules; only later ones
count. Each prints a timeline of its phases; `--profile` adds profiles of loading and of the first token. All
layers share the same weights and the tokenizer has no merges, since load times depend on neither. This module
imports nothing large, because imports are part of what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPT = "One token"
TABLE_WIDTH = 28


class Timeline:
    """Durations of successive phases, since a moment of the system's monotonic clock."""

    def __init__(self, start: float) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = start

    def mark(self, name: str) -> None:
        """End a phase, which began at the last mark."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return self._last - self._start


class CallTimer:
    """Adds up the seconds spent in some calls, by all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is counted."""
        self.seconds[name] = 0.0

        def counted(*arguments: Any, **named: Any) -> Any:
            start = time.monotonic()
            try:
                return work(*arguments, **named)
            finally:
                self.seconds[name] += time.monotonic() - start

        return counted


def first_token(folder: Path, device: str, start: float, profile: bool) -> dict[str, Any]:
    """Load and generate one token in this process; `start` is when the parent started it."""
    times = Timeline(start)
    times.mark("interpreter")
    if device.startswith("cuda"):
        from exlm.cli.startup import create_context

        create_context()  # as the command line does
    import torch

    times.mark("import torch")
    import exlm

    exlm.LLM  # noqa: B018 - public names are imported on first use
    times.mark("import exlm")
    config = exlm.Config(folder)
    config.device = device
    tokenizer = exlm.Tokenizer(config)
    times.mark("config, tokenizer")
    if device.startswith("cuda"):
        torch.cuda.mem_get_info()
        times.mark("CUDA context")
    model = exlm.Model(config)
    calls = _time_calls(model)
    names = {0: "kernels, headers", 1: "embedding, head"}
    with _profiled(profile):
        model.load(callback=lambda i, n: times.mark(names.get(i, "layers")))
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    times.mark("waiting for the device")
    generator = exlm.Generator(model, exlm.Cache(model, max_seq_len=2048), tokenizer, max_batch_size=1)
    times.mark("cache, generator")
    with _profiled(profile):
        generator.generate(PROMPT, max_new_tokens=1, gen_settings=exlm.Settings.greedy())
    times.mark("prompt, first token")
    in_threads = {name: seconds for name, seconds in calls.seconds.items() if seconds}
    return {"total": times.total, "times": times.seconds, "in threads": in_threads}


def _time_calls(model: Any) -> CallTimer:
    """Count the time that loading spends reading weights and repacking them for kernels."""
    from exlm.checkpoint.safetensors_files import SafetensorsFolder
    from exlm.formats import PackedWeight
    from exlm.kernels.dispatch import BackendList

    timer, open_checkpoint = CallTimer(), model.open_checkpoint

    def source(frozen: Any) -> Any:
        inner = open_checkpoint(frozen)
        inner.weight = timer.wrap("weights read, or sent too", inner.weight)
        return inner

    model.open_checkpoint = source
    for owner, method, name in (
        (SafetensorsFolder, "load", "of that: files read"),
        (PackedWeight, "to", "of that: sent"),
        (BackendList, "dispatch", "kernels bound"),
    ):
        setattr(owner, method, timer.wrap(name, getattr(owner, method)))
    return timer


@contextmanager
def _profiled(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    from cProfile import Profile
    from pstats import Stats

    with Profile() as profile:
        yield
    Stats(profile, stream=sys.stderr).strip_dirs().sort_stats("tottime").print_stats(25)


def read_into_page_cache(folder: Path) -> int:
    """Read every file into the page cache; returns the number of bytes."""
    buffer, total = memoryview(bytearray(1 << 24)), 0
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def run_process(folder: Path, device: str, profile: bool = False) -> dict[str, Any]:
    """Run a fresh process and return its timeline."""
    command = [sys.executable, "-m", "benchmarks.first_token", "--folder", str(folder), "--device", device]
    command += ["--profile"] if profile else []
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has its modules compiled
    start = time.monotonic()  # the same clock in every process of a machine
    process = subprocess.run(
        [*command, "--since", str(start)], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    timeline: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return timeline


def show(turns: list[dict[str, Any]], size: int) -> None:
    """Print a line for each phase, with a column for each process."""
    print(f"{size / 1e9:.2f} GB of files in memory; seconds of {len(turns)} processes, the first may compile")
    for phase in turns[0]["times"]:
        print(f"{phase:{TABLE_WIDTH}}", *(f"{turn['times'].get(phase, 0.0):8.2f}" for turn in turns))
    print(f"{'first token after':{TABLE_WIDTH}}", *(f"{turn['total']:8.2f}" for turn in turns))
    for name in turns[0]["in threads"]:
        print(
            f"({name:{TABLE_WIDTH - 1}}",
            *(f"{turn['in threads'].get(name, 0.0):8.2f}" for turn in turns),
            ")",
        )


def main() -> None:
    """Write the model, start the processes, print the table."""
    parser = argparse.ArgumentParser(description="Seconds from the start of a process to its first token.")
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--bits", type=float, default=4.1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, help="where the model is, or is to be written")
    parser.add_argument("--turns", type=int, default=2, help="processes, one after the other")
    parser.add_argument("--profile", action="store_true", help="also profile the main thread")
    parser.add_argument("--json", type=Path, help="write every number to a file")
    parser.add_argument("--since", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.since is not None:
        print(json.dumps(first_token(args.folder, args.device, args.since, args.profile)))
        return
    from exlm.bench.shapes import SHAPES
    from exlm.env import cache_folder

    from .synthetic import write_exl2

    folder = args.folder or cache_folder() / "benchmarks" / f"first-{args.shape}-{args.bits}"
    write_exl2(folder, SHAPES[args.shape], args.bits, shared_layers=True)
    size = read_into_page_cache(folder)
    turns = [run_process(folder, args.device) for _ in range(args.turns)]
    if args.profile:
        run_process(folder, args.device, profile=True)
    if turns:
        show(turns, size)
    if args.json is not None:
        facts = {"shape": args.shape, "bytes": size, "device": args.device}
        args.json.write_text(json.dumps({**facts, "turns": turns}, indent=1))


if __name__ == "__main__":
    main()
