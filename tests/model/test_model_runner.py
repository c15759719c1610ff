"""Batches that the runner sends to the device."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.model.model_runner import copy_to_device


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=5))
def test_integers_are_copied_unchanged(shapes: list[list[int]]) -> None:
    arrays = [np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 7 for shape in shapes]
    for got, want in zip(copy_to_device(arrays, torch.device("cpu")), arrays, strict=True):
        assert got.dtype is torch.int64
        assert np.array_equal(got.numpy(), want)
        assert got.storage_offset() % 2 == 0
