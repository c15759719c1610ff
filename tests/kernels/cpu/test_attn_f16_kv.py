"""Attention over pages of float16 in C: what it stores, and that it answers from what is stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm import spec
from exlm.kernels.cpu import CpuBackend
from exlm.kernels.interface import AttnMetadata, no_rope
from exlm.kernels.reference import ReferenceBackend
from exlm.kvcache.dense import DenseLayer
from exlm.nn import Batch

CPU = torch.device("cpu")
REFERENCE = ReferenceBackend(CPU, torch.float32)
PAGE = 16
LARGEST = 65504.0


class Written(DenseLayer):
    """Pages that hold the new tokens already: what a call brings is not looked at."""

    def update(self, k: torch.Tensor, v: torch.Tensor, metadata: AttnMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        table = metadata.page_table
        keys, values = (pages[table].flatten(1, 2)[:, : metadata.max_kv_len].float() for pages in (self.k, self.v))
        return keys, values


def standing(past: list[int], tokens: int, pages: torch.Tensor) -> Batch:
    start = torch.tensor(past)
    positions = start[:, None] + torch.arange(tokens)
    longest = max(past) + tokens
    return Batch(
        ids=positions,
        positions=positions,
        past_lens=start,
        page_table=pages,
        max_kv_len=longest,
        uniform=len(set(past)) == 1,
    )


def filled(kind: type[DenseLayer], old: torch.Tensor) -> DenseLayer:
    """Pages with these keys and values."""
    layer = kind(*old.shape[1:], torch.float16, CPU)
    layer.k.copy_(old[0])
    layer.v.copy_(old[1])
    return layer


def steps_apart(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many float16 numbers lie between, at most."""
    ranks = []
    for bits in (got.view(torch.int16).int(), want.view(torch.int16).int()):
        ranks.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return int((ranks[0] - ranks[1]).abs().max())


@settings(max_examples=30)
@given(
    past=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    tokens=st.integers(1, 5),
    shared=st.sampled_from([1, 2, 3, 4]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 32), (128, 128), (64, 0)]),
    style=st.sampled_from(["neox", "gptj"]),
    window=st.sampled_from([None, 1, 9, 64]),
    size=st.sampled_from([1.0, 1e-6, 3e3, 1e6, 0.0]),
    threads=st.integers(1, 3),
)
def test_attention_over_float16(
    backend: CpuBackend,
    past: list[int],
    tokens: int,
    shared: int,
    dims: tuple[int, int],
    style: str,
    window: int | None,
    size: float,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    head_dim, turned = dims
    rope = spec.Rope(dim=turned, theta=100.0, style=style) if turned else None  # type: ignore[arg-type]
    attn = spec.Attention(2 * shared, 2, head_dim, scale=0.3, rope=rope, window=window)
    rows = len(past)
    width = -(-(max(past) + tokens) // PAGE)
    metadata = standing(past, tokens, torch.randperm(rows * width).view(rows, width))
    q = torch.randn(rows, tokens, 2 * shared, head_dim)
    k, v = torch.randn(2, rows, tokens, 2, head_dim) * size
    old = torch.randn(2, rows * width, PAGE, 2, head_dim).half()
    layer, plain = filled(DenseLayer, old), filled(DenseLayer, old)
    attend, right = (b.attention(attn, no_rope if rope is None else b.rope(rope, 64)) for b in (backend, REFERENCE))
    got = attend(q, k, v, layer, metadata)
    right(q, k, v, plain, metadata)
    # A key is turned in float32 on both sides, perhaps one bit apart, and then rounded.
    assert steps_apart(layer.k, plain.k) <= 1
    assert torch.equal(layer.v, plain.v)
    assert layer.k.isfinite().all()
    assert layer.v.isfinite().all()
    want = right(q, k, v, filled(Written, torch.stack((layer.k, layer.v))), metadata)
    scale = max(1.0, float(want.abs().max()))
    if size <= 1:  # beyond, a score is too large for its last bits to say anything
        torch.testing.assert_close(got / scale, want / scale, rtol=1e-5, atol=1e-5)
    assert got.isfinite().all()


@pytest.mark.parametrize("rope", [spec.Rope(dim=64, theta=100.0), None], ids=["RoPE", "NoPE"])
def test_tokens_together_say_what_they_say_one_by_one(backend: CpuBackend, rope: spec.Rope | None) -> None:
    attn = spec.Attention(6, 2, 64, scale=0.1, rope=rope)
    attend = backend.attention(attn, no_rope if rope is None else backend.rope(rope, 64))
    q, (k, v) = torch.randn(1, 5, 6, 64), torch.randn(2, 1, 5, 2, 64)
    table, old = torch.tensor([[1, 0, 2]]), torch.randn(2, 3, PAGE, 2, 64).half()
    whole, pieces = filled(DenseLayer, old), filled(DenseLayer, old)
    together = attend(q, k, v, whole, standing([30], 5, table))
    single = [
        attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], pieces, standing([30 + i], 1, table))
        for i in range(5)
    ]
    assert torch.equal(together, torch.cat(single, 1))
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors, pieces.tensors, strict=True))


