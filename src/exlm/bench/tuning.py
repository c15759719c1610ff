"""Searches the fastest kernel settings for a model on this GPU by hill climbing, one kind of matrix at a
time.

Whole decode passes are timed, replayed as CUDA graphs, because kernels affect each other. The backend says
which settings there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from .. import Cache, InputError, Model, env
from ..kernels.interface import SupportsTuning, TuneSpace
from ..model.devices import pick_device
from ..model.model_runner import PagedModelRunner
from .benchmark import BenchmarkConfig, ProgressCallback, loaded_model

BATCH_SIZES = (1, 8)
"""Batch sizes of the timed passes; their sum must improve."""

CONTEXT = 512
WARMUP_PASSES, TIMED_PASSES, REPEATS = 3, 20, 5
MIN_GAIN = 0.002
"""The share of the time that a change must save; less counts as noise."""

TuneConfig = tuple[int, ...]


class ConfigChange(NamedTuple):
    """The settings of one kind of matrix before and after tuning."""

    name: str
    before: TuneConfig
    after: TuneConfig


@dataclass(frozen=True)
class TuningResult:
    """The outcome of tuning a model."""

    changes: tuple[ConfigChange, ...]
    before: float  # seconds of one pass at each batch size, added
    after: float
    file: Path | None  # where the settings were saved; None if nothing was faster


@dataclass
class _TimedSequence:
    """The attributes of a sequence that a runner reads."""

    pages: list[int]
    ids: list[int] = field(default_factory=lambda: [1])
    extras: None = None


def tune(config: BenchmarkConfig, on_progress: ProgressCallback = lambda *_: None) -> TuningResult:
    """Tune the kernels for the model that a config names."""
    env.cap_onednn_isa()
    on_progress("loading", 0, 1)
    with loaded_model(config, pick_device(config.device or env.default_device())) as (model, _):
        return tune_model(model, on_progress)


def tune_model(model: Model, on_progress: ProgressCallback = lambda *_: None) -> TuningResult:
    """Tune every kind of matrix in a loaded model's decode passes; save the result if it is faster."""
    backend = next((one for one in model.backends if isinstance(one, SupportsTuning)), None)
    if backend is None:
        names = ", ".join(one.name for one in model.backends)
        raise InputError(
            f"There is nothing to tune: only the CUDA kernels have settings, and this model runs on {names}. "
            "Name a GPU with --device."
        )
    clock = _PassTimer(model)
    spaces = backend.tune_spaces(clock.run_once)
    initial = [space.config for space in spaces]
    first = clock()
    now = first
    for done, space in enumerate(spaces):
        on_progress(space.name, done, len(spaces))
        now = hill_climb(space, clock, now)
    changes = tuple(
        ConfigChange(space.name, old, space.config)
        for space, old in zip(spaces, initial, strict=True)
        if space.config != old
    )
    before, after = _time_both(spaces, initial, clock) if changes else (first, first)
    if not changes or after > before * (1 - MIN_GAIN):
        _apply(spaces, initial)
        return TuningResult((), before, before, None)
    return TuningResult(changes, before, after, backend.save_tuned(spaces))


def hill_climb(space: TuneSpace, clock: Callable[[], float], now: float) -> float:
    """Move to the fastest neighbouring setting until there is none; returns its time."""
    best, known = space.config, {space.config}
    while True:
        times: dict[TuneConfig, float] = {}
        for config in space.neighbors():
            if config not in known:
                known.add(config)
                space.apply(config)
                times[config] = clock()
                space.apply(best)
        winner = min(times, key=lambda config: times[config], default=best)
        if winner == best or times[winner] > now * (1 - MIN_GAIN):
            return now
        best, now = winner, times[winner]
        space.apply(best)


def _time_both(
    spaces: Sequence[TuneSpace], initial: Sequence[TuneConfig], clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds before and after, measured in alternation: the device's clock may have changed meanwhile."""
    configs = initial, [space.config for space in spaces]
    times: tuple[list[float], list[float]] = ([], [])
    for which in (0, 1, 1, 0, 0, 1, 1, 0):
        _apply(spaces, configs[which])
        times[which].append(clock())
    _apply(spaces, configs[1])
    return median(times[0]), median(times[1])


def _apply(spaces: Sequence[TuneSpace], to: Sequence[TuneConfig]) -> None:
    for space, config in zip(spaces, to, strict=True):
        space.apply(config)


class _PassTimer:
    """Times decode passes at each batch size."""

    def __init__(self, model: Model) -> None:
        self._model = model
        pages = -(-CONTEXT // Cache.page_size)
        self._cache = Cache(model, max_seq_len=max(BATCH_SIZES) * pages * Cache.page_size)
        self._texts = [
            _TimedSequence(list(range(row * pages, (row + 1) * pages))) for row in range(max(BATCH_SIZES))
        ]

    def run_once(self) -> None:
        """Run a pass at each batch size, without CUDA graphs."""
        for rows in BATCH_SIZES:
            self._decode(self._model.runner(self._cache), rows)

    def __call__(self) -> float:
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
        runner.decode(self._texts[:rows], [CONTEXT - 1] * rows, [[1]] * rows)
