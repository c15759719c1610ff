"""Prefetching: every weight once, few in flight, errors raised by `take`, no thread left."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import BadTensor
from exlm.formats import DenseWeight, Weight
from exlm.model.builder import IN_FLIGHT_DIVISOR, MAX_IN_FLIGHT, WeightPrefetcher

ROLES = [f"layers.{i}" for i in range(30)]


class WeightStore:
    """Weights that contain their own number."""

    def __init__(self, broken: str | None = None) -> None:
        self.read_roles: list[str] = []
        self.broken = broken
        self._lock = threading.Lock()

    def read(self, role: str) -> Weight:
        with self._lock:
            self.read_roles.append(role)
        if role == self.broken:
            raise BadTensor(f"{role} is torn.")
        return DenseWeight(torch.full((1, 1), float(ROLES.index(role))))


def make_prefetcher(
    store: WeightStore, roles: list[str] = ROLES, size: int = 1, total: int = 1000
) -> WeightPrefetcher[Weight]:
    return WeightPrefetcher(store.read, lambda _: size, roles, total)


def weight_number(weight: Weight) -> float:
    assert isinstance(weight, DenseWeight)
    return float(weight.data)


@given(st.permutations(ROLES))
def test_any_order_gives_every_weight_once(order: list[str]) -> None:
    store = WeightStore()
    with make_prefetcher(store) as prefetcher:
        taken = [weight_number(prefetcher.take(role)) for role in order]
    assert taken == [ROLES.index(role) for role in order]
    assert sorted(store.read_roles) == sorted(ROLES)


def test_without_threads_the_caller_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exlm.model.builder.num_reader_threads", lambda total: 0)
    store, before = WeightStore(broken=ROLES[2]), threading.active_count()
    with make_prefetcher(store) as prefetcher:
        assert not store.read_roles
        assert [weight_number(prefetcher.take(role)) for role in ROLES[:2]] == [0, 1]
        with pytest.raises(BadTensor, match=ROLES[2]):
            prefetcher.take(ROLES[2])
        assert threading.active_count() == before
    assert store.read_roles == ROLES[:3]


def test_a_thread_that_cannot_be_started_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def once(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    with pytest.raises(RuntimeError, match="can't start new thread"), make_prefetcher(SlowStore()):
        raise AssertionError("the prefetcher started")
    assert not started[0].is_alive()


class SlowStore(WeightStore):
    """A store whose readers are never idle, so that each weight starts another thread."""

    def read(self, role: str) -> Weight:
        time.sleep(0.05)
        return super().read(role)


def test_few_are_in_flight() -> None:
    store = WeightStore()
    prefetcher = make_prefetcher(store)
    assert not store.read_roles
    with prefetcher:
        time.sleep(0.05)
        assert 1 <= len(store.read_roles) <= MAX_IN_FLIGHT + 1, "no weight was taken yet"
        prefetcher.take(ROLES[0])
        time.sleep(0.05)
        assert 2 <= len(store.read_roles) <= MAX_IN_FLIGHT + 1


@pytest.mark.parametrize("fit", [1, 2, 3])
def test_as_many_as_fit_are_in_flight(fit: int) -> None:
    store = WeightStore()
    with make_prefetcher(store, size=10, total=10 * fit * IN_FLIGHT_DIVISOR) as prefetcher:
        for count, role in enumerate(ROLES[:9]):
            prefetcher.take(role)
            time.sleep(0.01)
            assert len(store.read_roles) <= count + fit


def test_a_weight_larger_than_the_limit_is_loaded() -> None:
    store = WeightStore()
    with make_prefetcher(store, size=10, total=10) as prefetcher:
        assert [weight_number(prefetcher.take(role)) for role in ROLES] == list(range(30))


def test_an_error_is_raised_by_take() -> None:
    store = WeightStore(broken=ROLES[2])
    with make_prefetcher(store) as prefetcher:
        assert weight_number(prefetcher.take(ROLES[0])) == 0
        assert weight_number(prefetcher.take(ROLES[1])) == 1
        with pytest.raises(BadTensor, match="torn"):
            prefetcher.take(ROLES[2])
        assert weight_number(prefetcher.take(ROLES[3])) == 3


def test_early_exit_leaves_no_thread() -> None:
    store = WeightStore()
    before = threading.active_count()
    with make_prefetcher(store) as prefetcher:
        prefetcher.take(ROLES[0])
    count = len(store.read_roles)
    assert threading.active_count() == before
    time.sleep(0.05)
    assert len(store.read_roles) == count <= MAX_IN_FLIGHT + 1


def test_a_role_that_was_not_queued_is_loaded() -> None:
    with make_prefetcher(WeightStore(), ROLES[:3]) as prefetcher:
        assert weight_number(prefetcher.take(ROLES[9])) == 9
