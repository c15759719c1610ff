"""Attention in CUDA C++ against the reference: emulated on a processor, and on a GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm import spec
from exlm.kernels.cuda import attention
from exlm.kernels.cuda.attention import PagedDecodeAttention, SplitConfig, SplitCounters, default_split_config
from exlm.kernels.reference import ReferenceBackend, RotaryEmbedding
from exlm.kvcache import CacheLayer
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.prepacked_oracle import input_layout, read_back
from tests.kernels.triton import cases
from tests.kernels.triton.cases import Case

HALF, CPU = torch.float16, torch.device("cpu")


def refuse(*_: Any) -> Tensor:
    raise AssertionError("the kernel did not take it")


class RopeTables:
    """RoPE that only has tables."""

    def __init__(self, case: Case, style: str, device: torch.device) -> None:
        made = RotaryEmbedding(rope(case, style), 8192, device)
        self.cos, self.sin, self.mrope_axis = made.cos, made.sin, made.mrope_axis.int()
        self.dim, self.interleaved = made.dim, style == "gptj"

    def __call__(self, *_: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("RoPE outside of the kernel")


def rope(case: Case, style: str) -> spec.Rope:
    return spec.Rope(1e4, case.head_dim // 4 * 3, style=style)  # type: ignore[arg-type]


def compare(
    counters: SplitCounters, case: Case, plan: SplitConfig | None, device: torch.device, style: str = "neox"
) -> None:
    plain = ReferenceBackend(device, case.dtype)
    q, k, v = (step := cases.step(case, device)).heads
    twin = step.layer.clone()
    want = plain.attention(case.attn, plain.rope(rope(case, style), 8192))(q, k, v, step.layer, step.metadata)
    attend = PagedDecodeAttention(counters, case.attn, RopeTables(case, style, device), refuse, plan)
    third = twin.clone()
    got = attend(q, k, v, twin, step.metadata)
    assert float((got - want).float().norm() / want.float().norm()) < 2e-3
    rows = got.flatten(0, 1)
    acts = input_layout(rows.shape[1], device).allocate(len(rows), 0)
    acts.packed_x.fill_(float("nan"))
    assert third.kv_pages is not None
    attend.launch(q, k, v, third.kv_pages, step.metadata, packed_out=acts)
    assert torch.equal(read_back(acts), rows.cpu())
    assert all(torch.equal(a, b) for a, b in zip(third.tensors, twin.tensors, strict=True))
    assert int(counters.arrivals.abs().sum()) == 0
    for mine, right in zip(twin.tensors, step.layer.tensors, strict=True):
        if mine.dtype is torch.uint8:
            assert float((mine != right).float().mean()) < 2e-3
        else:
            torch.testing.assert_close(mine, right, rtol=2e-2, atol=1e-3)


SMALL = SplitConfig(warps=4, min_split=64, max_splits=4, max_waves=4)
EMULATED = [
    (Case("float", HALF, 2, 2, 64, (300, 5, 0), 1), SMALL),
    (Case("float", HALF, 2, 2, 64, (300, 5), 1, window=40), SMALL),
    (Case("float", HALF, 8, 2, 128, (300, 77), 3), SMALL),
    (Case("q8", HALF, 4, 2, 64, (130, 7), 1), replace(SMALL, kv_m16=2)),
    (Case("q8", HALF, 1, 1, 128, (70,), 1), SMALL),
    (Case("q6", HALF, 2, 2, 64, (90,), 3), SMALL),
    (Case("q4", HALF, 8, 2, 128, (130, 7), 1), replace(SMALL, kv_m16=4)),
    (Case("q4", HALF, 2, 2, 128, (300, 64, 5, 0), 1), SMALL),
    (Case("q4", HALF, 3, 3, 64, (700, 65), 1), replace(SMALL, warps=2, max_waves=1)),
    (Case("q4", HALF, 2, 2, 128, (200, 5), 1, window=70), SMALL),
    (Case("q4", HALF, 1, 1, 128, (200, 5), 1, softcap=5.0, masked=True), SMALL),
    (Case("q6", HALF, 2, 2, 128, (130, 300), 1), SMALL),
    (Case("q8", HALF, 1, 1, 64, (130, 300), 1), replace(SMALL, warps=1)),
    (Case("q4", HALF, 2, 1, 64, (200, 5), 16, softcap=5.0, masked=True), SMALL),
    (Case("fp8", HALF, 4, 1, 64, (90, 1), 4), SMALL),
    (Case("fp8", HALF, 1, 1, 128, (90, 64), 1), replace(SMALL, kv_m16=2)),
    (Case("float", HALF, 6, 1, 256, (130, 5), 1), SMALL),
    (Case("float", HALF, 6, 1, 256, (70,), 5), SMALL),
    (Case("q8", HALF, 1, 1, 256, (90,), 1), SMALL),
    (Case("q4", HALF, 3, 1, 256, (130, 3), 3, window=70), SMALL),
]
LARGE = [
    Case(cache, HALF, heads, kv, head, pasts, tokens, window, cap, hide)
    for cache in ("float", "q8", "q6", "q4", "fp8")
    for heads, kv, head, window, cap, hide in (
        (32, 32, 128, None, None, False),
        (32, 8, 128, 700, None, False),
        (6, 2, 64, None, 20.0, True),
        (16, 2, 256, None, None, False),
    )
    for pasts, tokens in (((0, 1, 5000), 1), ((513, 255, 2500), 7), ((300, 2, 1), 16))
]


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> SplitCounters:
    """Two processors that are none."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return SplitCounters(EmulatedModuleCache(tmp_path_factory.mktemp("emulated")), 2)


