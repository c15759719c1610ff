"""Public caches: geometry, paging and copying, in every format."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm import (
    Cache,
    CacheBase,
    CacheFP8,
    CacheQ4,
    CacheQ6,
    CacheQ8,
    DoesNotFit,
    InputError,
    NotLoaded,
    Unsupported,
)
from exlm.kvcache import PAGE_SIZE, DenseLayer, LayerShape
from exlm.nn import Batch

CPU = torch.device("cpu")
META = torch.device("meta")  # as a second device
KINDS: list[type[CacheBase]] = [Cache, CacheFP8, CacheQ8, CacheQ6, CacheQ4]


@dataclass
class CacheOwnerStub:
    """A `CacheOwner` without a model."""

    cache_shapes: list[LayerShape] = field(default_factory=lambda: [LayerShape(2, 4)] * 3)
    cache_devices: list[torch.device] | None = field(default_factory=lambda: [CPU] * 3)
    cache_dtype: torch.dtype = torch.float32
    cache_max_seq_len: int = 300
    cache_replicator: None = None


STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Resident bytes of this process."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


OWNER = CacheOwnerStub(cache_shapes=[LayerShape(2, 32)] * 3)


def fill(cache: CacheBase) -> None:
    for tensor in cache.all_tensors():
        tensor.copy_(torch.randint(0, 256, tensor.shape))


def batch(past: list[int], tokens: int, pages: torch.Tensor) -> Batch:
    ids = torch.zeros(len(past), tokens, dtype=torch.int64)
    return Batch(
        ids=ids,
        positions=ids,
        past_lens=torch.tensor(past),
        page_table=pages,
        max_kv_len=max(past) + tokens,
        uniform=len(set(past)) == 1,
    )


def test_geometry() -> None:
    cache = Cache(CacheOwnerStub(), batch_size=2)
    assert (cache.max_seq_len, cache.pages_per_row, cache.num_pages, cache.current_seq_len) == (300, 2, 4, 0)
    assert [k.shape for k in cache.key_states] == [(2, 2 * PAGE_SIZE, 2, 4)] * 3
    assert cache.footprint() == [3 * 2 * 4 * PAGE_SIZE * 2 * 4 * 4]
    assert len(cache.all_tensors()) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_committed_on_first_write(kind: type[CacheBase]) -> None:
    if not STATM.exists():
        pytest.skip("only Linux tells what memory a process has taken (/proc/self/statm)")
    before = resident_bytes()
    cache = kind(CacheOwnerStub(cache_shapes=[LayerShape(8, 64)] * 3), max_seq_len=2**15)
    size = sum(cache.footprint())
    assert resident_bytes() - before < size // 16 > 2**20
    assert all(not int(tensor[-1, -1].count_nonzero()) for tensor in cache.all_tensors())
    for tensor in cache.all_tensors():
        tensor.fill_(1)
    assert resident_bytes() - before > size // 2
    assert all(bool((tensor[-1, -1] == 1).all()) for tensor in cache.all_tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_any_memory_holds_are_refused(kind: type[CacheBase]) -> None:
    with pytest.raises(DoesNotFit, match=r"256,000,000,000,000 tokens.*CacheQ4"):
        kind(CacheOwnerStub(cache_shapes=[LayerShape(8, 64)] * 3), max_seq_len=256 * 10**12)


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_a_gpu_holds_are_refused(kind: type[CacheBase], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(DoesNotFit, match=r"512 tokens do not fit.*CacheQ4"):
        kind(CacheOwnerStub(cache_shapes=[LayerShape(8, 64)] * 3, cache_devices=[META] * 3), max_seq_len=512)


def test_the_contiguous_table_is_the_identity() -> None:
    assert Cache(CacheOwnerStub(), batch_size=2).identity_page_table(2, CPU).tolist() == [[0, 1], [2, 3]]


def test_what_is_assigned_to_a_layers_states_is_stored() -> None:
    """As scripts restore a session: the list is one of views."""
    cache = Cache(CacheOwnerStub(), max_seq_len=PAGE_SIZE)
    saved = torch.arange(5.0)[None, :, None, None].expand(1, 5, *cache.key_states[0].shape[2:])
    cache.key_states[0] = saved
    cache.value_states[-2:] = [saved + 1, saved + 2]
    assert torch.equal(cache.key_states[0][:, :5], saved)
    assert float(cache.key_states[0][:, 5:].abs().sum()) == 0
    assert torch.equal(cache.value_states[2][:, :5], saved + 2)
    for wrong in (saved[:, :, :1], torch.cat([saved] * 99, 1), saved[0], None):
        bad: Any = wrong
        with pytest.raises(InputError, match="Layer 1 of this cache stores"):
            cache.key_states[1] = bad


def test_a_cache_made_before_the_model_is_loaded_waits_for_it() -> None:
    """Old scripts make one and pass it to load_autosplit, which allocates it like a lazy one."""
    model = CacheOwnerStub(cache_devices=None)
    cache = Cache(model)
    assert not cache.allocated
    with pytest.raises(NotLoaded, match=r"call model\.load\(\) first, or make the cache with lazy=True"):
        _ = cache.layers
    model.cache_devices = [CPU] * 3
    assert len(cache.layers) == 3  # when it is first used
    assert cache.allocated


def test_lazy_caches_wait_for_the_model() -> None:
    model = CacheOwnerStub(cache_devices=None)
    cache = Cache(model, lazy=True)
    assert not cache.allocated
    with pytest.raises(NotLoaded, match="load_autosplit"):
        _ = cache.layers
    model.cache_devices = [CPU] * 3
    cache.allocate()
    assert cache.allocated


@pytest.mark.parametrize(
    ("batch_size", "length"), [(0, 8), (1, 0), (1, -2), (-1, -1), (1, 2048 * 1.5), (1, "2048"), (None, 8)]
)
def test_invalid_sizes_are_refused(batch_size: Any, length: Any) -> None:
    with pytest.raises(InputError, match="at least 1") as raised:
        Cache(CacheOwnerStub(), batch_size=batch_size, max_seq_len=length)
    assert f"found {batch_size!r} and {length!r}" in str(raised.value)


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


@pytest.mark.parametrize("kind", KINDS)
def test_copy_states_moves_one_row_to_many(kind: type[CacheBase]) -> None:
    cache, other = kind(OWNER, batch_size=2), kind(OWNER, batch_size=3, max_seq_len=700)
    fill(cache)
    cache.copy_states(other, 5, 270, 300, 270, 1, 1, 0, 2)
    for states in ("key_states", "value_states", "key_scales", "value_scales"):
        for source, target in zip(getattr(cache, states), getattr(other, states), strict=True):
            for row in (0, 1):
                assert torch.equal(target[row, 300:570], source[1, 5:275])
            assert not target[2].any()
            assert not target[0, :300].any()
            assert not target[0, 570:].any()


def test_copy_states_within_one_cache_may_overlap() -> None:
    cache = Cache(CacheOwnerStub())
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
    cache = Cache(CacheOwnerStub())
    with pytest.raises(InputError, match=message):
        cache.copy_states(cache, *arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_states_refuses_another_kind(kind: type[CacheBase]) -> None:
    other = Cache(OWNER) if kind is not Cache else CacheQ4(OWNER)
    with pytest.raises(InputError, match=f"{kind.__name__} gives .* found a {type(other).__name__}"):
        kind(OWNER).copy_states(other, 0, 5, 0, 5, 0, 1, 0, 1)
    with pytest.raises(InputError, match="same kind"):
        kind(OWNER, copy_from=other)


@pytest.mark.parametrize("kind", KINDS)
def test_clone_is_deep_and_of_the_same_kind(kind: type[CacheBase]) -> None:
    cache = kind(OWNER, batch_size=2)
    cache.current_seq_len = 17
    fill(cache)
    clone = cache.clone()
    assert type(clone) is kind
    assert (clone.current_seq_len, clone.batch_size, clone.max_seq_len) == (17, 2, 300)
    for a, b in zip(cache.all_tensors(), clone.all_tensors(), strict=True):
        assert torch.equal(a, b)
        a.zero_()
        assert b.any()
    cache.reset()
    assert (cache.current_seq_len, clone.current_seq_len) == (0, 17)


def test_a_clone_of_a_lazy_cache_is_lazy() -> None:
    cache = CacheQ6(OWNER, lazy=True)
    clone = cache.clone()
    assert not clone.allocated
    clone.allocate()
    assert not cache.allocated


@pytest.mark.parametrize("kind", KINDS)
def test_copy_from_takes_what_fits(kind: type[CacheBase]) -> None:
    cache = kind(OWNER, batch_size=2)
    fill(cache)
    cache.current_seq_len = 290
    smaller = kind(OWNER, batch_size=1, max_seq_len=260, copy_from=cache)
    assert smaller.current_seq_len == 260
    for a, b in zip(cache.value_states, smaller.value_states, strict=True):
        assert torch.equal(a[0, :260], b[0, :260])


def test_a_lazy_cache_cannot_copy() -> None:
    with pytest.raises(InputError, match="lazy"):
        Cache(CacheOwnerStub(), copy_from=Cache(CacheOwnerStub()), lazy=True)


BYTES = {Cache: 4.0, CacheFP8: 2.0, CacheQ8: 2.125, CacheQ6: 1.625, CacheQ4: 1.125}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [LayerShape(2, 32), LayerShape(8, 128), LayerShape(1, 96)])
def test_bytes_of_a_token(kind: type[CacheBase], shape: LayerShape) -> None:
    model = CacheOwnerStub(cache_shapes=[shape] * 2, cache_devices=[CPU] * 2, cache_dtype=torch.float16)
    cache = kind(model, batch_size=3, max_seq_len=2 * PAGE_SIZE)
    assert sum(cache.footprint()) == 2 * 3 * 2 * PAGE_SIZE * BYTES[kind] * shape.kv_heads * shape.head_dim


@pytest.mark.parametrize(
    ("kind", "k", "v"), [(CacheFP8, 64, 64), (CacheQ8, 64, 64), (CacheQ6, 64, 32), (CacheQ4, 32, 32)]
)
def test_the_shape_of_codes(kind: type[CacheBase], k: int, v: int) -> None:
    shapes = [LayerShape(2, 64), LayerShape(3, 64)]
    cache = kind(CacheOwnerStub(cache_shapes=shapes, cache_devices=[CPU] * 2), batch_size=2)
    assert [x.shape for x in cache.key_states] == [(2, 2 * PAGE_SIZE, 2, k), (2, 2 * PAGE_SIZE, 3, k)]
    assert [x.shape for x in cache.value_states] == [(2, 2 * PAGE_SIZE, 2, v), (2, 2 * PAGE_SIZE, 3, v)]
    scales = [(2, 2 * PAGE_SIZE, 2, 2), (2, 2 * PAGE_SIZE, 3, 2)] if kind.has_scales else []
    assert [x.shape for x in cache.key_scales] == [x.shape for x in cache.value_scales] == scales
    assert {x.dtype for x in cache.key_scales} <= {torch.float16}
    assert cache.dtype is cache.key_states[0].dtype is torch.uint8
    assert (cache.num_hidden_layers, cache.num_key_value_heads, cache.head_dim) == (2, [2, 3], 64)


def test_plain_floats_have_no_scales() -> None:
    cache = Cache(OWNER)
    assert (cache.has_scales, cache.key_scales, cache.value_scales) == (False, [], [])
    assert (cache.num_hidden_layers, cache.num_key_value_heads, cache.head_dim) == (3, 2, 32)


@pytest.mark.parametrize("kind", [CacheQ8, CacheQ6, CacheQ4])
@pytest.mark.parametrize("lazy", [True, False])
def test_heads_that_are_not_of_32s_are_refused_at_once(kind: type[CacheBase], lazy: bool) -> None:
    model = CacheOwnerStub(cache_shapes=[LayerShape(2, 32), LayerShape(2, 80), LayerShape(2, 32)])
    with pytest.raises(Unsupported, match=f"{kind.__name__} .* 32 .* head_dim is 80 in layer 1.* CacheFP8"):
        kind(model, lazy=lazy)
    assert CacheFP8(model).allocated


@pytest.mark.parametrize("wish", ["float16", "torch.float16", torch.float16])
def test_a_dense_cache_of_another_precision(wish: str | torch.dtype) -> None:
    cache = Cache(OWNER, dtype=wish)
    assert cache.dtype is cache.key_states[0].dtype is torch.float16
    assert cache.clone().dtype is torch.float16
    assert Cache(OWNER).dtype is torch.float32
    x = torch.randn(1, 5, 2, 32)
    k, v = cache.layers[0].update(x, -x, batch([0], 5, cache.identity_page_table(1, CPU)))
    assert torch.equal(k, x.half().float())
    assert torch.equal(v, -x.half().float())


@pytest.mark.parametrize("wish", ["int8", "q4", torch.float64])
def test_precisions_a_dense_cache_cannot_have(wish: str | torch.dtype) -> None:
    with pytest.raises(InputError, match="one of float16, bfloat16, float32, found"):
        Cache(OWNER, dtype=wish)


@pytest.mark.parametrize("kind", KINDS)
def test_copying_pages(kind: type[CacheBase]) -> None:
    cache = kind(OWNER, max_seq_len=4 * PAGE_SIZE)
    fill(cache)
    before = [tensor.clone() for tensor in cache.all_tensors()]
    cache.copy([(0, 2, 100), (2, 3, PAGE_SIZE), (1, 1, 9), (3, 0, 0)])
    for now, then in zip(cache.all_tensors(), before, strict=True):
        assert torch.equal(now[:2], then[:2])
        assert torch.equal(now[2, :100], then[0, :100])
        assert torch.equal(now[2, 100:], then[2, 100:])
        assert torch.equal(now[3], now[2])  # copies are done one after the other


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1), (-1, 0, 1), (0, 1, PAGE_SIZE + 1), (0, 1, -1)])
def test_copying_pages_that_are_not_there(order: tuple[int, int, int]) -> None:
    cache = Cache(OWNER)
    fill(cache)
    before = cache.all_tensors()[0].clone()
    with pytest.raises(InputError, match="pages 0 to 1 of 256 tokens"):
        cache.copy([(0, 1, 5), order])
    assert torch.equal(cache.all_tensors()[0], before)


@pytest.mark.parametrize("kind", KINDS)
def test_roll_left_drops_the_first_token(kind: type[CacheBase]) -> None:
    cache = kind(OWNER, batch_size=2)
    fill(cache)
    cache.current_seq_len = 9
    before = cache.clone()
    cache.roll_left()
    assert cache.current_seq_len == 8
    for states in ("key_states", "value_states", "key_scales", "value_scales"):
        for now, then in zip(getattr(cache, states), getattr(before, states), strict=True):
            assert torch.equal(now[:, :-1], then[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_follow_the_model(kind: type[CacheBase]) -> None:
    model = CacheOwnerStub(cache_shapes=[LayerShape(2, 32)] * 3)
    cache = kind(model, lazy=True)
    cache.update_cache_tensors()
    assert cache.allocated
    fill(cache)
    before = cache.all_tensors()[0].clone()
    model.cache_devices = [CPU, META, META]
    cache.update_cache_tensors()
    assert [layer.device for layer in cache.layers] == [CPU, META, META]
    assert torch.equal(cache.all_tensors()[0], before)
    one, two = cache.footprint()
    assert two == 2 * one


def test_arguments_of_old_scripts() -> None:
    cache = CacheQ4(OWNER, 1, 300, None, False, 2, "cpu")
    cache.touch_device("cpu")
    assert cache.allocated
    with pytest.raises(InputError, match="num_key_value_heads is 4, but layer 0 of the model has 2"):
        CacheQ4(OWNER, num_key_value_heads=4)
    with pytest.raises(InputError, match="fixed_device is meta, but layer 0 of the model is on cpu"):
        CacheQ4(OWNER, fixed_device="meta")
    with pytest.raises(InputError, match="fixed_device is cuda:3"):
        CacheQ4(OWNER, fixed_device=3)
    with pytest.raises(InputError, match="'moon' is not a device"):
        CacheQ4(OWNER, fixed_device="moon")


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CacheBase(OWNER)  # type: ignore[abstract]
