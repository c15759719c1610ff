"""Finds the fastest kernel configurations for a model on this GPU by hill climbing, matrix kind by kind.

Whole decode passes are timed, replayed as CUDA graphs, because kernels affect each other. The backend says
which configurations there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from .. import Cache, InputError, Model, env
from ..kernels.interface import SupportsTuning, TuneSpace
from ..model.devices import pick_device
from ..model.model_runner import PagedModelRunner, PlainSequence
from .benchmark import BenchmarkConfig, ProgressCallback, loaded_model

BATCH_SIZES = (1, 8)
"""Batch sizes of the timed passes; their sum must improve."""

CONTEXT = 512
WARMUP_PASSES, TIMED_PASSES, REPEATS = 3, 20, 5
MIN_GAIN = 0.002
"""The share of the time that a change must save; less counts as noise."""

TuneConfig = tuple[int, ...]


class ConfigChange(NamedTuple):
    """The configuration of one kind of matrix before and after tuning."""

    name: str
    before: TuneConfig
    after: TuneConfig


@dataclass(frozen=True)
class TuningResult:
    """The outcome of tuning a model."""

    changes: tuple[ConfigChange, ...]
    before: float  # seconds of one pass at each batch size, added
    after: float
    file: Path | None  # where the configurations were saved; None if nothing was faster


def tune(config: BenchmarkConfig, on_progress: ProgressCallback = lambda *_: None) -> TuningResult:
    """Tune the kernels for the model that a config names."""
    env.cap_onednn_isa()
    on_progress("loading", 0, 1)
    with loaded_model(config, pick_device(config.device or env.default_device())) as (model, _):
        return tune_model(model, on_progress)


def tune_model(model: Model, on_progress: ProgressCallback = lambda *_: None) -> TuningResult:
    """Tune every kind of matrix in a loaded model's decode passes; save the result if it is faster."""
    backend = next((b for b in model.backends if isinstance(b, SupportsTuning)), None)
    if backend is None:
        names = ", ".join(b.name for b in model.backends)
        raise InputError(
            f"There is nothing to tune: only the CUDA kernels have settings, and this model runs on {names}. "
            "Name a GPU with --device."
        )
    timer = _DecodeTimer(model)
    spaces = backend.tune_spaces(timer.run_once)
    initial = [space.config for space in spaces]
    best = first = timer.seconds()
    for done, space in enumerate(spaces):
        on_progress(space.name, done, len(spaces))
        best = hill_climb(space, timer.seconds, best)
    changes = tuple(
        ConfigChange(space.name, old, space.config)
        for space, old in zip(spaces, initial, strict=True)
        if space.config != old
    )
    before, after = _time_both(spaces, initial, timer.seconds) if changes else (first, first)
    if not changes or after > before * (1 - MIN_GAIN):
        _apply(spaces, initial)
        return TuningResult((), before, before, None)
    return TuningResult(changes, before, after, backend.save_tuned(spaces))


def hill_climb(space: TuneSpace, measure: Callable[[], float], seconds: float) -> float:
    """Move to the fastest neighbour while there is one that is faster; returns its time.

    `seconds` is the time of the space's present configuration, `measure` times the one that is applied.
    """
    best, tried = space.config, {space.config}
    while True:
        times: dict[TuneConfig, float] = {}
        for config in space.neighbors():
            if config not in tried:
                tried.add(config)
                space.apply(config)
                times[config] = measure()
                space.apply(best)
        fastest = min(times, key=times.__getitem__, default=best)
        if fastest == best or times[fastest] > seconds * (1 - MIN_GAIN):
            return seconds
        best, seconds = fastest, times[fastest]
        space.apply(best)


def _time_both(
    spaces: Sequence[TuneSpace], initial: Sequence[TuneConfig], measure: Callable[[], float]
) -> tuple[float, float]:
    """Seconds before and after, measured in alternation: the device's clock may have changed meanwhile."""
    configs = initial, [space.config for space in spaces]
    times: tuple[list[float], list[float]] = ([], [])
    for which in (0, 1, 1, 0, 0, 1, 1, 0):
        _apply(spaces, configs[which])
        times[which].append(measure())
    _apply(spaces, configs[1])
    return median(times[0]), median(times[1])


def _apply(spaces: Sequence[TuneSpace], configs: Sequence[TuneConfig]) -> None:
    for space, config in zip(spaces, configs, strict=True):
        space.apply(config)


class _DecodeTimer:
    """Times decode passes at each batch size."""

    def __init__(self, model: Model) -> None:
        self._model = model
        pages, most = -(-CONTEXT // Cache.page_size), max(BATCH_SIZES)
        self._cache = Cache(model, max_seq_len=most * pages * Cache.page_size)
        self._cache.allocate_states(2 * most)  # each row reads one recurrent state and writes another
        self._sequences = [
            PlainSequence(
                [1],
                list(range(row * pages, (row + 1) * pages)),
                state_source=row,
                state_targets=[(0, most + row)],
            )
            for row in range(most)
        ]

    def run_once(self) -> None:
        """Run a pass at each batch size, without CUDA graphs."""
        for rows in BATCH_SIZES:
            self._decode(self._model.runner(self._cache), rows)

    def seconds(self) -> float:
        """Seconds of one pass at each batch size, added, with newly captured graphs."""
        total = 0.0
        for rows in BATCH_SIZES:
            runner = self._model.runner(self._cache)  # a new runner captures new graphs
            for _ in range(WARMUP_PASSES):
                self._decode(runner, rows)
            times = []
            for _ in range(REPEATS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(TIMED_PASSES):
                    self._decode(runner, rows)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) / TIMED_PASSES)
            total += min(times)
        return total

    def _decode(self, runner: PagedModelRunner, rows: int) -> None:
        runner.decode(self._sequences[:rows], [CONTEXT - 1] * rows, [[1]] * rows)
