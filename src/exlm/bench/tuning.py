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
from ..kernels.backend import Knob, Tunable
from ..model.devices import pick_device
from ..model.model_runner import PagedModelRunner
from .benchmark import Plan, Tell, opened

ROWS = (1, 8)
"""Of the passes that are timed: a setting must be good for both."""

CONTEXT, PAGE = 512, 256
WARM, PASSES, TURNS = 3, 20, 5
GAIN = 0.002
"""The share of a pass that a change must save: less than that is noise."""

Setting = tuple[int, ...]


class Change(NamedTuple):
    """One kind of work, as it was set and as it is now."""

    name: str
    before: Setting
    after: Setting


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
    backend = next((one for one in model.backends if isinstance(one, Tunable)), None)
    if backend is None:
        names = ", ".join(one.name for one in model.backends)
        raise InputError(
            f"There is nothing to tune: only the CUDA kernels have settings, and this model runs on {names}. "
            "Name a GPU with --device."
        )
    clock = _Passes(model)
    knobs = backend.used(clock.once)
    was = [knob.setting for knob in knobs]
    first = clock()
    now = first
    for done, knob in enumerate(knobs):
        tell(knob.name, done, len(knobs))
        now = settle(knob, clock, now)
    changes = tuple(
        Change(knob.name, old, knob.setting)
        for knob, old in zip(knobs, was, strict=True)
        if knob.setting != old
    )
    before, after = _compared(knobs, was, clock) if changes else (first, first)
    if not changes or after > before * (1 - GAIN):
        _turn(knobs, was)
        return Tuned((), before, before, None)
    return Tuned(changes, before, after, backend.keep(knobs))


def settle(knob: Knob, clock: Callable[[], float], now: float) -> float:
    """Turn a knob, step by step, until no setting nearby is quicker; returns how quick that is."""
    best, known = knob.setting, {knob.setting}
    while True:
        times: dict[Setting, float] = {}
        for setting in knob.nearby():
            if setting not in known:
                known.add(setting)
                knob.turn(setting)
                times[setting] = clock()
                knob.turn(best)
        winner = min(times, key=lambda setting: times[setting], default=best)
        if winner == best or times[winner] > now * (1 - GAIN):
            return now
        best, now = winner, times[winner]
        knob.turn(best)


def _compared(
    knobs: Sequence[Knob], was: Sequence[Setting], clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds as it was and as it is, in turns: a device may have become quicker or slower meanwhile."""
    ways = was, [knob.setting for knob in knobs]
    times: tuple[list[float], list[float]] = ([], [])
    for way in (0, 1, 1, 0, 0, 1, 1, 0):
        _turn(knobs, ways[way])
        times[way].append(clock())
    _turn(knobs, ways[1])
    return median(times[0]), median(times[1])


def _turn(knobs: Sequence[Knob], to: Sequence[Setting]) -> None:
    for knob, setting in zip(knobs, to, strict=True):
        knob.turn(setting)


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
