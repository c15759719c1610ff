"""Quantised layers: a token's bytes depend on that token alone, and a call sees its own tokens exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from exlm.kvcache import LayerShape, QuantizedLayer, quantized
from exlm.kvcache.quantized import FP8Quantizer, HadamardQuantizer, KVQuantizer
from exlm.nn import Batch

CPU = torch.device("cpu")
KINDS: dict[str, tuple[KVQuantizer, KVQuantizer]] = {
    "q8": (HadamardQuantizer(8), HadamardQuantizer(8)),
    "q6": (HadamardQuantizer(8), HadamardQuantizer(4)),
    "q4": (HadamardQuantizer(4), HadamardQuantizer(4)),
    "fp8": (FP8Quantizer(), FP8Quantizer()),
}
SHAPES = [LayerShape(2, 32), LayerShape(1, 32), LayerShape(3, 32), LayerShape(1, 96), LayerShape(2, 64)]
PAGES = 8  # page size of these tests


def make(kind: str, shape: LayerShape, pages: int, page: int = PAGES) -> QuantizedLayer:
    return QuantizedLayer(pages, page, shape, *KINDS[kind], CPU)


def batch(past: list[int], tokens: int, pages: Tensor) -> Batch:
    ids = torch.zeros(len(past), tokens, dtype=torch.int64)
    return Batch(
        ids=ids,
        positions=ids,
        past_lens=torch.tensor(past),
        page_table=pages,
        max_kv_len=max(past) + tokens,
        uniform=len(set(past)) == 1,
    )


def heads(seed: int, *size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator), torch.randn(*size, generator=generator) * 5


def in_row_order(stored: tuple[Tensor, ...], pages: Tensor) -> list[Tensor]:
    """The stored tensors in the order of each row's tokens, (rows, tokens, kv_heads, …) each."""
    return [tensor[pages].flatten(1, 2) for tensor in stored]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    shape=st.sampled_from(SHAPES),
    cuts=st.lists(st.lists(st.integers(1, 11), min_size=1, max_size=5), min_size=1, max_size=3),
    seed=st.integers(0, 2**40),
    random=st.randoms(use_true_random=False),
)
def test_bytes_depend_on_their_own_token_alone(
    kind: str, shape: LayerShape, cuts: list[list[int]], seed: int, random: Any
) -> None:
    """Rows written in any chunks to shuffled pages, in any batch, give the bytes of one call."""
    longest = max(sum(cut) for cut in cuts)
    width = -(-longest // PAGES)
    order = list(range(len(cuts) * width))
    random.shuffle(order)
    pages = torch.tensor(order).view(len(cuts), width)
    layer = make(kind, shape, len(order))
    k, v = heads(seed, len(cuts), longest, shape.kv_heads, shape.head_dim)
    todo = [(row, start) for row, cut in enumerate(cuts) for start in range(len(cut))]
    random.shuffle(todo)
    todo.sort(key=lambda item: item[1])  # chunks of a row in order, rows in any order
    for row, piece in todo:
        start = sum(cuts[row][:piece])
        stop = start + cuts[row][piece]
        own_row = slice(row, row + 1)
        layer.update(k[own_row, start:stop], v[own_row, start:stop], batch([start], stop - start, pages[own_row]))
    for stored, coder, x in ((layer.keys, layer.key_quantizer, k), (layer.values, layer.value_quantizer, v)):
        for row, cut in enumerate(cuts):
            for got, want in zip(in_row_order(stored, pages), coder.quantize(x[row, : sum(cut)]), strict=True):
                assert torch.equal(got[row, : sum(cut)], want)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    pasts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    tokens=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    random=st.randoms(use_true_random=False),
)
def test_the_past_is_decoded_and_new_tokens_are_exact(
    kind: str, pasts: list[int], tokens: int, seed: int, random: Any
) -> None:
    shape = LayerShape(2, 32)
    width = -(-(max(pasts) + tokens) // PAGES)
    order = list(range(len(pasts) * width))
    random.shuffle(order)
    pages = torch.tensor(order).view(len(pasts), width)
    layer = make(kind, shape, len(order))
    k, v = heads(seed, len(pasts), max(pasts) + tokens, shape.kv_heads, shape.head_dim)
    for row, past in enumerate(pasts):
        if past:
            layer.update(k[row : row + 1, :past], v[row : row + 1, :past], batch([0], past, pages[row : row + 1]))
    new_k, new_v = (torch.stack([x[row, p : p + tokens] for row, p in enumerate(pasts)]) for x in (k, v))
    got_k, got_v = layer.update(new_k, new_v, batch(pasts, tokens, pages))
    assert got_k.dtype == k.dtype
    for row, past in enumerate(pasts):
        for got, coder, x in ((got_k, layer.key_quantizer, k), (got_v, layer.value_quantizer, v)):
            assert torch.equal(got[row, past : past + tokens], x[row, past : past + tokens])
            if past:
                assert torch.equal(got[row, :past], coder.dequantize(coder.quantize(x[row, :past])).float())
    for stored, coder, x in ((layer.keys, layer.key_quantizer, k), (layer.values, layer.value_quantizer, v)):
        for row, past in enumerate(pasts):
            for kept, want in zip(in_row_order(stored, pages), coder.quantize(x[row, : past + tokens]), strict=True):
                assert torch.equal(kept[row, : past + tokens], want)
    assert got_k.isfinite().all()
    assert got_v.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_old_bytes_are_never_touched(kind: str) -> None:
    layer = make(kind, LayerShape(2, 32), 4)
    k, v = heads(1, 1, 20, 2, 32)
    pages = torch.tensor([[2, 0, 3, 1]])
    layer.update(k[:, :11], v[:, :11], batch([0], 11, pages))
    before = [tensor.clone() for tensor in layer.tensors]
    for past in range(11, 20):
        layer.update(k[:, past : past + 1], v[:, past : past + 1], batch([past], 1, pages))
    for now, then in zip(layer.tensors, before, strict=True):
        assert torch.equal(now[pages].flatten(1, 2)[:, :11], then[pages].flatten(1, 2)[:, :11])
        assert not now[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_dequantizing_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LayerShape(2, 64)
    pages = torch.randperm(18).view(2, 9)
    k, v = heads(2, 2, 70, 2, 64)
    answers = []
    for slab in (1, 3 * 2 * PAGES * 128, 1 << 22):
        monkeypatch.setattr(quantized, "MAX_DEQUANTIZED_NUMBERS", slab)
        layer = make(kind, shape, 18)
        layer.update(k[:, :69], v[:, :69], batch([0, 0], 69, pages))
        answers.append(layer.update(k[:, 69:], v[:, 69:], batch([69, 69], 1, pages)))
    for answer in answers[1:]:
        assert torch.equal(answer[0], answers[0][0])
        assert torch.equal(answer[1], answers[0][1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_come_back_in_the_precision_they_came_in(dtype: torch.dtype) -> None:
    layer = make("q8", LayerShape(2, 32), 4)
    k, v = (x.to(dtype) for x in heads(3, 1, 20, 2, 32))
    pages = torch.arange(4)[None]
    layer.update(k[:, :15], v[:, :15], batch([0], 15, pages))
    got = layer.update(k[:, 15:], v[:, 15:], batch([15], 5, pages))
    assert [x.dtype for x in got] == [dtype, dtype]
    assert torch.equal(got[0][:, 15:], k[:, 15:])
    assert float((got[1].float() - v.float()).norm() / v.float().norm()) < 0.02


class AllocationWatch(TorchDispatchMode):
    """Records the largest allocation of any operation, except of tensors to be ignored."""

    def __init__(self, known: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_allocates_for_its_own_rows_only(kind: str) -> None:
    layer = make(kind, LayerShape(2, 32), 4000)
    k, v = heads(4, 2, 21, 2, 32)
    pages = torch.tensor([[3900, 7, 12], [0, 3999, 55]])
    layer.update(k[:, :20], v[:, :20], batch([0, 0], 20, pages))
    with AllocationWatch(layer.tensors) as watch:
        layer.update(k[:, 20:], v[:, 20:], batch([20, 20], 1, pages))
    assert watch.largest <= 2 * 3 * PAGES * 64 * 4  # rows, pages, tokens, numbers, bytes of a float32
    assert sum(tensor.nbytes for tensor in layer.tensors) > 200 * watch.largest


def test_truncation() -> None:
    values = [1.0, -1.9990234375, 65504.0, 1e9, -1e9, 6e-8, 0.0, 0.3]
    (stored,) = FP8Quantizer().quantize(torch.tensor(values).view(1, 1, -1))
    assert stored.flatten().tolist() == [0x3C, 0xBF, 0x7B, 0x7B, 0xFB, 0x00, 0x00, 0x34]
    back = FP8Quantizer().dequantize((stored,)).flatten().tolist()
    assert back == [1.0, -1.75, 57344.0, 57344.0, -57344.0, 0.0, 0.0, 0.25]


def test_every_byte_is_an_e5m2_float() -> None:
    every = torch.arange(256).to(torch.uint8)
    want = every.view(torch.float8_e5m2).float()
    assert torch.equal(FP8Quantizer().dequantize((every,)).float().nan_to_num(-1.0), want.nan_to_num(-1.0))
