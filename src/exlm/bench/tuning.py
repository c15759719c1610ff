"""The quickest settings of a model's kernels on this device: change one at a time, and time whole passes.

What counts is a whole pass as it is replayed: kernels get in each other's way. Which settings there are is
known to the backend.
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
from .benchmark import Plan, Tell, opened

ROWS = (1, 8)
"""Of the passes that are timed: a setting must be good for both."""

CONTEXT, PAGE = 512, 256
WARM, PASSES, TURNS = 3, 20, 5
GAIN = 0.002
"""The share of a pass that a change must save: less than that is noise."""

TuneConfig = tuple[int, ...]


class Change(NamedTuple):
    """One kind of work, as it was set and as it is now."""

    name: str
    before: TuneConfig
    after: TuneConfig


@dataclass(frozen=True)
class Tuned:
    """What was found."""

    changes: tuple[Change, ...]
    before: float  # seconds of one pass of each number of rows, together
    after: float
    file: Path | None  # None: nothing is quicker


@dataclass
class _Text:
    """A sequence of which a runner knows enough."""

    pages: list[int]
    ids: list[int] = field(default_factory=lambda: [1])
    extras: None = None


def tune(plan: Plan, tell: Tell = lambda *_: None) -> Tuned:
    """Tune the kernels for the model of a plan."""
    env.cap_onednn_isa()
    tell("loading", 0, 1)
    with opened(plan, pick_device(plan.device or env.default_device())) as (model, _):
        return tuned(model, tell)


def tuned(model: Model, tell: Tell = lambda *_: None) -> Tuned:
    """Settle every kind of work that decode passes of a loaded model consist of; keep what is quicker."""
    backend = next((one for one in model.backends if isinstance(one, SupportsTuning)), None)
    if backend is None:
        names = ", ".join(one.name for one in model.backends)
        raise InputError(
            f"There is nothing to tune: only the CUDA kernels have settings, and this model runs on {names}. "
            "Name a GPU with --device."
        )
    clock = _Passes(model)
    spaces = backend.tune_spaces(clock.once)
    initial = [space.config for space in spaces]
    first = clock()
    now = first
    for done, space in enumerate(spaces):
        tell(space.name, done, len(spaces))
        now = hill_climb(space, clock, now)
    changes = tuple(
        Change(space.name, old, space.config)
        for space, old in zip(spaces, initial, strict=True)
        if space.config != old
    )
    before, after = _compared(spaces, initial, clock) if changes else (first, first)
    if not changes or after > before * (1 - GAIN):
        _apply(spaces, initial)
        return Tuned((), before, before, None)
    return Tuned(changes, before, after, backend.save_tuned(spaces))


def hill_climb(space: TuneSpace, clock: Callable[[], float], now: float) -> float:
    """Turn a knob, step by step, until no setting nearby is quicker; returns how quick that is."""
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
        if winner == best or times[winner] > now * (1 - GAIN):
            return now
        best, now = winner, times[winner]
        space.apply(best)


def _compared(
    spaces: Sequence[TuneSpace], initial: Sequence[TuneConfig], clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds as it was and as it is, in turns: a device may have become quicker or slower meanwhile."""
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


class _Passes:
    """Decode passes of each number of rows, timed."""

    def __init__(self, model: Model) -> None:
        self._model = model
        pages = -(-CONTEXT // PAGE)
        self._cache = Cache(model, max_seq_len=max(ROWS) * pages * PAGE)
        self._texts = [_Text(list(range(row * pages, (row + 1) * pages))) for row in range(max(ROWS))]

    def once(self) -> None:
        """Every kind of pass, launched from the host."""
        for rows in ROWS:
            self._pass(self._model.runner(self._cache), rows)

    def __call__(self) -> float:
        """Seconds of one pass of each, as they are recorded now."""
        total = 0.0
        for rows in ROWS:
            runner = self._model.runner(self._cache)  # with recordings of its own
            for _ in range(WARM):
                self._pass(runner, rows)
            times = []
            for _ in range(TURNS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(PASSES):
                    self._pass(runner, rows)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) / PASSES)
            total += min(times)
        return total

    def _pass(self, runner: PagedModelRunner, rows: int) -> None:
        runner.decode(self._texts[:rows], [CONTEXT - 1] * rows, [[1]] * rows)
