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

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's inf - inf in dead lanes

CPU = torch.device("cpu")
HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16
LIMITS = {HALF: 2e-3, FULL: 2e-6, BRAIN: 2e-2}

SMALL = [
    Case("float", FULL, 4, 2, 64, (300, 5), 1),
    Case("float", HALF, 4, 4, 32, (300, 0), 3, window=100),
    Case("float", HALF, 6, 2, 80, (270, 40), 2, softcap=5.0, hide=True),
    Case("q8", HALF, 4, 2, 64, (130, 7), 2),
    Case("q6", HALF, 2, 1, 64, (65, 0), 1),
    Case("q4", HALF, 3, 1, 32, (65, 64), 2, hide=True),
    Case("q4", FULL, 2, 2, 128, (70,), 1, window=9),
    Case("float", HALF, 3, 3, 80, (270, 40, 0), 1, softcap=5.0, hide=True),
    Case("q8", HALF, 2, 2, 64, (130, 7), 1),
    Case("q6", HALF, 1, 1, 32, (70,), 1, softcap=2.0),
    Case("fp8", HALF, 1, 1, 128, (70,), 1),
    Case("fp8", HALF, 4, 2, 64, (130, 7), 16),
    Case("q8", HALF, 2, 2, 96, (70,), 1),  # a transform reaches over two heads: the reference's way
    Case("float", HALF, 4, 2, 64, (300, 5), 40),
    Case("float", HALF, 2, 2, 64, (100, 100), 40, window=33, softcap=3.0),
    Case("float", FULL, 4, 2, 96, (0, 0), 40, hide=True),
    Case("q4", HALF, 4, 2, 64, (130, 7), 20),
    Case("fp8", HALF, 2, 1, 64, (70,), 17),
    Case("q8", HALF, 2, 1, 64, (0, 0), 40),
]
LARGE = [
    Case(cache, dtype, heads, kv, head, pasts, tokens, window, cap, hide)
    for cache in ("float", "q8", "q6", "q4", "fp8")
    for dtype, heads, kv, head, window, cap, hide in (
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
] + [
    Case("float", HALF, 8, 2, head, (700, 3), tokens) for head in (80, 96, 112, 192) for tokens in (1, 5, 90)
]


def ids(case: Case) -> str:
    """A short name."""
    return (
        f"{case.cache}-{case.heads}x{case.kv_heads}x{case.head_dim}-{case.pasts}+{case.tokens}-{case.dtype}"
    )


def turn(backend: b.Backend, case: Case, style: str = "neox") -> b.RopeFn:
    """Three quarters of each head turn."""
    rope = spec.Rope(1e4, case.head_dim // 4 * 3 // 2 * 2, style=style)  # type: ignore[arg-type]
    return backend.rope(rope, 8192)


def compare(case: Case, device: torch.device) -> None:
    """The kernel's answer and what it leaves in the cache, held against the reference's."""
    plain, fast = ReferenceBackend(device, case.dtype), TritonBackend(device, case.dtype)
    q, k, v = (step := cases.step(case, device)).heads
    twin = step.layer.clone()
    want = plain.attention(case.attn, turn(plain, case))(q, k, v, step.layer, step.metadata)
    got = fast.attention(case.attn, turn(fast, case))(q, k, v, twin, step.metadata)
    assert got.dtype is case.dtype
    limit = LIMITS[case.dtype] if case.cache == "float" else max(2e-3, LIMITS[case.dtype])
    assert float((got - want).float().norm() / want.float().norm()) < limit
    for mine, right in zip(twin.tensors, step.layer.tensors, strict=True):
        same_but_for_roundings(mine, right)


def same_but_for_roundings(mine: Tensor, right: Tensor) -> None:
    """Turned keys may differ in the last place of a float, and then a code by one now and then."""
    if mine.dtype is torch.uint8:
        assert float((mine != right).float().mean()) < 2e-3
    else:
        torch.testing.assert_close(mine, right, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_in_the_interpreter(case: Case) -> None:
    compare(case, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=ids)
def test_on_a_gpu(case: Case) -> None:
    compare(case, torch.device("cuda"))


def alone(case: Case, device: torch.device) -> None:
    """Each row by itself, with a page table and programs of its own, answers as in the batch, bit for bit."""
    fast = TritonBackend(device, case.dtype)
    (q, k, v), layer, metadata = cases.step(case, device, spare=3)
    attend = fast.attention(case.attn, turn(fast, case))
    together = attend(q, k, v, layer.clone(), metadata)
    assert torch.equal(attend(q, k, v, layer.clone(), metadata), together)
    fast.machine = attention.Machine(1, fast.machine.shared)
    attend = fast.attention(case.attn, turn(fast, case))
    for row, past in enumerate(case.pasts):
        one = slice(row, row + 1)
        width = -(-(past + case.tokens) // cases.PAGE)
        mine = replace(
            metadata,
            positions=metadata.positions[one],
            past_lens=metadata.past_lens[one],
            pages=metadata.pages[one, :width].contiguous(),
            max_kv_len=past + case.tokens,
        )
        assert torch.equal(attend(q[one], k[one], v[one], layer.clone(), mine), together[one])


def test_a_row_is_the_same_in_any_batch() -> None:
    alone(Case("float", HALF, 4, 2, 32, (300, 0, 70), 2), CPU)
    alone(Case("q4", HALF, 2, 2, 64, (130, 3), 1), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["float", "q8", "q4", "fp8"])
@pytest.mark.parametrize("heads", [(32, 32), (32, 8)])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_a_row_is_the_same_in_any_batch_on_a_gpu(cache: str, heads: tuple[int, int], tokens: int) -> None:
    pasts = (8000, 0, 1, 500, 2049, 64, 63, 300, 4000, 7)
    alone(Case(cache, HALF, *heads, 128, pasts, tokens), torch.device("cuda"))


def strided(case: Case, device: torch.device) -> None:
    """Heads that are parts of one wide tensor, as a joint projection leaves them; and no cache at all."""
    from exlm.kvcache import NoCache

    plain, fast = ReferenceBackend(device, case.dtype), TritonBackend(device, case.dtype)
    _, layer, metadata = cases.step(case, device)
    rows, tokens, d = len(case.pasts), case.tokens, case.head_dim
    wide = torch.randn(rows, tokens, (case.heads + 2 * case.kv_heads) * d, device=device).to(case.dtype)
    parts = wide.split([case.heads * d, case.kv_heads * d, case.kv_heads * d], -1)
    q, k, v = (part.unflatten(-1, (-1, d)) for part in parts)
    for kv in (layer, NoCache()) if max(case.pasts) == 0 else (layer,):
        twin = kv.clone() if kv is layer else kv
        want = plain.attention(case.attn, turn(plain, case, "gptj"))(q, k, v, kv, metadata)
        got = fast.attention(case.attn, turn(fast, case, "gptj"))(q, k, v, twin, metadata)
        assert float((got - want).float().norm() / want.float().norm()) < LIMITS[case.dtype]


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("past", [0, 30])
def test_strided_heads(tokens: int, past: int) -> None:
    strided(Case("float", HALF, 4, 2, 32, (past, past), tokens), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 17, 600])
@pytest.mark.parametrize("past", [0, 300])
def test_strided_heads_on_a_gpu(tokens: int, past: int) -> None:
    strided(Case("float", BRAIN, 32, 8, 128, (past, past), tokens), torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["float", "q4"])
def test_replayed_from_a_graph(cache: str) -> None:
    """A captured step goes on to be right while the rows grow: nothing of it depends on their lengths."""
    device = torch.device("cuda")
    case = Case(cache, HALF, 8, 2, 128, (300, 1000), 1)
    plain, fast = ReferenceBackend(device, HALF), TritonBackend(device, HALF)
    (q, k, v), layer, metadata = cases.step(case, device, spare=8)
    attend, right = fast.attention(case.attn, turn(fast, case)), plain.attention(case.attn, turn(plain, case))
    twin = layer.clone()
    attend(q, k, v, layer.clone(), metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(q, k, v, twin, metadata)
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
        want = right(q, k, v, layer, replace(now, uniform=False))
        assert float((got - want).float().norm() / want.float().norm()) < 2e-3
        metadata.past_lens.sub_(grown)
        metadata.positions.sub_(grown)
