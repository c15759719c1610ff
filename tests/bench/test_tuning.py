"""Tuning: hill climbing over kernel configurations, and saving only faster ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm import Config, InputError, Model
from exlm.bench import BenchmarkConfig, tune
from exlm.bench.tuning import MIN_GAIN, _DecodeTimer, hill_climb, tune_model
from tests import tiny

TuneConfig = tuple[int, ...]


class FakeSpace:
    """A one-dimensional space of configurations."""

    def __init__(self, name: str, costs: Sequence[float], at: int) -> None:
        self.name, self.costs, self.config = name, costs, (at,)
        self.applied = 0

    def neighbors(self) -> list[TuneConfig]:
        return [(at,) for at in (self.config[0] - 1, self.config[0] + 1) if 0 <= at < len(self.costs)]

    def apply(self, config: TuneConfig) -> None:
        self.config = config
        self.applied += 1

    @property
    def cost(self) -> float:
        return self.costs[self.config[0]]


@given(
    st.lists(st.floats(1.0, 2.0), min_size=1, max_size=9).flatmap(
        lambda c: st.tuples(st.just(c), st.integers(0, len(c) - 1))
    )
)
def test_hill_climbing_ends_where_no_neighbor_is_faster(drawn: tuple[list[float], int]) -> None:
    costs, at = drawn
    space = FakeSpace("", costs, at)
    found = hill_climb(space, lambda: space.cost, space.cost)
    assert found == space.cost <= costs[at]
    assert all(costs[near] > found * (1 - MIN_GAIN) for (near,) in space.neighbors())
    assert space.applied <= 2 * len(costs) + len(costs)


class TunableBackend:
    """A backend with tunable configurations."""

    name = "tunable"

    def __init__(self, spaces: Sequence[FakeSpace], file: Path) -> None:
        self.spaces, self.file, self.saves = spaces, file, 0

    def tune_spaces(self, run: Callable[[], object]) -> Sequence[FakeSpace]:
        run()
        return self.spaces

    def save_tuned(self, spaces: Sequence[FakeSpace]) -> Path:
        self.saves += 1
        return self.file


def model_on(backend: TunableBackend, monkeypatch: pytest.MonkeyPatch, slower: float = 0.0) -> Model:
    """A model on a fake backend; each pass takes `slower` seconds longer than the last one."""
    model, passes = Model.__new__(Model), count()

    class FakeTimer:
        def __init__(self, _: Model) -> None: ...

        def run_once(self) -> None: ...

        def seconds(self) -> float:
            return sum(space.cost for space in backend.spaces) + slower * next(passes)

    monkeypatch.setattr("exlm.bench.tuning._DecodeTimer", FakeTimer)
    monkeypatch.setattr(Model, "backends", property(lambda _: [backend]))
    return model


def test_faster_settings_are_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = TunableBackend([FakeSpace("a", [1.0, 1.5, 2.0], 2), FakeSpace("b", [3.0, 4.0], 0)], tmp_path / "plans")
    progress: list[str] = []
    found = tune_model(model_on(backend, monkeypatch), lambda what, *_: progress.append(what))
    assert [change._asdict() for change in found.changes] == [{"name": "a", "before": (2,), "after": (0,)}]
    assert (found.before, found.after, found.file, backend.saves) == (5.0, 4.0, backend.file, 1)
    assert progress == ["a", "b"]


def test_a_config_that_is_not_faster_in_alternation_is_reverted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the device only became faster while it was tuned, nothing was found."""
    backend = TunableBackend([FakeSpace("a", [1.0, 1.0], 0)], tmp_path)
    found = tune_model(model_on(backend, monkeypatch, slower=-0.01))
    assert (found.changes, found.file, backend.saves) == ((), None, 0)
    assert backend.spaces[0].config == (0,)


def test_a_model_without_tunable_kernels_is_refused(tmp_path: Path) -> None:
    model = Model(Config(tiny.make(tmp_path / "model")))
    model.load()
    with pytest.raises(InputError, match="only the CUDA kernels have settings"):
        tune_model(model)
    model.unload()
    with pytest.raises(InputError, match="Name a GPU with --device"):
        tune(BenchmarkConfig(shape="tiny", device="cpu", prompt=64))


def test_timed_passes_read_and_write_recurrent_states(fixtures_dir: Path) -> None:
    model = Model(Config(fixtures_dir / "tiny-qwen3_5"))
    model.load()
    timer = _DecodeTimer(model)
    timer.run_once()
    for layer in timer._cache.layers:
        for tensor in layer.state_tensors:
            assert not tensor[:8].any()
            assert all(bool(state.any()) for state in tensor[8:])


@pytest.mark.gpu
def test_a_gpu_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is found, the model's output does not change, and saved settings are used at the next load."""
    monkeypatch.setenv("EXLM_CACHE", str(tmp_path))
    found = tune(BenchmarkConfig(shape="tiny", device="cuda", prompt=64))
    assert found.after <= found.before
    assert (found.file is None) == (not found.changes)
    files = list((tmp_path / "kernels").glob("plans-*.json"))
    assert files == ([] if found.file is None else [found.file])
    again = tune(BenchmarkConfig(shape="tiny", device="cuda", prompt=64))
    assert all(
        change.before == known.after for change in again.changes for known in found.changes if known.name == change.name
    )
