"""Top-k, argmax and sorting: entries and their order, with ties, odd widths and infinities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.sampling import candidates
from tests.sampling.random_inputs import logits


def expected(x: torch.Tensor, count: int) -> list[list[int]]:
    rows = x.tolist()
    return [sorted(range(len(row)), key=lambda place: (-row[place], place))[:count] for row in rows]


@given(st.data(), st.integers(1, 4), st.sampled_from((1, 2, 7, 50, 300, 5000)))
def test_largest(data: st.DataObject, rows: int, count: int) -> None:
    x = data.draw(logits(rows=rows))
    if data.draw(st.booleans()):
        x[:, data.draw(st.integers(0, x.shape[1] - 1)) :] = -torch.inf
    values, columns = candidates.stable_top_k(x, count)
    wanted = expected(x, count)
    finite = [sum(x[row, place] > -torch.inf for place in places) for row, places in enumerate(wanted)]
    for row, places in enumerate(wanted):
        assert columns[row, : int(finite[row])].tolist() == places[: int(finite[row])]
        torch.testing.assert_close(values[row], x[row, places], atol=0, rtol=0)


@given(st.data(), st.integers(1, 4), st.sampled_from((1, 2, 7, 50)))
def test_selection_by_keys(data: st.DataObject, rows: int, count: int) -> None:
    """The selection by keys, for devices that cannot sync and for many ties."""
    x = data.draw(logits(rows=rows))
    count = min(count, x.shape[1])
    assert candidates._top_k_by_key(x, count).tolist() == expected(x, count)


def test_many_ties_at_the_boundary() -> None:
    x = torch.zeros(2, 6400)
    x[1, 5000:] = 1.0
    assert candidates.stable_top_k(x, 50)[1].tolist() == [list(range(50)), list(range(5000, 5050))]


def test_zero_has_one_value() -> None:
    x = torch.zeros(1, 6400)
    x[0, ::2] = -0.0
    assert candidates.stable_top_k(x, 5)[1].tolist() == [[0, 1, 2, 3, 4]]
    assert candidates._top_k_by_key(x, 5).tolist() == [[0, 1, 2, 3, 4]]


@given(st.data(), st.integers(1, 4))
def test_first_largest_and_runs(data: st.DataObject, rows: int) -> None:
    x = data.draw(logits(rows=rows))
    maxima = candidates.block_maxima(x)
    for short in (candidates.MAX_DIRECT_COLUMNS, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(candidates, "MAX_DIRECT_COLUMNS", short)
            top, columns = candidates.stable_argmax(x)
        assert columns.tolist() == [row[0] for row in expected(x, 1)]
        assert top.tolist() == x.amax(-1).tolist()
    chunks = torch.split(x, candidates.VOCAB_BLOCK, 1)
    torch.testing.assert_close(maxima, torch.stack([chunk.amax(1) for chunk in chunks], 1), atol=0, rtol=0)
    sums = torch.stack([chunk.double().sum(1) for chunk in chunks], 1)
    torch.testing.assert_close(candidates.block_sums(x), sums, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("width", [100, 6400, 20001])
def test_slices_of_wider_tensors(width: int) -> None:
    whole = torch.randn(3, width + 27)
    part = whole[:, :width]
    assert candidates.stable_top_k(part, 20)[1].tolist() == expected(part, 20)
    assert candidates.stable_argmax(part)[1].tolist() == part.argmax(-1).tolist()
