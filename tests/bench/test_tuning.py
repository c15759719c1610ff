"""Tuning: knobs are turned one at a time, and only what is quicker stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm import Config, InputError, Model
from exlm.bench import Plan, tune
from exlm.bench.tuning import GAIN, settle, tuned
from tests import tiny

Setting = tuple[int, ...]


class Dial:
    """A knob of one number, whose neighbours are those next to it."""

    def __init__(self, name: str, costs: Sequence[float], at: int) -> None:
        self.name, self.costs, self.setting = name, costs, (at,)
        self.turns = 0

    def nearby(self) -> list[Setting]:
        return [(at,) for at in (self.setting[0] - 1, self.setting[0] + 1) if 0 <= at < len(self.costs)]

    def turn(self, setting: Setting) -> None:
        self.setting = setting
        self.turns += 1

    @property
    def cost(self) -> float:
        return self.costs[self.setting[0]]


@given(
    st.lists(st.floats(1.0, 2.0), min_size=1, max_size=9).flatmap(
        lambda c: st.tuples(st.just(c), st.integers(0, len(c) - 1))
    )
)
def test_a_knob_ends_where_nothing_nearby_is_quicker(drawn: tuple[list[float], int]) -> None:
    costs, at = drawn
    dial = Dial("", costs, at)
    found = settle(dial, lambda: dial.cost, dial.cost)
    assert found == dial.cost <= costs[at]
    assert all(costs[near] > found * (1 - GAIN) for (near,) in dial.nearby())
    assert dial.turns <= 2 * len(costs) + len(costs)


class Device:
    """A backend with two dials."""

    name = "dials"

    def __init__(self, dials: Sequence[Dial], file: Path) -> None:
        self.dials, self.file, self.kept = dials, file, 0

    def used(self, run: Callable[[], object]) -> Sequence[Dial]:
        run()
        return self.dials

    def keep(self, knobs: Sequence[Dial]) -> Path:
        self.kept += 1
        return self.file


def worked(monkeypatch: pytest.MonkeyPatch, device: Device, slower: float = 0.0) -> Model:
    """A model that runs on it; with `slower` each pass takes so much longer than the one before."""
    model, passes = Model.__new__(Model), count()

    class Passes:
        def __init__(self, _: Model) -> None: ...

        def once(self) -> None: ...

        def __call__(self) -> float:
            return sum(dial.cost for dial in device.dials) + slower * next(passes)

    monkeypatch.setattr("exlm.bench.tuning._Passes", Passes)
    monkeypatch.setattr(Model, "backends", property(lambda _: [device]))
    return model


def test_what_is_quicker_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = Device([Dial("a", [1.0, 1.5, 2.0], 2), Dial("b", [3.0, 4.0], 0)], tmp_path / "plans")
    told: list[str] = []
    found = tuned(worked(monkeypatch, device), lambda what, *_: told.append(what))
    assert [change._asdict() for change in found.changes] == [{"name": "a", "before": (2,), "after": (0,)}]
    assert (found.before, found.after, found.file, device.kept) == (5.0, 4.0, device.file, 1)
    assert told == ["a", "b"]


def test_what_is_not_quicker_in_turns_is_taken_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A device that became quicker while it was tuned has found nothing."""
    device = Device([Dial("a", [1.0, 1.0], 0)], tmp_path)
    found = tuned(worked(monkeypatch, device, slower=-0.01))
    assert (found.changes, found.file, device.kept) == ((), None, 0)
    assert device.dials[0].setting == (0,)


def test_nothing_to_tune_is_told(tmp_path: Path) -> None:
    model = Model(Config(tiny.make(tmp_path / "model")))
    model.load()
    with pytest.raises(InputError, match="only the CUDA kernels have settings"):
        tuned(model)
    model.unload()
    with pytest.raises(InputError, match="Name a GPU with --device"):
        tune(Plan(shape="tiny", device="cpu", prompt=64))


@pytest.mark.gpu
def test_a_gpu_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is found: it is a model like before, and what was kept is used when it is loaded again."""
    monkeypatch.setenv("EXLM_CACHE", str(tmp_path))
    found = tune(Plan(shape="tiny", device="cuda", prompt=64))
    assert found.after <= found.before
    assert (found.file is None) == (not found.changes)
    files = list((tmp_path / "kernels").glob("plans-*.json"))
    assert files == ([] if found.file is None else [found.file])
    again = tune(Plan(shape="tiny", device="cuda", prompt=64))
    assert all(
        change.before == known.after
        for change in again.changes
        for known in found.changes
        if known.name == change.name
    )