@pytest.fixture
def gpu(tmp_path_factory: pytest.TempPathFactory) -> SplitCounters:
    """A device of one's own."""
    from exlm.kernels.cuda.module_cache import ModuleCache

    folder = tmp_path_factory.getbasetemp() / "kernels"
    return SplitCounters(ModuleCache(torch.device("cuda", 0), folder), 132)


def planned(case: Case, layer: CacheLayer) -> SplitConfig:
    assert layer.kv_pages is not None
    return default_split_config(layer.kv_pages, case.tokens * case.heads // case.kv_heads, case.head_dim)


def name(case: Case) -> str:
    return f"{case.cache}-{case.heads}x{case.kv_heads}x{case.head_dim}-{case.pasts}+{case.tokens}"


@pytest.mark.parametrize(("case", "plan"), EMULATED, ids=lambda x: name(x) if isinstance(x, Case) else "")
def test_emulated(counters: SplitCounters, case: Case, plan: SplitConfig) -> None:
    compare(counters, case, plan, CPU)


@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_styles(counters: SplitCounters, style: str) -> None:
    compare(counters, Case("float", HALF, 2, 2, 64, (70, 5), 1), SMALL, CPU, style)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=name)
def test_on_a_gpu(gpu: SplitCounters, case: Case) -> None:
    compare(gpu, case, None, torch.device("cuda"))


def alone(counters: SplitCounters, case: Case, plan: SplitConfig | None, device: torch.device) -> None:
    """Each row by itself, shared by other thread blocks and bound by its own length, gives the same bits."""
    (q, k, v), layer, metadata = cases.step(case, device, spare=3)
    attend = PagedDecodeAttention(counters, case.attn, RopeTables(case, "neox", device), refuse, plan)
    whole = attend(q, k, v, layer.clone(), metadata)
    assert torch.equal(attend(q, k, v, layer.clone(), replace(metadata, max_kv_len=metadata.max_kv_len + 700)), whole)
    few = SplitCounters(counters.modules, 1)
    attend = replace(attend, counters=few, config=replace(plan or planned(case, layer), max_waves=1))
    for row, past in enumerate(case.pasts):
        one = slice(row, row + 1)
        mine = cases.one_row(metadata, row, past + case.tokens)
        assert torch.equal(attend(q[one], k[one], v[one], layer.clone(), mine), whole[one])


@pytest.mark.parametrize(("cache", "heads"), [("float", (2, 2)), ("q4", (8, 2)), ("q4", (2, 2))])
def test_a_row_is_the_same_in_any_batch(counters: SplitCounters, cache: str, heads: tuple[int, int]) -> None:
    head = 64 if cache == "float" else 128
    alone(
        counters,
        Case(cache, HALF, *heads, head, (300, 0, 64, 65), 1),
        replace(SMALL, kv_m16=4 if head > 64 else 1),
        CPU,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["float", "q8", "q4"])
@pytest.mark.parametrize("heads", [(32, 32), (32, 8)])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_a_row_is_the_same_in_any_batch_on_a_gpu(
    gpu: SplitCounters, cache: str, heads: tuple[int, int], tokens: int
) -> None:
    pasts = (8000, 0, 1, 500, 2049, 64, 63, 300, 4000, 7)
    alone(gpu, Case(cache, HALF, *heads, 128, pasts, tokens), None, torch.device("cuda"))


