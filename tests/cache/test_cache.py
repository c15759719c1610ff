"""The cache: geometry, paging, copying."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm import Cache, InputError, NotLoaded
from exlm.cache import PAGE, DenseLayer, LayerShape
from exlm.nn import Batch

CPU = torch.device("cpu")


@dataclass
class Stub:
    """Just enough of a model."""

    cache_shapes: list[LayerShape] = field(default_factory=lambda: [LayerShape(2, 4)] * 3)
    cache_devices: list[torch.device] | None = field(default_factory=lambda: [CPU] * 3)
    cache_dtype: torch.dtype = torch.float32
    cache_length: int = 300


def batch(past: list[int], tokens: int, pages: torch.Tensor) -> Batch:
    ids = torch.zeros(len(past), tokens, dtype=torch.int64)
    return Batch(ids, ids, torch.tensor(past), pages, max(past) + tokens, even=len(set(past)) == 1)


def test_geometry() -> None:
    cache = Cache(Stub(), batch_size=2)
    assert (cache.max_seq_len, cache.width, cache.num_pages, cache.current_seq_len) == (300, 2, 4, 0)
    assert [k.shape for k in cache.key_states] == [(2, 2 * PAGE, 2, 4)] * 3
    assert cache.footprint() == [3 * 2 * 4 * PAGE * 2 * 4 * 4]
    assert len(cache.all_tensors()) == 6


def test_the_contiguous_table_is_the_identity() -> None:
    assert Cache(Stub(), batch_size=2).table(2, CPU).tolist() == [[0, 1], [2, 3]]


def test_lazy_caches_wait_for_the_model() -> None:
    model = Stub(cache_devices=None)
    with pytest.raises(NotLoaded, match="lazy=True"):
        Cache(model)
    cache = Cache(model, lazy=True)
    assert not cache.allocated
    with pytest.raises(NotLoaded, match="load_autosplit"):
        _ = cache.layers
    model.cache_devices = [CPU] * 3
    cache.allocate()
    assert cache.allocated


@pytest.mark.parametrize(("batch_size", "length"), [(0, 8), (1, 0), (1, -2), (-1, -1)])
def test_absurd_sizes(batch_size: int, length: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        Cache(Stub(), batch_size=batch_size, max_seq_len=length)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 9), st.randoms())
def test_paged_rows_read_back_what_was_written(pasts: list[int], tokens: int, random: object) -> None:
    """Small pages in a shuffled order: every row must read exactly its own history."""
    page, heads, dim = 8, 2, 4
    width = -(-(max(pasts) + tokens) // page)
    order = list(range(len(pasts) * width))
    random.shuffle(order)  # type: ignore[attr-defined]
    pages = torch.tensor(order).view(len(pasts), width)
    layer = DenseLayer(len(order), page, heads, dim, torch.float32, CPU)
    full = torch.randn(len(pasts), max(pasts) + tokens, heads, dim)
    for row, past in enumerate(pasts):
        if past:
            old = full[row : row + 1, :past]
            layer.update(old, -old, batch([0], past, pages[row : row + 1]))
    new = torch.stack([full[row, past : past + tokens] for row, past in enumerate(pasts)])
    k, v = layer.update(new, -new, batch(pasts, tokens, pages))
    for row, past in enumerate(pasts):
        assert torch.equal(k[row, : past + tokens], full[row, : past + tokens])
        assert torch.equal(v[row, : past + tokens], -full[row, : past + tokens])


def test_copy_states_moves_one_row_to_many() -> None:
    cache, other = Cache(Stub(), batch_size=2), Cache(Stub(), batch_size=3, max_seq_len=700)
    for tensor in cache.all_tensors():
        tensor.normal_()
    cache.copy_states(other, 5, 270, 300, 270, 1, 1, 0, 2)
    for mine, theirs in zip(cache.key_states, other.key_states, strict=True):
        for row in (0, 1):
            assert torch.equal(theirs[row, 300:570], mine[1, 5:275])
        assert not theirs[2].any()
        assert not theirs[0, :300].any()


def test_copy_states_within_one_cache_may_overlap() -> None:
    cache = Cache(Stub())
    cache.key_states[0][0, :10] = torch.arange(10.0)[:, None, None]
    cache.copy_states(cache, 0, 8, 2, 8, 0, 1, 0, 1)
    assert cache.key_states[0][0, 2:10, 0, 0].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5, 0, 6, 0, 1, 0, 1), "equal ranges"),
        ((0, 5, 0, 5, 0, 2, 0, 1), "one row"),
        ((0, 5, 0, 5, 9, 1, 0, 1), "one row"),
        ((0, 5, 0, 5, 0, 1, 1, 1), "not in a cache of 1"),
        ((290, 20, 0, 20, 0, 1, 0, 1), "beyond"),
    ],
)
def test_copy_states_checks_its_ranges(arguments: tuple[int, ...], message: str) -> None:
    cache = Cache(Stub())
    with pytest.raises(InputError, match=message):
        cache.copy_states(cache, *arguments)


def test_clone_is_deep() -> None:
    cache = Cache(Stub(), batch_size=2)
    cache.current_seq_len = 17
    for tensor in cache.all_tensors():
        tensor.normal_()
    twin = cache.clone()
    assert twin.current_seq_len == 17
    for a, b in zip(cache.key_states, twin.key_states, strict=True):
        assert torch.equal(a[:, :300], b[:, :300])
    cache.all_tensors()[0].zero_()
    assert twin.all_tensors()[0].any()
    cache.reset()
    assert (cache.current_seq_len, twin.current_seq_len) == (0, 17)


def test_a_lazy_cache_cannot_copy() -> None:
    with pytest.raises(InputError, match="lazy"):
        Cache(Stub(), copy_from=Cache(Stub()), lazy=True)
