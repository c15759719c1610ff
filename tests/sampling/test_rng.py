"""The counter-based random numbers: published vectors, equal results of both versions, independent streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import InputError
from exlm.sampling.rng import PhiloxStream, check_seed, philox, philox_array, uniform

WORD = st.integers(0, 2**32 - 1)

PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == words
    assert tuple(philox_array(np.array([counter], np.uint64).T, key)[:, 0].tolist()) == words


@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=8), st.tuples(WORD, WORD))
def test_plain_and_array_agree(counters: list[tuple[int, int, int, int]], key: tuple[int, int]) -> None:
    words = philox_array(np.array(counters, np.uint64).T, key).T.tolist()
    assert [tuple(row) for row in words] == [philox(counter, key) for counter in counters]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 5))
def test_blocks_give_the_numbers_of_their_positions(seed: int, position: int, branch: int) -> None:
    numbers = PhiloxStream(seed)
    for _ in range(5):
        found = numbers.at(position, branch)
    assert found == uniform(seed, position, branch)
    assert 0.0 <= found < 1.0
    assert numbers.at(position + 1, branch) == uniform(seed, position + 1, branch)
    assert numbers.at(position, branch) == found


def test_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = torch.tensor([uniform(7, position) for position in range(4000)])
    counts = torch.histc(numbers, 20, 0.0, 1.0)
    assert float(((counts - 200) ** 2 / 200).sum()) < 45.0  # chi-square, 19 degrees of freedom, p = 0.0007
    next_seed = torch.tensor([uniform(8, position) for position in range(4000)])
    for other in (numbers.roll(1), next_seed):
        assert abs(float(torch.corrcoef(torch.stack((numbers, other)))[0, 1])) < 0.06


def test_seeds() -> None:
    assert check_seed(-5) == -5
    assert uniform(-5, 0) != uniform(5, 0)
    assert check_seed(None) != check_seed(None)
    assert check_seed(np.int64(3)) == 3  # type: ignore[arg-type]
    for wrong in (1.5, "x", True):
        with pytest.raises(InputError, match="seed must be an integer"):
            check_seed(wrong)  # type: ignore[arg-type]
