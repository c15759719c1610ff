"""DRY on a device: the kernel against a search of every place, and texts that are told token by token."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.sampling import Settings, transcript
from exlm.sampling.dry import LARGEST_PENALTY
from exlm.sampling.lanes import AT, HEAD, _numbers
from exlm.sampling.transcript import STRANGE, Transcript
from tests.sampling import oracle
from tests.sampling.drawn import neutral

pytest.importorskip("triton")

import triton
import triton.language as tl

from exlm.sampling.triton.repeat import discourage

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: overflow
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 40


@triton.jit  # type: ignore[untyped-decorator]
def discourage_kernel(y, counts, words, table, width, span, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    low = tl.program_id(0) * span
    discourage(y, counts, low, tl.minimum(low + span, width), width, words, table, TILE)


def taken(text: list[int], asked: Settings, breakers: frozenset[int]) -> list[float]:
    """What the kernel takes from each logit, told of the last token by a word."""
    known, span = Transcript(WIDTH, DEVICE), 23
    mask = torch.tensor([token in breakers for token in range(WIDTH)], device=DEVICE)
    table = torch.tensor(_numbers(asked.plan()), dtype=torch.float64, device=DEVICE)
    y, counts = torch.zeros(WIDTH, device=DEVICE), torch.zeros(WIDTH, dtype=torch.int32, device=DEVICE)
    for part in (text[:-1], text):
        words = torch.zeros(HEAD, dtype=torch.int64)
        words[AT["text"] : AT["text"] + 3] = torch.tensor(known.follow(part))
        words[AT["breakers"]] = mask.data_ptr() if breakers else 0
        y.zero_()
        discourage_kernel[(-(-WIDTH // span),)](y, counts, words.to(DEVICE), table, WIDTH, span, TILE=32)
        assert not counts.any()
    return (-y).tolist()


def check(seed: int) -> None:
    """One text and one rule, against the oracle."""
    rng = Random(seed)
    variety = rng.choice((1, 2, 3, 12))
    text = [rng.randrange(variety) for _ in range(rng.choice((0, 1, 2, 5, 17, 50)))]
    for _ in range(rng.choice((0, 0, 3))):
        text.insert(rng.randint(0, len(text)), rng.choice((-3, WIDTH, 10**12, WIDTH - 1)))
    breakers = frozenset(rng.sample(range(variety + 2), rng.choice((0, 0, 1))))
    asked = neutral(
        dry_multiplier=rng.choice((0.8, 2.0)),
        dry_base=rng.choice((0.5, 1.0, 1.75)),
        dry_allowed_length=rng.randint(0, 4),
        dry_max_ngram=rng.choice((1, 3, 20, 40)),
        dry_range=rng.choice((0, 0, 1, 2, 30, 1000)),
        dry_sequence_breakers=breakers,
    )
    costs = oracle.dry_costs(text, asked, breakers, WIDTH)
    wanted = [min(costs.get(token, 0.0), LARGEST_PENALTY) for token in range(WIDTH)]
    assert taken(text, asked, breakers) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_finds_what_a_search_of_every_place_finds(seed: int) -> None:
    check(seed)


@pytest.mark.gpu
def test_a_gpu_finds_it_in_many_texts() -> None:
    for seed in range(20, 1000):
        check(seed)


def test_costs_stay_finite() -> None:
    asked = neutral(dry_multiplier=1.0, dry_base=1e10, dry_max_ngram=100, dry_sequence_breakers=frozenset())
    costs = taken([1] * 60, asked, frozenset())
    assert costs[1] == pytest.approx(LARGEST_PENALTY)


@pytest.fixture(scope="module", autouse=True)
def _little_room() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transcript, "LEAST_ROOM", 4)
        yield


@given(st.lists(st.lists(st.integers(-2, WIDTH + 1), max_size=6), max_size=12))
def test_a_transcript_is_the_text_whatever_was_appended_at_a_time(parts: list[list[int]]) -> None:
    known, text = Transcript(WIDTH, torch.device("cpu")), list[int]()
    for part in parts:
        text += part
        address, count, last = known.follow(text)
        written: Any = np.ctypeslib.as_array((ctypes.c_int32 * max(1, count)).from_address(address))
        if count:
            written[count - 1] = last if 0 <= last < WIDTH else STRANGE  # as the kernels do
        assert written[:count].tolist() == [t if 0 <= t < WIDTH else STRANGE for t in text]
        assert known.spare >= 0
