"""Attention kernels against the reference: in Triton's interpreter on small shapes, on a GPU on many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exlm import spec
from exlm.kernels import interface as b
from exlm.kernels.reference import ReferenceBackend
from tests.kernels.triton import cases
from tests.kernels.triton.cases import Case

pytest.importorskip("triton")
from exlm.kernels.triton import TritonBackend, attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes inf - inf in masked lanes

CPU = torch.device("cpu")
HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16
LIMITS = {HALF: 2e-3, FULL: 2e-6, BRAIN: 2e-2}

SMALL = [
    Case("float", FULL, 4, 2, 64, (300, 5), 1),
    Case("float", HALF, 4, 4, 32, (300, 0), 3, window=100),
    Case("float", HALF, 6, 2, 80, (270, 40), 2, softcap=5.0, masked=True),
    Case("q8", HALF, 4, 2, 64, (130, 7), 2),
    Case("q6", HALF, 2, 1, 64, (65, 0), 1),
    Case("q4", HALF, 3, 1, 32, (65, 64), 2, masked=True),
    Case("q4", FULL, 2, 2, 128, (70,), 1, window=9),
    Case("float", HALF, 3, 3, 80, (270, 40, 0), 1, softcap=5.0, masked=True),
    Case("q8", HALF, 2, 2, 64, (130, 7), 1),
    Case("q6", HALF, 1, 1, 32, (70,), 1, softcap=2.0),
    Case("fp8", HALF, 1, 1, 128, (70,), 1),
    Case("fp8", HALF, 4, 2, 64, (130, 7), 16),
    Case("q8", HALF, 2, 2, 96, (70,), 1),  # a transform reaches over two heads: left to the reference
    Case("float", HALF, 4, 2, 64, (300, 5), 40),
    Case("float", HALF, 2, 2, 64, (100, 100), 40, window=33, softcap=3.0),
    Case("float", FULL, 4, 2, 96, (0, 0), 40, masked=True),
    Case("q4", HALF, 4, 2, 64, (130, 7), 20),
    Case("fp8", HALF, 2, 1, 64, (70,), 17),
    Case("q8", HALF, 2, 1, 64, (0, 0), 40),
    Case("float", HALF, 6, 1, 256, (70,), 20),
    Case("q8", HALF, 6, 1, 256, (70,), 3),
]
LARGE = [
    Case(cache, dtype, heads, kv, head, pasts, tokens, window, cap, masked)
    for cache in ("float", "q8", "q6", "q4", "fp8")
    for dtype, heads, kv, head, window, cap, masked in (
        (HALF, 32, 32, 128, None, None, False),
        (BRAIN, 32, 8, 128, 700, None, False),
        (HALF, 6, 2, 64, None, 20.0, True),
        (BRAIN, 16, 2, 256, None, None, False),
        (FULL, 4, 2, 128, 300, None, True),
    )
    for pasts, tokens in (
        ((0, 1, 5000), 1),
        ((513, 255, 2500), 7),
        ((300, 2, 1), 16),
        ((0, 0), 77),
        ((901, 3), 300),
    )
] + [Case("float", HALF, 8, 2, head, (700, 3), tokens) for head in (80, 96, 112, 192) for tokens in (1, 5, 90)]


def ids(case: Case) -> str:
    """The test's id."""
    return f"{case.cache}-{case.heads}x{case.kv_heads}x{case.head_dim}-{case.pasts}+{case.tokens}-{case.dtype}"


