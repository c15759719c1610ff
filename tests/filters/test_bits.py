"""Packed bits against Python's sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exlm.filters import bits

WIDTHS = st.integers(1, 130)


@st.composite
def chosen(draw: st.DrawFn) -> tuple[int, set[int]]:
    width = draw(WIDTHS)
    return width, draw(st.sets(st.integers(0, width - 1)))


def packed(width: int, numbers: set[int]) -> bits.Words:
    places = np.zeros(width, np.bool_)
    places[sorted(numbers)] = True
    return bits.pack(places)


@given(chosen())
def test_a_set_survives_packing(case: tuple[int, set[int]]) -> None:
    width, numbers = case
    words = packed(width, numbers)
    assert words.dtype == np.int32
    assert len(words) == bits.words_for(width)
    assert set(bits.members(words).tolist()) == numbers
    assert bits.count(words) == len(numbers)
    assert {n for n in range(-40, width + 40) if bits.contains(words, n)} == numbers


def test_many_and_few_tokens_make_the_same_set() -> None:
    source = np.random.default_rng(1)
    for size in (0, 1, 5, bits.FEW, bits.FEW + 1, 4000):
        numbers = source.choice(5000, size, replace=True).astype(np.int64)
        words = bits.of(numbers, 5000)
        assert words.dtype == np.int32
        assert set(bits.members(words).tolist()) == set(numbers.tolist())


@given(chosen(), WIDTHS)
def test_fitting_cuts_and_never_adds(case: tuple[int, set[int]], other: int) -> None:
    width, numbers = case
    words = packed(width, numbers)
    before = words.copy()
    found = bits.fit(words, other)
    assert len(found) == bits.words_for(other)
    assert set(bits.members(found).tolist()) == {n for n in numbers if n < other}
    assert (words == before).all()


@given(WIDTHS, st.data())
def test_a_set_of_one(width: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, width - 1))
    assert bits.members(bits.only(number, width)).tolist() == [number]


def test_the_layout_is_the_one_that_masks_are_sent_in() -> None:
    words = packed(70, {0, 31, 32, 69})
    assert words.view(np.uint32).tolist() == [0x80000001, 1, 1 << 5]
