"""Fused layers: each launch prepacks the next one's activations; same bits in every batch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm.kernels import interface as b
from exlm.kernels.cuda.attention import PagedDecodeAttention, SplitCounters
from exlm.kernels.cuda.fused_layer import CudaFusedLayer, MixThenPack, PackingAttention, fuse_layer_kernels
from exlm.kernels.cuda.gemm_m16 import RmsNorm
from exlm.kernels.cuda.gemm_m64 import GemmDispatch
from exlm.kernels.cuda.module_cache import ModuleCache
from exlm.kernels.cuda.tuning import TuneCache
from exlm.kernels.cuda.weight_tile import unify_groups
from exlm.kvcache import CacheLayer
from exlm.nn import Batch
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.random_weights import matrix, segment
from tests.kernels.cuda.repack_oracle import repack
from tests.kernels.cuda.test_attention import RopeTables, refuse
from tests.kernels.triton import cases
from tests.kernels.triton.cases import Case

HIDDEN, INNER, HEAD = 192, 320, 64


class Stack:
    """Two fused layers, and the kernels they are made of."""

    def __init__(self, modules: Any, case: Case, norm: b.QKNormFn | None = None) -> None:
        torch.manual_seed(4)
        self.device, self.case, self.norm = modules.device, case, norm
        tuned, counters = TuneCache(modules), SplitCounters(modules, 2)
        q, kv = case.heads * HEAD, case.kv_heads * HEAD

        def few(inputs: int, *outputs: int, normed: bool = False, act: str | None = None) -> GemmDispatch:
            made = [self._tiles(inputs, width) for width in outputs]
            behind = RmsNorm(torch.rand(inputs).to(self.device) * 3, 1e-5) if normed else None
            return GemmDispatch(tuned.gemm(unify_groups(made), behind, act), True)

        self.parts = [
            (
                few(HIDDEN, q, kv, kv, normed=True),
                few(q, HIDDEN),
                few(HIDDEN, INNER, INNER, normed=True, act="silu"),
                few(INNER, HIDDEN),
            )
            for _ in range(2)
        ]
        self.attend = PagedDecodeAttention(counters, case.attn, RopeTables(case, "neox", self.device), refuse)
        self.layers: list[CudaFusedLayer] = []
        for parts in self.parts:
            made = fuse_layer_kernels(parts, PackingAttention(self.attend, norm))
            assert made is not None
            self.layers.append(made)

    def _tiles(self, inputs: int, outputs: int) -> Any:
        kinds = (6, [32]), (5, [32]), (4, [32] * (inputs // 32 - 2))
        parts = tuple(segment(bits, sizes, outputs, False, False) for bits, sizes in kinds)
        return repack(matrix(parts, outputs).to(self.device))

    def run_chained(self, x: Tensor, kvs: list[CacheLayer], metadata: Batch) -> Tensor:
        for layer, kv in zip(self.layers, kvs, strict=True):
            y = layer(x, kv, metadata)
            assert y is not None
            x = y
        return x

    def run_separately(self, x: Tensor, kvs: list[CacheLayer], metadata: Batch) -> Tensor:
        shape, rows = x.shape, x.flatten(0, 1)
        for (qkv, o, gate, down), kv in zip(self.parts, kvs, strict=True):
            q, k, v = (y.view(*shape[:2], -1, HEAD) for y in answer(qkv, rows))
            q, k = (q, k) if self.norm is None else self.norm(q, k)
            (rows,) = answer(o, self.attend(q, k, v, kv, metadata).flatten(0, 1), rows)
            (rows,) = answer(down, *answer(gate, rows), rows)
        return rows.view(shape)


def answer(few: GemmDispatch, x: Tensor, residual: Tensor | None = None) -> list[Tensor]:
    out = few.gemm.empty_outputs(len(x))
    few(x.contiguous(), out, residual)
    return out


def close(got: Tensor, want: Tensor) -> bool:
    return float((got.float() - want.float()).norm() / want.float().norm()) < 3e-3


def step(case: Case, device: torch.device) -> tuple[Tensor, list[CacheLayer], Batch]:
    _, layer, metadata = cases.step(case, device)
    x = torch.randn(len(case.pasts), case.tokens, HIDDEN).half().to(device)
    return x, [layer, layer.clone()], metadata


def copies(kvs: list[CacheLayer]) -> list[CacheLayer]:
    return [one.clone() for one in kvs]


def check(stack: Stack) -> None:
    x, kvs, metadata = step(stack.case, stack.device)
    mine, theirs = copies(kvs), copies(kvs)
    apart = stack.run_chained(x, copies(kvs), metadata)
    stack.layers[0].chain_to(stack.layers[1])
    chained, plain = stack.run_chained(x, mine, metadata), stack.run_separately(x, theirs, metadata)
    assert close(chained, plain)
    assert close(apart, plain)
    assert torch.equal(stack.run_chained(x, copies(kvs), metadata), chained)
    if len(stack.case.pasts) * stack.case.tokens > 16:
        return
    for row, past in enumerate(stack.case.pasts):
        one = slice(row, row + 1)
        own = cases.one_row(metadata, row, past + stack.case.tokens)
        assert torch.equal(stack.run_chained(x[one], copies(kvs), own), chained[one])


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModuleCache:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedModuleCache(tmp_path_factory.mktemp("emulated"))


CASES = (
    Case("float", torch.float16, 4, 2, HEAD, (70, 0, 5), 1),
    Case("q4", torch.float16, 2, 2, HEAD, (70, 5), 1),
    Case("float", torch.float16, 2, 2, HEAD, (9, 70), 9),
)


def doubled(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q * 2, k * 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cache}-{case.heads}-{case.tokens}")
def test_two_layers(modules: EmulatedModuleCache, case: Case) -> None:
    check(Stack(modules, case, doubled if case.cache == "q4" else None))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 64])
@pytest.mark.parametrize("cache", ["float", "q4"])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_two_layers_on_a_gpu(
    tmp_path_factory: pytest.TempPathFactory, rows: int, cache: str, heads: tuple[int, int]
) -> None:
    made = ModuleCache(torch.device("cuda", 0), tmp_path_factory.getbasetemp() / "kernels")
    pasts = tuple((137 * row * row + 5 * row) % 900 for row in range(rows))
    check(Stack(made, Case(cache, torch.float16, *heads, HEAD, pasts, 1)))


def test_rows_that_were_changed_are_prepared_anew(modules: EmulatedModuleCache) -> None:
    stack = Stack(modules, CASES[0])
    x, kvs, metadata = step(CASES[0], stack.device)
    first, second = stack.layers
    first.chain_to(second)
    left = first(x, kvs[0], metadata)
    assert left is not None
    unchanged = second(left.clone(), copies(kvs)[1], metadata)
    left.mul_(2)
    doubled, fresh = second(left, copies(kvs)[1], metadata), second(left.clone(), copies(kvs)[1], metadata)
    assert doubled is not None
    assert fresh is not None
    assert torch.equal(doubled, fresh)
    assert unchanged is not None
    assert not close(doubled, unchanged)


def test_what_it_leaves_to_parts(modules: EmulatedModuleCache) -> None:
    """More new tokens than its attention takes."""
    stack = Stack(modules, CASES[0])
    x, kvs, metadata = step(replace(CASES[0], tokens=17), stack.device)
    assert stack.layers[0](x, kvs[0], metadata) is None


class GatedStack(Stack):
    """Two layers with any mixer, here a sum of its products, times a gate in every second layer."""

    def __init__(self, modules: Any, case: Case) -> None:
        super().__init__(modules, case)
        self.mixers = [self.mix_plain, self.mix_gated]
        made = [fuse_layer_kernels(*one) for one in zip(self.parts, self.packed_mixers(modules), strict=True)]
        self.layers = [layer for layer in made if layer is not None]
        assert len(self.layers) == 2

    def packed_mixers(self, modules: Any) -> list[MixThenPack]:
        return [MixThenPack(modules, mix) for mix in self.mixers]

    @staticmethod
    def mix_plain(products: list[Tensor], x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Any:
        return sum(products), None

    @staticmethod
    def mix_gated(products: list[Tensor], x: Tensor, kv: b.LayerKVCache, metadata: b.AttnMetadata) -> Any:
        q, k, v = products
        return q + k, v

    def run_separately(self, x: Tensor, kvs: list[CacheLayer], metadata: Batch) -> Tensor:
        shape, rows = x.shape, x.flatten(0, 1)
        for (inputs, o, gate_up, down), mix, kv in zip(self.parts, self.mixers, kvs, strict=True):
            heads, gate = mix(answer(inputs, rows), x, kv, metadata)
            heads = heads if gate is None else (heads.float() * gate.float().sigmoid()).half()
            (rows,) = answer(o, heads, rows)
            (rows,) = answer(down, *answer(gate_up, rows), rows)
        return rows.view(shape)


GATED_CASES = tuple(Case("float", torch.float16, 2, 2, HEAD, (3,) * rows, tokens) for rows, tokens in ((3, 1), (2, 9)))


@pytest.mark.parametrize("case", GATED_CASES, ids=lambda case: f"{len(case.pasts)} x {case.tokens}")
def test_any_mixer(modules: EmulatedModuleCache, case: Case) -> None:
    check(GatedStack(modules, case))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_any_mixer_on_a_gpu(tmp_path_factory: pytest.TempPathFactory, rows: int) -> None:
    made = ModuleCache(torch.device("cuda", 0), tmp_path_factory.getbasetemp() / "kernels")
    check(GatedStack(made, Case("float", torch.float16, 2, 2, HEAD, (3,) * rows, 1)))
