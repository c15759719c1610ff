"""Attention of many new tokens in C: as the reference has it, and the same bits however it is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm import spec
from exlm.kernels.cpu.backend import CpuBackend
from exlm.kernels.reference import ReferenceBackend
from exlm.kvcache.dense import DenseLayer
from exlm.nn import Batch

CPU = torch.device("cpu")
REFERENCE = ReferenceBackend(CPU, torch.float32)
PAGE = 16
ROPE = spec.Rope(dim=64, theta=100.0)
ATTN = spec.Attention(6, 2, 64, scale=0.1, rope=ROPE)


def standing(past: list[int], tokens: int, pages: torch.Tensor) -> Batch:
    start = torch.tensor(past)
    positions = start[:, None] + torch.arange(tokens)
    return Batch(
        ids=positions,
        positions=positions,
        past_lens=start,
        page_table=pages,
        max_kv_len=max(past) + tokens,
        uniform=len(set(past)) == 1,
    )


def filled(old: torch.Tensor, dtype: torch.dtype) -> DenseLayer:
    layer = DenseLayer(old.shape[1], PAGE, *old.shape[3:], dtype, CPU)
    layer.k.copy_(old[0])
    layer.v.copy_(old[1])
    return layer


@settings(max_examples=25)
@given(
    past=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    tokens=st.integers(9, 140),
    shared=st.sampled_from([1, 3, 4]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 32), (128, 128)]),
    window=st.sampled_from([None, 1, 9, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    threads=st.integers(1, 4),
)
def test_the_reference_says_the_same(
    backend: CpuBackend,
    past: list[int],
    tokens: int,
    shared: int,
    dims: tuple[int, int],
    window: int | None,
    dtype: torch.dtype,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    head_dim, turned = dims
    rope = spec.Rope(dim=turned, theta=100.0, style="neox" if shared > 1 else "gptj")
    attn = spec.Attention(2 * shared, 2, head_dim, scale=0.3, rope=rope, window=window)
    rows, width = len(past), -(-(max(past) + tokens) // PAGE)
    metadata = standing(past, tokens, torch.randperm(rows * width).view(rows, width))
    q = torch.randn(rows, tokens, 2 * shared, head_dim)
    k, v = torch.randn(2, rows, tokens, 2, head_dim)
    old = torch.randn(2, rows * width, PAGE, 2, head_dim)
    answers, caches = [], []
    for chosen in (backend, REFERENCE):
        layer = filled(old, dtype)
        answers.append(chosen.attention(attn, chosen.rope(rope, 300))(q, k, v, layer, metadata))
        caches.append(layer)
    exact = dtype is torch.float32  # keys at the border between two float16 may be stored as either
    torch.testing.assert_close(*answers, rtol=1e-5 if exact else 2e-3, atol=1e-5 if exact else 2e-3)
    torch.testing.assert_close(caches[0].k, caches[1].k, rtol=1e-6 if exact else 1e-3, atol=1e-6)
    assert torch.equal(caches[0].v, caches[1].v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_do_not_depend_on_company_parts_or_threads(backend: CpuBackend, dtype: torch.dtype) -> None:
    tokens, past = 131, [40, 0, 97]
    attend = backend.attention(ATTN, backend.rope(ROPE, 300))
    width = -(-(max(past) + tokens) // PAGE)
    table = torch.randperm(3 * width).view(3, width)
    q, (k, v) = torch.randn(3, tokens, 6, 64), torch.randn(2, 3, tokens, 2, 64)
    old = torch.randn(2, 3 * width, PAGE, 2, 64)
    answers = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        answers.append(attend(q, k, v, filled(old, dtype), standing(past, tokens, table)))
    assert all(torch.equal(answers[0], one) for one in answers)
    for row in range(3):
        one = slice(row, row + 1)
        layer, parts, start = filled(old, dtype), [], 0
        for size in (9, 64, 33, 25):
            cut = slice(start, start + size)
            metadata = standing([past[row] + start], size, table[one])
            parts.append(attend(q[one, cut], k[one, cut], v[one, cut], layer, metadata))
            start += size
        assert start == tokens
        assert torch.equal(torch.cat(parts, 1), answers[0][one])


def test_what_is_not_finite_stays_with_its_query(backend: CpuBackend) -> None:
    attend = backend.attention(ATTN, backend.rope(ROPE, 300))
    q, (k, v) = torch.randn(1, 70, 6, 64), torch.randn(2, 1, 70, 2, 64)
    q[0, 20, 3] = float("nan")
    layer = filled(torch.zeros(2, 5, PAGE, 2, 64), torch.float32)
    heads = attend(q, k, v, layer, standing([0], 70, torch.arange(5)[None])).unflatten(-1, (6, 64))
    assert heads[0, 20, 3].isnan().all()
    heads[0, 20, 3] = 0
    assert heads.isfinite().all()