def test_a_row_is_the_same_bits_in_any_company(backend: CpuBackend) -> None:
    rope = spec.Rope(dim=64, theta=100.0)
    attn = spec.Attention(6, 2, 64, scale=0.1, rope=rope)
    attend = backend.attention(attn, backend.rope(rope, 64))
    q, (k, v) = torch.randn(3, 1, 6, 64), torch.randn(2, 3, 1, 2, 64)
    table, past, old = torch.arange(6).view(3, 2), [20, 3, 29], torch.randn(2, 6, PAGE, 2, 64).half()
    answers = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for rows in ([0, 1, 2], [0], [1], [2]):
            metadata = standing([past[row] for row in rows], 1, table[rows])
            answers.append(attend(q[rows], k[rows], v[rows], filled(DenseLayer, old), metadata))
    for whole, *single in (answers[:4], answers[4:]):
        assert torch.equal(whole, torch.cat(single))
    assert torch.equal(answers[0], answers[4])


@pytest.mark.parametrize("tokens", [1, 12])  # few, and many
def test_what_is_too_large_becomes_the_largest(backend: CpuBackend, tokens: int) -> None:
    rope = spec.Rope(dim=16, theta=100.0)
    attn = spec.Attention(1, 1, 16, scale=0.1, rope=rope)
    attend = backend.attention(attn, backend.rope(rope, 64))
    large = torch.tensor([1e5, -1e5, 65519.0, 65521.0, float("inf"), -float("inf"), 1e-8, -0.0]).repeat(2)
    layer = filled(DenseLayer, torch.zeros(2, 1, PAGE, 1, 16))
    v = large.expand(1, tokens, 1, 16)
    answer = attend(torch.zeros_like(v), torch.zeros_like(v), v, layer, standing([0], tokens, torch.zeros(1, 1).long()))
    want = torch.tensor([LARGEST, -LARGEST, LARGEST, LARGEST, LARGEST, -LARGEST, 0.0, -0.0]).repeat(2)
    assert torch.equal(layer.v[0, :tokens, 0].float(), want.expand(tokens, 16))
    assert torch.equal(answer[0, 0], want)


def test_every_float16_is_read_and_written_as_it_is(backend: CpuBackend) -> None:
    finite = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    finite = finite[finite.isfinite()].view(-1, 1, 2, 16)
    rope = spec.Rope(dim=16, theta=100.0)
    attn = spec.Attention(2, 2, 16, scale=0.1, rope=rope)
    attend = backend.attention(attn, backend.rope(rope, 64))
    layer = filled(DenseLayer, torch.zeros(2, len(finite), 1, 2, 16))
    pages = torch.arange(len(finite))[:, None]
    metadata = standing([0] * len(finite), 1, pages)
    answer = attend(torch.zeros(finite.shape), torch.zeros(finite.shape), finite.float(), layer, metadata)
    assert torch.equal(layer.v.view(torch.int16), finite.view(torch.int16))
    assert torch.equal(answer.view(finite.shape), finite.float())  # one token has all of the share
