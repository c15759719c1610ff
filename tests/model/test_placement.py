"""Placement: sizes in, places out, against the slow search over every way to cut a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import DoesNotFit
from exlm.model.placement import Part, Space, loads, place, size

SMALL = st.integers(0, 12)


@st.composite
def models(draw: st.DrawFn) -> list[Part]:
    """Modules of which the last may share what the first has, as a tied head does."""
    parts = draw(st.lists(st.builds(Part, st.just("part"), SMALL, SMALL, SMALL), min_size=1, max_size=6))
    if len(parts) > 1:
        parts[-1] = replace(parts[-1], shared=draw(st.integers(0, parts[0].weights)))
    return parts


PARTS = models()
SPACES = st.lists(st.builds(Space, st.just("device"), st.integers(0, 60)), min_size=1, max_size=4)


def fits(parts: list[Part], places: list[int], spaces: list[Space]) -> bool:
    """By hand: everything a device holds, and the largest workspace of it."""
    for at, space in enumerate(spaces):
        here = [part for part, where in zip(parts, places, strict=True) if where == at]
        need = sum(part.weights + part.cache for part in here) + max((p.workspace for p in here), default=0)
        need += 0 if places[0] == at else sum(part.shared for part in here)
        if need > space.free:
            return False
    return True


@given(PARTS, SPACES)
def test_a_placement_is_found_if_there_is_one(parts: list[Part], spaces: list[Space]) -> None:
    every = combinations_with_replacement(range(len(spaces)), len(parts))
    possible = [list(places) for places in every if fits(parts, list(places), spaces)]
    if not possible:
        with pytest.raises(DoesNotFit, match="Turn this"):
            place(parts, spaces, "Turn this.")
        return
    found = place(parts, spaces, "Turn this.")
    assert found in possible
    assert found == min(possible)  # early devices are filled first
    held = loads(parts, found, len(spaces))
    assert all(load.total <= space.free for load, space in zip(held, spaces, strict=True))


@given(PARTS, SPACES, st.integers(0, 3), st.integers(0, 20))
def test_more_memory_never_hurts(parts: list[Part], spaces: list[Space], which: int, more: int) -> None:
    try:
        place(parts, spaces, "")
    except DoesNotFit:
        return
    which %= len(spaces)
    larger = [Space(s.name, s.free + (more if i == which else 0)) for i, s in enumerate(spaces)]
    place(parts, larger, "")


def test_the_error_has_the_numbers_and_the_knob() -> None:
    parts = [Part("embedding", 3 << 30), Part("layers.0", 2 << 30, 1 << 30, 1 << 30)]
    with pytest.raises(DoesNotFit) as caught:
        place(parts, [Space("cuda:0", 4 << 30)], "Lower max_seq_len.")
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
    assert size(5 << 20) == "5.0 MB"
