"""Placement against a brute-force search over all ways to cut a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import DoesNotFit
from exlm.model.placement import DeviceBudget, ModuleMemory, budgets_with_modules, format_bytes, place_modules

SMALL = st.integers(0, 12)


@st.composite
def module_lists(draw: st.DrawFn) -> list[ModuleMemory]:
    """Modules of which the last may share weights with the first, as a tied head does."""
    modules = draw(st.lists(st.builds(ModuleMemory, st.just("part"), SMALL, SMALL, SMALL), min_size=1, max_size=6))
    if len(modules) > 1:
        modules[-1] = replace(modules[-1], shared=draw(st.integers(0, modules[0].weights)))
    return modules


MODULES = module_lists()
CAPACITIES = st.lists(st.builds(DeviceBudget, st.just("device"), st.integers(0, 60)), min_size=1, max_size=4)


def is_valid_placement(modules: list[ModuleMemory], placement: list[int], capacities: list[DeviceBudget]) -> bool:
    """Whether all modules fit, computed independently."""
    for index, capacity in enumerate(capacities):
        placed = [module for module, device in zip(modules, placement, strict=True) if device == index]
        needed = sum(m.weights + m.cache for m in placed) + max((m.workspace for m in placed), default=0)
        needed += 0 if placement[0] == index else sum(m.shared for m in placed)
        if needed > capacity.usable:
            return False
    return True


@given(MODULES, CAPACITIES)
def test_a_placement_is_found_if_there_is_one(modules: list[ModuleMemory], capacities: list[DeviceBudget]) -> None:
    placements = combinations_with_replacement(range(len(capacities)), len(modules))
    possible = [list(placement) for placement in placements if is_valid_placement(modules, list(placement), capacities)]
    if not possible:
        with pytest.raises(DoesNotFit, match="Turn this"):
            place_modules(modules, capacities, "Turn this.")
        return
    found = place_modules(modules, capacities, "Turn this.")
    assert found in possible
    assert found == min(possible)  # the first devices are filled first
    budgets = budgets_with_modules(modules, found, capacities)
    assert all(budget.total <= budget.usable for budget in budgets)


@given(MODULES, CAPACITIES, st.integers(0, 3), st.integers(0, 20))
def test_more_memory_never_hurts(
    modules: list[ModuleMemory], capacities: list[DeviceBudget], which: int, more: int
) -> None:
    try:
        place_modules(modules, capacities, "")
    except DoesNotFit:
        return
    which %= len(capacities)
    larger = [DeviceBudget(c.name, c.usable + (more if i == which else 0)) for i, c in enumerate(capacities)]
    place_modules(modules, larger, "")


def test_the_error_has_the_numbers_and_the_remedy() -> None:
    modules = [ModuleMemory("embedding", 3 << 30), ModuleMemory("layers.0", 2 << 30, 1 << 30, 1 << 30)]
    with pytest.raises(DoesNotFit) as caught:
        place_modules(modules, [DeviceBudget("cuda:0", 4 << 30)], "Lower max_seq_len.")
    for words in (
        "1 of 2 modules fit",
        "layers.0",
        "7.00 GB",
        "cache 1.00 GB",
        "cuda:0 4.00 GB",
        "Lower max",
    ):
        assert words in str(caught.value)
    assert isinstance(caught.value, RuntimeError)  # as old scripts expect
    assert format_bytes(5 << 20) == "5.0 MB"
