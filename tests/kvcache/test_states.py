"""Recurrent states of a cache: slots, bytes, the last call that can be taken back, and what has no tokens to move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exlm import Cache, CacheBase, CacheQ4, DoesNotFit, InputError, Unsupported
from exlm.kvcache import LayerShape
from exlm.spec import StateShape
from tests.kvcache.test_cache import CPU, META, CacheOwnerStub

DELTA, CONV = StateShape((3, 40), (2, 8, 16)), StateShape((2, 24))
SHAPES = [LayerShape(0, 0, DELTA), LayerShape(2, 32), LayerShape(0, 0, CONV), LayerShape(2, 32, DELTA)]
DELTA_BYTES, CONV_BYTES = 3 * 40 * 2 + 2 * 8 * 16 * 4, 2 * 24 * 2
PAGE_BYTES = 2 * 256 * 2 * 32 * 2  # keys and values of a page


def owner(**options: Any) -> CacheOwnerStub:
    defaults: dict[str, Any] = {"cache_shapes": SHAPES, "cache_devices": [CPU] * 4, "cache_dtype": torch.float16}
    return CacheOwnerStub(**defaults | options)


def run_forward(cache: CacheBase, rows: int, tokens: int) -> tuple[list[int], list[list[int]]]:
    """What `Model.forward` asks of a cache: each row's source, and its targets."""
    slots = cache.next_state_slots(rows, tokens, CPU)
    assert slots is not None
    cache.current_seq_len += tokens
    return slots.source.tolist(), slots.targets.tolist()


def test_bytes_of_a_state() -> None:
    assert (DELTA.nbytes(2), CONV.nbytes(2)) == (DELTA_BYTES, CONV_BYTES)
    assert CONV.nbytes(4) == 2 * CONV_BYTES
    cache = Cache(owner(), batch_size=3, max_seq_len=256)
    assert cache.state_bytes == 2 * DELTA_BYTES + CONV_BYTES
    assert cache.num_state_slots == 6
    pages = 3 * PAGE_BYTES
    assert cache.layer_bytes() == [6 * DELTA_BYTES, pages, 6 * CONV_BYTES, pages + 6 * DELTA_BYTES]
    assert cache.footprint() == [sum(cache.layer_bytes())]
    assert Cache(CacheOwnerStub(), max_seq_len=256).state_bytes == 0


@pytest.mark.parametrize("kind", [Cache, CacheQ4])
def test_states_stay_in_floats_whatever_the_pages_are(kind: type[CacheBase]) -> None:
    cache = kind(owner(), max_seq_len=256)
    cache.allocate_states(5)
    found = [[(*one.shape, one.dtype) for one in layer.state_tensors] for layer in cache.layers]
    conv, matrix = (5, 3, 40, torch.float16), (5, 2, 8, 16, torch.float32)
    assert found == [[conv, matrix], [], [(5, 2, 24, torch.float16)], [conv, matrix]]
    assert cache.num_state_slots == 5


def test_rows_alternate_between_two_slots() -> None:
    cache = Cache(owner(), batch_size=3, max_seq_len=256)
    assert run_forward(cache, 2, 3) == ([-1, -1], [[-1, -1, 0], [-1, -1, 1]])
    assert run_forward(cache, 2, 1) == ([0, 1], [[3], [4]])
    cache.current_seq_len = 3
    assert run_forward(cache, 2, 2) == ([0, 1], [[-1, 3], [-1, 4]])
    assert run_forward(cache, 2, 1) == ([3, 4], [[0], [1]])
    for lost in (3, 4):
        cache.current_seq_len = lost
        with pytest.raises(InputError, match=rf"cannot go back to {lost} tokens.*after 5 and 6 tokens.*cache\.reset"):
            cache.next_state_slots(2, 1, CPU)
    cache.reset()
    assert run_forward(cache, 3, 1) == ([-1] * 3, [[0], [1], [2]])
    assert Cache(CacheOwnerStub(), max_seq_len=256).next_state_slots(1, 1, CPU) is None


def test_a_clone_has_states_of_its_own() -> None:
    cache = Cache(owner(), max_seq_len=256)
    for tensor in cache.all_tensors():
        tensor.fill_(1)
    clone = cache.clone()
    for tensor in cache.all_tensors():
        tensor.zero_()
    assert all(bool((tensor == 1).all()) for tensor in clone.all_tensors())


def test_what_moves_tokens_is_refused() -> None:
    cache = Cache(owner(), max_seq_len=256)
    with pytest.raises(Unsupported, match=r"roll_left.*recurrent state.*cache\.clone"):
        cache.roll_left()
    with pytest.raises(Unsupported, match=r"copy_states.*recurrent state.*cache\.clone"):
        cache.copy_states(cache, 0, 1, 1, 1, 0, 1, 0, 1)


def test_more_states_than_any_memory_holds_are_refused() -> None:
    cache = Cache(owner(), max_seq_len=256)
    with pytest.raises(DoesNotFit, match=r"1(,000){5} recurrent states.* 1,264(,000){5} bytes.*max_batch"):
        cache.allocate_states(10**15)


def test_more_states_than_a_gpu_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(owner(cache_devices=[META] * 4), max_seq_len=256)

    def full(*args: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(DoesNotFit, match=rf"7 recurrent states do not fit.*{7 * DELTA_BYTES:,} bytes.*batch_size"):
        cache.allocate_states(7)
