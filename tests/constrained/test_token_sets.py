"""Packed bits against Python's sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exlm.constrained import token_sets

WIDTHS = st.integers(1, 130)


@st.composite
def widths_and_ids(draw: st.DrawFn) -> tuple[int, set[int]]:
    width = draw(WIDTHS)
    return width, draw(st.sets(st.integers(0, width - 1)))


def bitmask_of(width: int, numbers: set[int]) -> token_sets.Bitmask:
    places = np.zeros(width, np.bool_)
    places[sorted(numbers)] = True
    return token_sets.bitmask_from_bools(places)


@given(widths_and_ids())
def test_packing_and_unpacking_is_lossless(case: tuple[int, set[int]]) -> None:
    width, numbers = case
    words = bitmask_of(width, numbers)
    assert words.dtype == np.int32
    assert len(words) == token_sets.num_bitmask_words(width)
    assert set(token_sets.bitmask_ids(words).tolist()) == numbers
    assert token_sets.bitmask_count(words) == len(numbers)
    assert {n for n in range(-40, width + 40) if token_sets.bitmask_contains(words, n)} == numbers


def test_both_ways_of_packing_ids_agree() -> None:
    source = np.random.default_rng(1)
    for size in (0, 1, 5, token_sets.MAX_IDS_SET_SINGLY, token_sets.MAX_IDS_SET_SINGLY + 1, 4000):
        numbers = source.choice(5000, size, replace=True).astype(np.int64)
        words = token_sets.bitmask_from_ids(numbers, 5000)
        assert words.dtype == np.int32
        assert set(token_sets.bitmask_ids(words).tolist()) == set(numbers.tolist())


@given(widths_and_ids(), WIDTHS)
def test_resizing_drops_ids_and_never_adds_any(case: tuple[int, set[int]], other: int) -> None:
    width, numbers = case
    words = bitmask_of(width, numbers)
    before = words.copy()
    found = token_sets.resize_bitmask(words, other)
    assert len(found) == token_sets.num_bitmask_words(other)
    assert set(token_sets.bitmask_ids(found).tolist()) == {n for n in numbers if n < other}
    assert (words == before).all()


@given(WIDTHS, st.data())
def test_a_mask_of_one_token(width: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, width - 1))
    assert token_sets.bitmask_ids(token_sets.bitmask_from_ids(np.array([number]), width)).tolist() == [number]


def test_the_layout_is_the_one_that_masks_are_sent_in() -> None:
    words = bitmask_of(70, {0, 31, 32, 69})
    assert words.view(np.uint32).tolist() == [0x80000001, 1, 1 << 5]