def test_strided_heads_with_rope_applied_before(counters: SplitCounters) -> None:
    """Parts of one wide tensor, as a joint projection leaves them; RoPE without tables."""
    case = Case("float", HALF, 2, 2, 64, (70, 5), 1)
    _, layer, metadata = cases.step(case, CPU)
    wide = torch.randn(2, 1, 6 * 64).to(HALF)
    q, k, v = (part.unflatten(-1, (-1, 64)) for part in wide.chunk(3, -1))
    plain = ReferenceBackend(CPU, HALF)
    turn = plain.rope(rope(case, "neox"), 8192)
    twin = layer.clone()
    want = plain.attention(case.attn, turn)(q, k, v, layer, metadata)
    got = PagedDecodeAttention(counters, case.attn, turn, refuse, SMALL)(q, k, v, twin, metadata)
    assert float((got - want).float().norm() / want.float().norm()) < 2e-3


def test_rope_of_the_triton_backend_is_applied_by_the_kernel() -> None:
    """Backends of a GPU are chained: the CUDA kernel takes the tables of Triton's RoPE instead of calling it."""
    norm_rope_act = pytest.importorskip("exlm.kernels.triton.norm_rope_act")
    made = norm_rope_act.RopeTables.of(spec.Rope(1e4, 64), 16, CPU)
    assert isinstance(made, attention.RopeTables)


def test_mrope(counters: SplitCounters) -> None:
    case = Case("float", HALF, 2, 2, 64, (70, 5), 2)
    (q, k, v), layer, metadata = cases.step(case, CPU)
    turn = spec.Rope(1e4, 64, mrope_sections=(8, 10, 14))
    tables = RopeTables(case, "neox", CPU)
    made = RotaryEmbedding(turn, 8192, CPU)
    tables.cos, tables.sin, tables.mrope_axis, tables.dim = made.cos, made.sin, made.mrope_axis.int(), 64
    metadata = replace(metadata, positions=torch.randint(0, 500, (3, 2, 2)))
    plain, twin = ReferenceBackend(CPU, HALF), layer.clone()
    want = plain.attention(case.attn, plain.rope(turn, 8192))(q, k, v, layer, metadata)
    got = PagedDecodeAttention(counters, case.attn, tables, refuse, SMALL)(q, k, v, twin, metadata)
    assert float((got - want).float().norm() / want.float().norm()) < 2e-3


@pytest.mark.parametrize(
    "case",
    [
        Case("float", HALF, 2, 2, 96, (5,), 1),
        Case("float", torch.float32, 2, 2, 64, (5,), 1),
        Case("float", HALF, 2, 2, 64, (5,), 17),
    ],
    ids=name,
)
def test_what_goes_another_way(counters: SplitCounters, case: Case) -> None:
    (q, k, v), layer, metadata = cases.step(case, CPU)
    attend = PagedDecodeAttention(counters, case.attn, RopeTables(case, "neox", CPU), lambda *_: q.new_full((1,), 7.0))
    assert attend(q, k, v, layer, metadata).tolist() == [7.0]


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["float", "q4"])
def test_replayed_from_a_graph(gpu: SplitCounters, cache: str) -> None:
    """A captured step goes on to be right while the rows grow up to the longest it was captured for."""
    device = torch.device("cuda")
    case = Case(cache, HALF, 8, 2, 128, (300, 1000), 1)
    (q, k, v), layer, metadata = cases.step(case, device, spare=8)
    plain, tables = ReferenceBackend(device, HALF), RopeTables(case, "neox", device)
    right = plain.attention(case.attn, plain.rope(rope(case, "neox"), 8192))
    attend = PagedDecodeAttention(gpu, case.attn, tables, refuse)
    bound = replace(metadata, max_kv_len=2048)
    attend(q, k, v, layer.clone(), bound)
    twin, graph = layer.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(q, k, v, twin, bound)
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


TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles(target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    from exlm.kernels.cuda.attention import MHA_SOURCE, SOURCE, attn_defines
    from exlm.kernels.cuda.module_cache import compile_source, read_source

    for source, n8_tiles, case in (
        (SOURCE, 1, Case("float", HALF, 32, 8, 128, (5,), 1)),
        (SOURCE, 2, Case("q4", HALF, 4, 4, 64, (5,), 3, masked=True)),
        (SOURCE, 1, Case("float", HALF, 24, 4, 256, (5,), 1)),
        (MHA_SOURCE, 1, Case("q4", HALF, 32, 32, 128, (5,), 1)),
        (MHA_SOURCE, 1, Case("q8", HALF, 4, 4, 64, (5,), 1, masked=True)),
    ):
        layer = cases.step(case, CPU).layer
        assert layer.kv_pages is not None
        chosen = attn_defines(case.attn, layer.kv_pages, planned(case, layer), n8_tiles, case.masked)
        options = [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{k}={v}" for k, v in chosen.items())]
        assert compile_source(read_source(source), source.name, options).startswith(b"\x7fELF")
