"""Compares exlm with other engines on the CPU, on the same model, each run in a process of its own.

Engines take turns, so that other load on the machine affects all of them; on a shared machine only the ratios
mean something. An engine that is not installed is skipped, with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from .. import convert_model, env
from ..errors import InputError
from . import comparison_engines as engines
from .report import EngineResult

ENGINES = {
    "exlm": "exlm",
    "llama.cpp": "xllamacpp",
    "onnxruntime-genai": "onnxruntime_genai",
    "transformers": "transformers",
}
"""The engines and the Python module each of them needs."""

TIMEOUT = 900
"""Seconds that one run may take."""


def compare(
    model: Path,
    threads: int,
    turns: int = 3,
    pythons: Mapping[str, str] | None = None,
    on_progress: Callable[[str, int, int], object] = lambda *_: None,
) -> tuple[list[EngineResult], list[str]]:
    """(results of every engine for each turn, why engines were skipped).

    `pythons` has the interpreters of engines that are installed in other environments.
    """
    if model.suffix != ".gguf":
        raise InputError(f"Peers are compared on a .gguf file, which all of them can read; found {model}.")
    interpreters = {name: sys.executable for name, needs in ENGINES.items() if find_spec(needs) is not None}
    interpreters |= pythons or {}
    if unknown := set(interpreters) - set(ENGINES):
        raise InputError(f"No engine is called {', '.join(sorted(unknown))}: {', '.join(ENGINES)}.")
    skipped = [f"{name}: {needs} is not installed" for name, needs in ENGINES.items() if name not in interpreters]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in interpreters}
    for turn in range(turns):
        for number, name in enumerate(list(runs)):
            on_progress(name, turn * len(runs) + number, turns * len(runs))
            try:
                files = _model_files(name, model, interpreters[name])
                runs[name].append(_run_once(interpreters[name], name, files, threads))
            except RuntimeError as error:
                skipped.append(str(error))
                del runs[name]
    return [EngineResult(name, _by_metric(metrics)) for name, metrics in runs.items()], skipped


def _run_once(python: str, engine: str, files: Path, threads: int) -> dict[str, float]:
    """Run an engine once, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "metrics.json"
        arguments = (engine, str(files), str(threads), repr(time.time()), str(output))
        command = [python, str(Path(engines.__file__)), *arguments]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        if process.returncode or not output.exists():
            raise RuntimeError(f"{engine}: {' '.join(process.stderr.strip().splitlines()[-1:])}")
        metrics: dict[str, float] = json.loads(output.read_text())
    return metrics


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


def _by_metric(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    return {key: [run[key] for run in runs] for key in (runs[0] if runs else {})}
