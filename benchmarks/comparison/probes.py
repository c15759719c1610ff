"""The probes of each suite: commands that child processes run, and functions that read their results.

Commands use interfaces that survive changes of internals: the command line (`exlm bench`, `exlm serve`) and
the checkout's own benchmark scripts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .checkouts import Checkout, CompareError

SUITES = ("host", "cpu", "gpu", "load", "serve", "sampler")

HOST, CPU, GPU_DECODE, GPU_PROMPT, LOAD, SERVE, SAMPLER = 0.05, 0.05, 0.02, 0.05, 0.05, 0.05, 0.05
"""The share by which the candidate may be worse."""

HERE = Path(__file__).parent
GGUF_NAME, CHAT_NAME = "llama-1.1b.Q4_K_M.gguf", "chat"
"""Names of the models that `model_files.py` writes."""


@dataclass(frozen=True)
class Row:
    """One row of the result."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    bound: float


Readings = dict[Row, float]


@dataclass(frozen=True)
class Probe:
    """One measurement: a command that writes a file, and a function that reads it."""

    suite: str
    name: str
    command: Callable[[Checkout, Path], list[str]]
    read: Callable[[Path], Readings]
    prepare: Callable[[], object] = lambda: None
    """Writes the model files that the command needs, unless they are there."""


@dataclass(frozen=True)
class Setup:
    """The options that probes depend on."""

    base: Checkout
    models: Path
    """Where model files are kept."""
    device: str
    """`cpu` or `cuda`, for the suites that run on either."""
    threads: int | None
    timeout: float


def probes(suites: Sequence[str], setup: Setup) -> list[Probe]:
    """The probes of some suites."""
    makers: dict[str, Callable[[Setup], list[Probe]]] = {
        "host": _host,
        "cpu": _cpu,
        "gpu": _gpu,
        "load": _load,
        "serve": _serve,
        "sampler": _sampler,
    }
    return [probe for suite in suites for probe in makers[suite](setup)]


def _host(setup: Setup) -> list[Probe]:
    def command(checkout: Checkout, out: Path) -> list[str]:
        script = checkout.folder / "benchmarks" / "host.py"
        if not script.is_file():
            raise CompareError(f"The {checkout.name} {checkout.folder} has no benchmarks/host.py.")
        if '"--json"' in script.read_text(encoding="utf-8"):
            return [sys.executable, "-m", "benchmarks.host", "--batches-only", "--json", str(out)]
        return [sys.executable, "-P", str(HERE / "host_without_json.py"), str(out)]

    return [Probe("host", "the generator's own Python", command, read_host)]


def read_host(file: Path) -> Readings:
    """What `benchmarks.host --json` wrote: a decode step's host time in units of a fixed piece of Python."""
    rows = _json(file)
    return {
        Row(f"host, decode step, batch {one['batch']}, per row", "units", "lower", HOST): float(one["ratio"])
        for one in rows
    }


def _cpu(setup: Setup) -> list[Probe]:
    file = setup.models / GGUF_NAME
    options = ["--device", "cpu", "--context", "32", "--prompt", "512", "--tokens", "64"]
    options += ["--threads", str(setup.threads)] if setup.threads is not None else []
    return [
        _bench(
            "cpu",
            "SmolLM2-135M shape, Q4_1, CPU",
            ["--shape", "smollm2-135m", "--format", "gguf", "--batch", "1,8", *options],
            (CPU, CPU),
        ),
        replace(
            _bench("cpu", "1.1B Q4_K_M, CPU", [str(file), "--batch", "1", *options], (CPU, CPU)),
            prepare=lambda: _write(setup, GGUF_NAME),
        ),
    ]


def _gpu(setup: Setup) -> list[Probe]:
    options = ["--device", "cuda", "--shape", "llama-2-7b", "--format", "exl2", "--cache", "fp16,q4"]
    options += ["--batch", "1,8,32,64", "--context", "512,8000", "--prompt", "2048", "--tokens", "256"]
    return [_bench("gpu", "7B EXL2, GPU", options, (GPU_PROMPT, GPU_DECODE))]


