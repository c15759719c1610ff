"""Placement against a brute-force search over all ways to cut a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import DoesNotFit
from exlm.model.placement import DeviceCapacity, ModuleMemory, device_loads, format_bytes, place_modules

SMALL = st.integers(0, 12)


@st.composite
def models(draw: st.DrawFn) -> list[ModuleMemory]:
    """Modules of which the last may share weights with the first, as a tied head does."""
    parts = draw(
        st.lists(st.builds(ModuleMemory, st.just("part"), SMALL, SMALL, SMALL), min_size=1, max_size=6)
    )
    if len(parts) > 1:
        parts[-1] = replace(parts[-1], shared=draw(st.integers(0, parts[0].weights)))
    return parts


MODULES = models()
CAPACITIES = st.lists(
    st.builds(DeviceCapacity, st.just("device"), st.integers(0, 60)), min_size=1, max_size=4
)


def is_valid_placement(parts: list[ModuleMemory], places: list[int], spaces: list[DeviceCapacity]) -> bool:
    """Whether all modules fit, computed independently."""
    for at, space in enumerate(spaces):
        here = [part for part, where in zip(parts, places, strict=True) if where == at]
        need = sum(part.weights + part.cache for part in here) + max((p.workspace for p in here), default=0)
        need += 0 if places[0] == at else sum(part.shared for part in here)
        if need > space.free:
            return False
    return True


@given(MODULES, CAPACITIES)
def test_a_placement_is_found_if_there_is_one(
    parts: list[ModuleMemory], spaces: list[DeviceCapacity]
) -> None:
    every = combinations_with_replacement(range(len(spaces)), len(parts))
    possible = [list(places) for places in every if is_valid_placement(parts, list(places), spaces)]
    if not possible:
        with pytest.raises(DoesNotFit, match="Turn this"):
            place_modules(parts, spaces, "Turn this.")
        return
    found = place_modules(parts, spaces, "Turn this.")
    assert found in possible
    assert found == min(possible)  # the first devices are filled first
    held = device_loads(parts, found, len(spaces))
    assert all(load.total <= space.free for load, space in zip(held, spaces, strict=True))


@given(MODULES, CAPACITIES, st.integers(0, 3), st.integers(0, 20))
def test_more_memory_never_hurts(
    parts: list[ModuleMemory], spaces: list[DeviceCapacity], which: int, more: int
) -> None:
    try:
        place_modules(parts, spaces, "")
    except DoesNotFit:
        return
    which %= len(spaces)
    larger = [DeviceCapacity(s.name, s.free + (more if i == which else 0)) for i, s in enumerate(spaces)]
    place_modules(parts, larger, "")


def test_the_error_has_the_numbers_and_the_remedy() -> None:
    parts = [ModuleMemory("embedding", 3 << 30), ModuleMemory("layers.0", 2 << 30, 1 << 30, 1 << 30)]
    with pytest.raises(DoesNotFit) as caught:
        place_modules(parts, [DeviceCapacity("cuda:0", 4 << 30)], "Lower max_seq_len.")
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
