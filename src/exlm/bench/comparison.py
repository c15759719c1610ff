"""Compares exlm with other engines on the CPU, on the same model, each run in a process of its own.

Engines take turns, so that other load on the machine affects all of them; on a shared machine only the ratios
mean something. An engine that is not installed is skipped, with the reason.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .. import Config, convert_model, env
from ..errors import InputError
from . import comparison_engines as engines
from .report import EngineResult

ENGINES = {
    "exlm": ("exlm",),
    "llama.cpp": ("llama_cpp", "xllamacpp"),
    "onnxruntime-genai": ("onnxruntime_genai",),
    "transformers": ("transformers",),
}
"""The engines, and the Python modules of which each needs one."""

TIMEOUT = 900
"""Seconds that one run may take."""


def compare(
    model: Path,
    threads: int,
    turns: int = 3,
    pythons: Mapping[str, str] | None = None,
    on_progress: Callable[[str, int, int], object] = lambda *_: None,
    *,
    only: Collection[str] = tuple(ENGINES),
    before_turn: Callable[[], object] = lambda: None,
) -> tuple[list[EngineResult], list[str]]:
    """(results of every engine for each turn, why engines were skipped).

    `pythons` has the interpreters of engines that are installed in other environments; `only` these engines run.
    """
    if model.suffix != ".gguf":
        raise InputError(f"Peers are compared on a .gguf file, which all of them can read; found {model}.")
    interpreters = {name: sys.executable for name, modules in ENGINES.items() if any(map(find_spec, modules))}
    interpreters |= pythons or {}
    if unknown := set(interpreters) - set(ENGINES):
        raise InputError(f"No engine is called {', '.join(sorted(unknown))}: {', '.join(ENGINES)}.")
    wanted = {name: modules for name, modules in ENGINES.items() if name in only}
    skipped = [
        f"{name}: {' or '.join(modules)} is not installed"
        for name, modules in wanted.items()
        if name not in interpreters
    ]
    vocab = Config(model).vocab_size
    runs: dict[str, list[_Run]] = {name: [] for name in interpreters if name in wanted}
    for turn in range(turns):
        before_turn()
        for number, name in enumerate(list(runs)):
            on_progress(name, turn * len(runs) + number, turns * len(runs))
            try:
                files = _model_files(name, model, interpreters[name])
                runs[name].append(_run_once(interpreters[name], name, files, threads, vocab))
            except RuntimeError as error:
                skipped.append(str(error))
                del runs[name]
    results = [EngineResult(name, _by_metric(made), made[0].build) for name, made in runs.items() if made]
    return results, skipped


class _Run(NamedTuple):
    """What one run of an engine wrote."""

    values: dict[str, float]
    build: dict[str, str]


def _run_once(python: str, engine: str, files: Path, threads: int, vocab: int) -> _Run:
    """Run an engine once, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "metrics.json"
        arguments = (engine, str(files), str(threads), str(vocab), repr(time.time()), str(output))
        command = [python, str(Path(engines.__file__)), *arguments]
        try:
            process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{engine}: {error}") from error
        if process.returncode or not output.exists():
            last = " ".join(process.stderr.strip().splitlines()[-1:])
            killed = f"ended by {_signal_name(-process.returncode)}; " if process.returncode < 0 else ""
            raise RuntimeError(f"{engine}: {killed}{last or f'exit status {process.returncode}'}")
        return _Run(**json.loads(output.read_text()))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _model_files(engine: str, model: Path, python: str) -> Path:
    """What an engine loads: the file, a dense copy of it, or an ONNX model built from that."""
    if engine in ("exlm", "llama.cpp"):
        return model
    folder = env.cache_folder() / "bench"
    dense = folder / f"{model.stem}-dense"
    if not dense.exists():
        convert_model(model, dense, "dense")
    if engine == "transformers":
        return dense
    onnx = folder / f"{model.stem}-onnx"
    if not onnx.exists():
        builder = [python, "-m", "onnxruntime_genai.models.builder", "-i", str(dense), "-o", str(onnx)]
        command = [*builder, "-p", "int4", "-e", "cpu", "-c", str(folder / "onnx-cache")]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        if process.returncode:
            raise RuntimeError(f"{engine}: its builder failed: {process.stderr.strip()[-300:]}")
    return onnx


def _by_metric(runs: list[_Run]) -> dict[str, list[float]]:
    return {key: [run.values[key] for run in runs] for key in runs[0].values}