def make_rope(backend: b.Backend, case: Case, style: str = "neox") -> b.RopeFn:
    """RoPE over three quarters of each head."""
    rope = spec.Rope(1e4, case.head_dim // 4 * 3 // 2 * 2, style=style)  # type: ignore[arg-type]
    return backend.rope(rope, 8192)


def compare(case: Case, device: torch.device) -> None:
    """Compare the kernel's output and what it writes to the cache with the reference."""
    plain, fast = ReferenceBackend(device, case.dtype), TritonBackend(device, case.dtype)
    q, k, v = (step := cases.step(case, device)).heads
    layer_copy = step.layer.clone()
    want = plain.attention(case.attn, make_rope(plain, case))(q, k, v, step.layer, step.metadata)
    got = fast.attention(case.attn, make_rope(fast, case))(q, k, v, layer_copy, step.metadata)
    assert got.dtype is case.dtype
    limit = LIMITS[case.dtype] if case.cache == "float" else max(2e-3, LIMITS[case.dtype])
    assert float((got - want).float().norm() / want.float().norm()) < limit
    for actual, expected in zip(layer_copy.tensors, step.layer.tensors, strict=True):
        assert_close_tensors(actual, expected)


def assert_close_tensors(actual: Tensor, expected: Tensor) -> None:
    """Keys after RoPE may differ by one rounding, and then a few codes by one."""
    if actual.dtype is torch.uint8:
        assert float((actual != expected).float().mean()) < 2e-3
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_in_the_interpreter(case: Case) -> None:
    compare(case, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=ids)
def test_on_a_gpu(case: Case) -> None:
    compare(case, torch.device("cuda"))


def check_row_alone(case: Case, device: torch.device) -> None:
    """Each row alone, with its own page table and another number of programs, gives the batch's bits."""
    fast = TritonBackend(device, case.dtype)
    (q, k, v), layer, metadata = cases.step(case, device, spare=3)
    attend = fast.attention(case.attn, make_rope(fast, case))
    batched = attend(q, k, v, layer.clone(), metadata)
    assert torch.equal(attend(q, k, v, layer.clone(), metadata), batched)
    fast.limits = attention.DeviceLimits(1, fast.limits.shared_memory)
    attend = fast.attention(case.attn, make_rope(fast, case))
    for row, past in enumerate(case.pasts):
        one = slice(row, row + 1)
        width = -(-(past + case.tokens) // cases.PAGE)
        row_metadata = replace(
            metadata,
            positions=metadata.positions[one],
            past_lens=metadata.past_lens[one],
            page_table=metadata.page_table[one, :width].contiguous(),
            max_kv_len=past + case.tokens,
        )
        assert torch.equal(attend(q[one], k[one], v[one], layer.clone(), row_metadata), batched[one])


def test_a_row_is_the_same_in_any_batch() -> None:
    check_row_alone(Case("float", HALF, 4, 2, 32, (300, 0, 70), 2), CPU)
    check_row_alone(Case("q4", HALF, 2, 2, 64, (130, 3), 1), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["float", "q8", "q4", "fp8"])
@pytest.mark.parametrize("heads", [(32, 32), (32, 8)])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_a_row_is_the_same_in_any_batch_on_a_gpu(cache: str, heads: tuple[int, int], tokens: int) -> None:
    pasts = (8000, 0, 1, 500, 2049, 64, 63, 300, 4000, 7)
    check_row_alone(Case(cache, HALF, *heads, 128, pasts, tokens), torch.device("cuda"))


def check_strided_heads(case: Case, device: torch.device) -> None:
    """q, k and v as views of one tensor, as a fused projection returns them; and without a cache."""
    from exlm.kvcache import NoCache

    plain, fast = ReferenceBackend(device, case.dtype), TritonBackend(device, case.dtype)
    _, layer, metadata = cases.step(case, device)
    rows, tokens, d = len(case.pasts), case.tokens, case.head_dim
    wide = torch.randn(rows, tokens, (case.heads + 2 * case.kv_heads) * d, device=device).to(case.dtype)
    parts = wide.split([case.heads * d, case.kv_heads * d, case.kv_heads * d], -1)
    q, k, v = (part.unflatten(-1, (-1, d)) for part in parts)
    for kv in (layer, NoCache()) if max(case.pasts) == 0 else (layer,):
        layer_copy = kv.clone() if kv is layer else kv
        want = plain.attention(case.attn, make_rope(plain, case, "gptj"))(q, k, v, kv, metadata)
        got = fast.attention(case.attn, make_rope(fast, case, "gptj"))(q, k, v, layer_copy, metadata)
        assert float((got - want).float().norm() / want.float().norm()) < LIMITS[case.dtype]


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("past", [0, 30])
def test_strided_heads(tokens: int, past: int) -> None:
    check_strided_heads(Case("float", HALF, 4, 2, 32, (past, past), tokens), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 17, 600])
@pytest.mark.parametrize("past", [0, 300])
def test_strided_heads_on_a_gpu(tokens: int, past: int) -> None:
    check_strided_heads(Case("float", BRAIN, 32, 8, 128, (past, past), tokens), torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["float", "q4"])
def test_cuda_graph_replay_while_rows_grow(cache: str) -> None:
    """A captured call stays right while the rows grow: no launch argument depends on their lengths."""
    device = torch.device("cuda")
    case = Case(cache, HALF, 8, 2, 128, (300, 1000), 1)
    plain, fast = ReferenceBackend(device, HALF), TritonBackend(device, HALF)
    (q, k, v), layer, metadata = cases.step(case, device, spare=8)
    attend, reference = (
        fast.attention(case.attn, make_rope(fast, case)),
        plain.attention(case.attn, make_rope(plain, case)),
    )
    layer_copy = layer.clone()
    attend(q, k, v, layer.clone(), metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(q, k, v, layer_copy, metadata)
    for grown in range(0, 600, 150):
        now = replace(
            metadata,
            past_lens=metadata.past_lens + grown,
            positions=metadata.positions + grown,
            max_kv_len=1001 + grown,
        )
        metadata.past_lens.copy_(now.past_lens)
        metadata.positions.copy_(now.positions)
        graph.replay()
        want = reference(q, k, v, layer, replace(now, uniform=False))
        assert float((got - want).float().norm() / want.float().norm()) < 2e-3
        metadata.past_lens.sub_(grown)
        metadata.positions.sub_(grown)
