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

SHARD = 1 << 30
DONE = "first_token.json"  # describes the model in the folder; written last
WORDS = "One token"
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


class Tally:
    """Adds up the seconds spent in some calls, by all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is counted."""
        self.seconds[name] = 0.0

        def counted(*arguments: Any, **named: Any) -> Any:
            start = time.monotonic()
            try:
                return work(*arguments, **named)
            finally:
                self.seconds[name] += time.monotonic() - start

        return counted


def write(folder: Path, name: str, bits: float) -> Path:
    """Write a model of a named shape, unless it exists."""
    from exlm.bench.shapes import SHAPES
    from exlm.bench.synthetic import Exl2, write_model_folder
    from exlm.checkpoint import save_sharded

    said = {"shape": name, "bits": bits}
    done = folder / DONE
    if done.exists() and json.loads(done.read_text()) == said:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    shape, form = SHAPES[name], Exl2(bits)
    save_sharded(folder, _tensors(shape, form), shard_bytes=SHARD, overwrite=True)
    write_model_folder(folder, shape, shape.positions)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl2", "head_bits": form.head_bits}
    (folder / "config.json").write_text(json.dumps(config))
    done.write_text(json.dumps(said))
    return folder


def _tensors(shape: Any, form: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of the files; all layers share one set of weights."""
    import torch

    from exlm.bench.synthetic import RandomTensors
    from exlm.formats import exl2

    random = RandomTensors(0, torch.device("cpu"))

    def matrix(name: str, inputs: int, outputs: int, head: bool = False) -> dict[str, Any]:
        stored = exl2.write(form.weight(inputs, outputs, random, head, inputs**-0.5))
        return {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}

    layer = {
        f"{norm}.weight": torch.ones(shape.hidden).half()
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for name, inputs, outputs in shape.matrices():
        layer |= matrix(name, inputs, outputs)
    yield "model.embed_tokens.weight", random.floats(shape.vocab, shape.hidden, 1.0)
    for number in range(shape.layers):
        for name, tensor in layer.items():
            yield f"model.layers.{number}.{name}", tensor
    yield from matrix("lm_head", shape.hidden, shape.vocab, head=True).items()
    yield "model.norm.weight", torch.ones(shape.hidden).half()


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
    tally = _tallied(model)
    names = {0: "kernels, headers", 1: "embedding, head"}
    with _profiled(profile):
        model.load(callback=lambda i, n: times.mark(names.get(i, "layers")))
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    times.mark("waiting for the device")
    generator = exlm.Generator(model, exlm.Cache(model, max_seq_len=2048), tokenizer, max_batch_size=1)
    times.mark("cache, generator")
    with _profiled(profile):
        generator.generate(WORDS, max_new_tokens=1, gen_settings=exlm.Settings.greedy())
    times.mark("prompt, first token")
    busy = {name: seconds for name, seconds in tally.seconds.items() if seconds}
    return {"total": times.total, "times": times.seconds, "in threads": busy}


def _tallied(model: Any) -> Tally:
    """Count the time that loading spends reading weights and repacking them for kernels."""
    from exlm.checkpoint.safetensors_files import SafetensorsFolder
    from exlm.formats import PackedWeight
    from exlm.kernels.dispatch import BackendList

    tally, open_checkpoint = Tally(), model.open_checkpoint

    def source(frozen: Any) -> Any:
        inner = open_checkpoint(frozen)
        inner.weight = tally.around("weights read, or sent too", inner.weight)
        return inner

    model.open_checkpoint = source
    for owner, method, name in (
        (SafetensorsFolder, "load", "of that: files read"),
        (PackedWeight, "to", "of that: sent"),
        (BackendList, "dispatch", "kernels bound"),
    ):
        setattr(owner, method, tally.around(name, getattr(owner, method)))
    return tally


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


def warm(folder: Path) -> int:
    """Read every file into the page cache; returns the number of bytes."""
    buffer, total = memoryview(bytearray(1 << 24)), 0
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def started(folder: Path, device: str, profile: bool = False) -> dict[str, Any]:
    """Run a fresh process and return its timeline."""
    command = [sys.executable, "-m", "benchmarks.first_token", "--folder", str(folder), "--device", device]
    command += ["--profile"] if profile else []
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has its modules compiled
    start = time.monotonic()  # the same clock in every process of a machine
    done = subprocess.run(
        [*command, "--since", str(start)], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def show(turns: list[dict[str, Any]], size: int) -> None:
    """Print a line for each phase, with a column for each process."""
    print(f"{size / 1e9:.2f} GB of files in memory; seconds of {len(turns)} processes, the first may compile")
    for part in turns[0]["times"]:
        print(f"{part:{TABLE_WIDTH}}", *(f"{turn['times'].get(part, 0.0):8.2f}" for turn in turns))
    print(f"{'first token after':{TABLE_WIDTH}}", *(f"{turn['total']:8.2f}" for turn in turns))
    for part in turns[0]["in threads"]:
        print(
            f"({part:{TABLE_WIDTH - 1}}",
            *(f"{turn['in threads'].get(part, 0.0):8.2f}" for turn in turns),
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
    asked = parser.parse_args()
    if asked.since is not None:
        print(json.dumps(first_token(asked.folder, asked.device, asked.since, asked.profile)))
        return
    from exlm.env import cache_folder

    folder = asked.folder or cache_folder() / "benchmarks" / f"first-{asked.shape}-{asked.bits}"
    write(folder, asked.shape, asked.bits)
    size = warm(folder)
    turns = [started(folder, asked.device) for _ in range(asked.turns)]
    if asked.profile:
        started(folder, asked.device, profile=True)
    if turns:
        show(turns, size)
    if asked.json is not None:
        facts = {"shape": asked.shape, "bytes": size, "device": asked.device}
        asked.json.write_text(json.dumps({**facts, "turns": turns}, indent=1))


if __name__ == "__main__":
    main()
