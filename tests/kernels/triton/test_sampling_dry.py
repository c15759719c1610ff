"""DRY on a device: the kernel against a brute-force search, and texts that grow token by token."""

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

from exlm.kernels.sampling_layout import HEADER_OFFSETS, HEADER_WORDS, MAX_DRY_PENALTY
from exlm.sampling import Settings, gpu_batch
from exlm.sampling.gpu_batch import OUT_OF_VOCAB, DeviceTokenHistory, UploadBuffer
from tests.sampling import oracle
from tests.sampling.random_inputs import neutral

pytest.importorskip("triton")

import triton
import triton.language as tl

from exlm.kernels.triton.sampling_logits import apply_dry

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 40


@triton.jit  # type: ignore[untyped-decorator]
def dry_test_kernel(y, counts, words, table, width, span, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    low = tl.program_id(0) * span
    apply_dry(y, counts, low, tl.minimum(low + span, width), width, words, table, TILE)


def kernel_costs(text: list[int], settings: Settings, breakers: frozenset[int]) -> list[float]:
    """The kernel's penalty of each logit; the header word has the last token."""
    device_history, span = DeviceTokenHistory(WIDTH, DEVICE), 23
    mask = torch.tensor([token in breakers for token in range(WIDTH)], device=DEVICE)
    table = torch.tensor(settings.compiled().kernel_row, dtype=torch.float64, device=DEVICE)
    y, counts = torch.zeros(WIDTH, device=DEVICE), torch.zeros(WIDTH, dtype=torch.int32, device=DEVICE)
    for part in (text[:-1], text):
        words = torch.zeros(HEADER_WORDS, dtype=torch.int64)
        words[HEADER_OFFSETS["history"] : HEADER_OFFSETS["history"] + 3] = torch.tensor(
            device_history.sync(part, UploadBuffer([], []))
        )
        words[HEADER_OFFSETS["dry_breakers"]] = mask.data_ptr() if breakers else 0
        y.zero_()
        dry_test_kernel[(-(-WIDTH // span),)](y, counts, words.to(DEVICE), table, WIDTH, span, TILE=32)
        assert not counts.any()
    return (-y).tolist()


def check_against_oracle(seed: int) -> None:
    """Compare one text and one setting with the oracle."""
    rng = Random(seed)
    variety = rng.choice((1, 2, 3, 12))
    text = [rng.randrange(variety) for _ in range(rng.choice((0, 1, 2, 5, 17, 50)))]
    for _ in range(rng.choice((0, 0, 3))):
        text.insert(rng.randint(0, len(text)), rng.choice((-3, WIDTH, 10**12, WIDTH - 1)))
    breakers = frozenset(rng.sample(range(variety + 2), rng.choice((0, 0, 1))))
    settings = neutral(
        dry_multiplier=rng.choice((0.8, 2.0)),
        dry_base=rng.choice((0.5, 1.0, 1.75)),
        dry_allowed_length=rng.randint(0, 4),
        dry_max_ngram=rng.choice((1, 3, 20, 40)),
        dry_range=rng.choice((0, 0, 1, 2, 30, 1000)),
        dry_sequence_breakers=breakers,
    )
    costs = oracle.dry_penalties(text, settings, breakers, WIDTH)
    wanted = [min(costs.get(token, 0.0), MAX_DRY_PENALTY) for token in range(WIDTH)]
    assert kernel_costs(text, settings, breakers) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_matches_the_brute_force_search(seed: int) -> None:
    check_against_oracle(seed)


@pytest.mark.gpu
def test_the_kernel_matches_on_a_gpu_for_many_texts() -> None:
    for seed in range(20, 1000):
        check_against_oracle(seed)


def test_costs_stay_finite() -> None:
    settings = neutral(dry_multiplier=1.0, dry_base=1e10, dry_max_ngram=100, dry_sequence_breakers=frozenset())
    costs = kernel_costs([1] * 60, settings, frozenset())
    assert costs[1] == pytest.approx(MAX_DRY_PENALTY)


@pytest.fixture(scope="module", autouse=True)
def _small_capacity() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_batch, "MIN_HISTORY_CAPACITY", 4)
        yield


@given(st.lists(st.lists(st.integers(-2, WIDTH + 1), max_size=6), max_size=12))
def test_device_history_equals_the_text_for_any_append_sizes(parts: list[list[int]]) -> None:
    device_history, text = DeviceTokenHistory(WIDTH, torch.device("cpu")), list[int]()
    for part in parts:
        text += part
        address, count, last = device_history.sync(text, UploadBuffer([], []))
        written: Any = np.ctypeslib.as_array((ctypes.c_int32 * max(1, count)).from_address(address))
        if count:
            written[count - 1] = last if 0 <= last < WIDTH else OUT_OF_VOCAB  # as the kernels do
        assert written[:count].tolist() == [t if 0 <= t < WIDTH else OUT_OF_VOCAB for t in text]
        assert device_history.capacity_left >= 0
