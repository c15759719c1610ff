"""Norms, gates and attention in C against plain torch, on odd shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm import spec
from exlm.errors import Unsupported
from exlm.kernels.cpu import CpuBackend
from exlm.kernels.reference import ReferenceBackend
from exlm.kvcache.dense import DenseLayer
from exlm.nn import Batch

CPU = torch.device("cpu")
REFERENCE = ReferenceBackend(CPU, torch.float32)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("width", [1, 7, 16, 576, 577])
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("threads", [1, 3])
def test_norms(backend: CpuBackend, width: int, rows: int, threads: int) -> None:
    torch.set_num_threads(threads)
    norm, weight = spec.Norm("rms", 1e-5, offset=1.0), torch.randn(width)
    x, y = torch.randn(rows, 1, width) * 30, torch.randn(rows, 1, width)
    close(backend.norm(norm, weight, None)(x), REFERENCE.norm(norm, weight, None)(x))
    for more in (y, None):
        got, want = (b.add_norm(norm, weight, None)(x, more) for b in (backend, REFERENCE))
        assert torch.equal(got[0], want[0])
        close(got[1], want[1])
    strided = torch.randn(width, rows, 1).permute(1, 2, 0)
    got, want = (b.add_norm(norm, weight, None)(strided, strided) for b in (backend, REFERENCE))
    close(got[1], want[1])


@pytest.mark.parametrize("style", ["neox", "gptj"])
@pytest.mark.parametrize(("width", "dim"), [(64, 64), (48, 20), (7, 6)])
@pytest.mark.parametrize(("rows", "tokens", "threads"), [(1, 1, 1), (2, 50, 3), (1, 17, 2)])
def test_turning(backend: CpuBackend, style: str, width: int, dim: int, rows: int, tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    rope = spec.Rope(1e4, dim, style=style)  # type: ignore[arg-type]
    turn, right = (b.rope(rope, 100) for b in (backend, REFERENCE))
    q, k = torch.randn(rows, tokens, 6, width), torch.randn(rows, 2, tokens, width).transpose(1, 2)
    positions = torch.randint(0, 100, (rows, tokens))
    for got, want in zip(turn(q, k, positions), right(q, k, positions), strict=True):
        close(got, want)
    with pytest.raises(IndexError, match="100"):
        turn(q, k, positions.fill_(100))


def test_what_it_leaves_to_others(backend: CpuBackend) -> None:
    weight = torch.ones(4)
    with pytest.raises(Unsupported):
        backend.norm(spec.Norm("layer", 1e-5), weight, None)
    with pytest.raises(Unsupported):
        backend.gated("gelu")
    with pytest.raises(Unsupported):
        backend.activation("silu")
    with pytest.raises(Unsupported):
        CpuBackend(CPU, torch.bfloat16, backend._library.path.parent)


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 5, 1536), (3, 40, 1000)])
def test_gates(backend: CpuBackend, shape: tuple[int, ...]) -> None:
    torch.set_num_threads(2)
    gate, up = torch.randn(shape) * 20, torch.randn(shape)
    close(backend.gated("silu")(gate, up), REFERENCE.gated("silu")(gate, up))


def test_gates_at_the_edges(backend: CpuBackend) -> None:
    gate = torch.tensor([0.0, -0.0, 89.0, -89.0, 1e30, -1e30, float("inf"), float("nan"), 1e-30])
    got, want = (b.gated("silu")(gate, torch.ones(9)) for b in (backend, REFERENCE))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-36, equal_nan=True)


def batch(past: list[int], tokens: int, pages: torch.Tensor) -> Batch:
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


@settings(max_examples=25)
@given(
    past=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    tokens=st.integers(1, 5),
    shared=st.sampled_from([1, 3]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 32)]),
    style=st.sampled_from(["neox", "gptj"]),
    window=st.sampled_from([None, 1, 9, 64]),
    threads=st.integers(1, 3),
)
def test_attention(
    backend: CpuBackend,
    past: list[int],
    tokens: int,
    shared: int,
    dims: tuple[int, int],
    style: str,
    window: int | None,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    head_dim, turned = dims
    rope = spec.Rope(dim=turned, theta=100.0, style=style)  # type: ignore[arg-type]
    attn = spec.Attention(2 * shared, 2, head_dim, scale=0.3, rope=rope, window=window)
    rows, page = len(past), 16
    width = -(-(max(past) + tokens) // page)
    metadata = batch(past, tokens, torch.randperm(rows * width).view(rows, width))
    q = torch.randn(rows, tokens, 2 * shared, head_dim)
    k, v = torch.randn(2, rows, tokens, 2, head_dim)
    answers, caches = [], []
    old = torch.randn(2, rows * width, page, 2, head_dim)
    for chosen in (backend, REFERENCE):
        layer = DenseLayer(rows * width, page, 2, head_dim, torch.float32, CPU)
        layer.k.copy_(old[0])
        layer.v.copy_(old[1])
        attend = chosen.attention(attn, chosen.rope(rope, 64))
        answers.append(attend(q, k, v, layer, metadata))
        caches.append(layer)
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)
    close(caches[0].k, caches[1].k)
    assert torch.equal(caches[0].v, caches[1].v)
