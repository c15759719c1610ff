"""Memory that is used again: never two owners, numbers that stay, and nothing kept for ever."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm.formats.room import KEPT, LARGE, PIECE, fresh, give_back, room

SIZES = st.sampled_from([8, LARGE - 8, LARGE, LARGE + 8, 2 * LARGE, 5 * LARGE])


def filled(size: int, value: int) -> Tensor:
    return room((size // 8, 2), torch.int32).fill_(value)


@given(st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=40))
def test_everybody_has_their_own(steps: list[int]) -> None:
    """A positive step asks for so many bytes, a negative one drops somebody."""
    held: dict[int, Tensor] = {}
    for number, step in enumerate(steps):
        if step > 0:
            held[number] = filled(step, number)
        elif held:
            held.pop(list(held)[step % len(held)])
        assert all(bool((tensor == value).all()) for value, tensor in held.items())


def test_a_view_keeps_its_memory() -> None:
    view = filled(LARGE, 7)[3:5]
    others = [filled(LARGE, n) for n in range(4)]
    assert view.tolist() == [[7, 7], [7, 7]]
    assert [int(one[0, 0]) for one in others] == [0, 1, 2, 3]


def test_what_was_dropped_is_used_again_until_it_is_given_back() -> None:
    give_back()
    place = filled(LARGE, 1).data_ptr()
    assert filled(LARGE, 2).data_ptr() == place
    give_back()
    assert int(room((LARGE // 4,), torch.int32).sum()) == 0, "new memory is zeros"


def test_few_are_kept() -> None:
    give_back()
    tensors = [filled(LARGE, 1) for _ in range(KEPT + 5)]
    del tensors
    again = [room((LARGE // 4,), torch.int32) for _ in range(KEPT + 5)]
    assert sum(bool(one.any()) for one in again) == KEPT


def test_from_many_threads() -> None:
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(200):
            tensor = filled(LARGE, value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("shape", [(0,), (0, 5), (1,), (3, LARGE)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert room(shape, torch.float16).shape == shape


@pytest.mark.parametrize("size", [0, 1, LARGE - 1, LARGE, 3 * PIECE + 5])
def test_fresh_memory_is_zero_and_nobody_elses(size: int) -> None:
    spoilt = filled(5 * LARGE, -1)
    del spoilt
    first, second = fresh(size), fresh(size)
    assert first.shape == (size,)
    assert not bool(first.any())
    first.fill_(7)
    assert not bool(second.any())