def _bench(suite: str, name: str, arguments: Sequence[str], bounds: tuple[float, float]) -> Probe:
    """A probe of prompts and decoding by `exlm bench`."""
    return Probe(
        suite,
        name,
        lambda checkout, out: [sys.executable, "-m", "exlm", "bench", *arguments, "--json", str(out)],
        lambda file: read_bench(file, name, *bounds),
    )


def read_bench(file: Path, name: str, prompt_bound: float, decode_bound: float) -> Readings:
    """The rates that `exlm bench --json` wrote."""
    found: Readings = {}
    for one in _json(file)["rows"]:
        if one["rate"] is None:
            raise CompareError(f"{name}: {one['work']} of {one['batch']} x {one['context']} does not fit in memory.")
        if one["work"] == "prompt":
            row = Row(f"{name}, prompt of {one['context']}", "tok/s", "higher", prompt_bound)
        else:
            what = f"{one['work']}, {one['batch']} x {one['context']}, {one['cache']} cache"
            row = Row(f"{name}, {what}", "tok/s", "higher", decode_bound)
        found[row] = float(one["rate"])
    return found


def _load(setup: Setup) -> list[Probe]:
    shape, name = ("llama-2-7b", "7B EXL2") if setup.device == "cuda" else ("tinyllama-1.1b", "1.1B EXL2")
    folder = setup.models / f"exl2-{shape}"
    # It writes the files unless they are there; without turns it measures nothing.
    write = [sys.executable, "-m", "benchmarks.first_token", "--folder", str(folder), "--shape", shape]
    write += ["--device", "cpu", "--turns", "0"]
    options = [str(folder), "--device", setup.device, "--batch", "1", "--context", "64", "--prompt", "64"]
    options += ["--tokens", "8"]
    return [
        Probe(
            "load",
            f"{name} files, {setup.device}",
            lambda checkout, out: [sys.executable, "-m", "exlm", "bench", *options, "--json", str(out)],
            lambda file: read_load(file, f"{name} files, {setup.device}"),
            lambda: setup.base.run(write, setup.timeout),
        )
    ]


def read_load(file: Path, name: str) -> Readings:
    """The seconds that `exlm bench --json` wrote."""
    report = _json(file)
    if report["first"] is None:
        raise CompareError(f"{name}: this system does not tell when a process began.")
    return {
        Row(f"{name}, load", "s", "lower", LOAD): float(report["load"]),
        Row(f"{name}, process start to first token", "s", "lower", LOAD): float(report["first"]),
    }


def _serve(setup: Setup) -> list[Probe]:
    folder = setup.models / CHAT_NAME
    script = str(HERE / "serve_client.py")
    return [
        Probe(
            "serve",
            f"exlm serve, {setup.device}",
            lambda checkout, out: [sys.executable, "-P", script, str(folder), setup.device, str(out)],
            read_serve,
            lambda: _write(setup, CHAT_NAME),
        )
    ]


def read_serve(file: Path) -> Readings:
    """What `serve_client.py` wrote."""
    return {
        Row(f"exlm serve, streamed chats, {one['clients']} at a time", "requests/s", "higher", SERVE): float(
            one["rate"]
        )
        for one in _json(file)
    }


def _sampler(setup: Setup) -> list[Probe]:
    options = ["--device", setup.device, "--batches", "1", "16", "--vocabularies", "32000"]
    return [
        Probe(
            "sampler",
            f"sampler, {setup.device}",
            lambda checkout, out: [sys.executable, "-m", "benchmarks.sampler", *options, "--json", str(out)],
            lambda file: read_sampler(file, setup.device),
        )
    ]


def read_sampler(file: Path, device: str) -> Readings:
    """What `benchmarks.sampler --json` wrote: a step, in units of multinomial(softmax)."""
    return {
        Row(
            f"sampler, {device}, {one['settings']}, {one['batch']} x {one['vocabulary']}",
            "units",
            "lower",
            SAMPLER,
        ): float(one["step"] / one["unit"])
        for one in _json(file)
    }


def _write(setup: Setup, name: str) -> None:
    """Write a model with `model_files.py`, unless it exists."""
    target = setup.models / name
    if not target.exists():
        command = [sys.executable, "-P", str(HERE / "model_files.py"), name, str(target)]
        setup.base.run(command, setup.timeout)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CompareError(f"A process ended well and left no result: {error}.") from error
