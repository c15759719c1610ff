"""Packed experts on a processor: any few tokens, the same bits in any company, and many with one wait."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm.errors import Unsupported
from exlm.formats import DenseWeight
from exlm.kernels import interface as b
from exlm.kernels.cuda import moe
from exlm.kernels.cuda.backend import CudaBackend, CudaLinear
from exlm.kernels.cuda.gemm_m16 import KernelVariant, TileConfig
from exlm.kernels.cuda.module_cache import compile_source, read_source
from exlm.kernels.cuda.moe import MIN_EXPERTS_PER_PAIR, SOURCE, CudaMoe, MoeGemm, moe_defines
from exlm.kernels.cuda.tuning import TuneCache
from exlm.kernels.dispatch import BackendList
from exlm.kernels.reference import ReferenceBackend
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.oracle import LIMIT, off
from tests.kernels.cuda.random_moe import RECIPES, Mixture, mixture
from tests.kernels.cuda.repack_oracle import repack
from tests.kernels.cuda.test_compile import EXL2, GGUF, GPTQ, TARGETS, options

MOST = 20


class Emulated(CudaBackend):
    """The backend with its kernels on a processor."""

    def __init__(self, modules: EmulatedModuleCache) -> None:
        self.device, self.dtype = torch.device("cpu"), torch.float16
        self.modules = self._modules = modules
        self._tune_cache = TuneCache(modules)
        self._fallback = ReferenceBackend(self.device, self.dtype)
        self._made: dict[str, tuple[Mixture, b.MoeFn]] = {}

    def linear(self, weight: b.Weight) -> b.LinearFn:
        """Repacked by the oracle."""
        if isinstance(weight, DenseWeight):
            raise Unsupported("only packed matrices")
        return CudaLinear(self._tune_cache, repack(weight), False)

    def of(self, made: Mixture) -> b.MoeFn:
        """A mixture's kernel."""
        parts = ([self.linear(one) for one in part] for part in made.weights)
        return self.moe(made.moe, *parts, made.selection_bias)

    def named(self, name: str) -> tuple[Mixture, b.MoeFn]:
        """A mixture of a kind and its kernel, bound once."""
        if name not in self._made:
            made = mixture(name)
            self._made[name] = made, self.of(made)
        return self._made[name]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return Emulated(EmulatedModuleCache(tmp_path_factory.mktemp("emulated")))


@settings(deadline=None, max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", RECIPES)
def test_few_tokens_are_right_and_alone_as_in_company(backend: Emulated, name: str, data: st.DataObject) -> None:
    made, kernel = backend.named(name)
    count = data.draw(st.integers(1, MOST), "tokens")
    start = data.draw(st.integers(0, count - 1), "first")
    part = slice(start, data.draw(st.integers(start + 1, count), "last"))
    x, logits = made.tokens(count, data.draw(st.integers(0, 9), "seed"))
    whole = kernel(x, logits)
    assert off(whole, made.right(x, logits)) < LIMIT
    assert kernel(x[:, part], logits[:, part]).equal(whole[:, part])


def test_both_ways_of_few_tokens_are_walked() -> None:
    rates = [recipe.moe.active * MIN_EXPERTS_PER_PAIR / recipe.moe.experts for recipe in RECIPES.values()]
    assert any(2 * rate <= 1 for rate in rates)  # two tokens by themselves
    assert all(MOST * rate > 1 for rate in rates)  # the most in groups


def test_of_equal_experts_the_first_are_chosen(backend: Emulated) -> None:
    made, kernel = backend.named("gptq")
    x, logits = made.tokens(6)
    first = torch.arange(made.moe.experts) < made.moe.active
    want = kernel(x, torch.where(first, 1.0, -1.0).half().expand_as(logits))
    assert kernel(x, logits * 0).equal(want)  # whatever the sign of zero


def test_of_equal_scores_the_first_experts_are_chosen(backend: Emulated) -> None:
    made, _ = backend.named("sigmoids")
    flat = replace(made, selection_bias=torch.zeros(made.moe.experts))
    kernel = backend.of(flat)
    x, logits = made.tokens(3)
    first = torch.arange(made.moe.experts) < made.moe.active
    want = kernel(x, torch.where(first, 1.0, 0.5).half().expand_as(logits))
    assert kernel(x, logits * 0 + 1).equal(want)


def test_nonsense_stays_with_its_token(backend: Emulated) -> None:
    made, kernel = backend.named("gptq")
    x, logits = made.tokens(5)
    want = kernel(x, logits)
    for nonsense in (float("nan"), float("inf"), -float("inf")):
        wrong = logits.clone()
        wrong[0, 2] = nonsense
        got = kernel(x, wrong)
        assert got[0, 2].isnan().all()
        assert got[0, [0, 1, 3, 4]].equal(want[0, [0, 1, 3, 4]])


def test_many_tokens_need_one_wait(backend: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mixture("gptq")
    gate, up, down = ([repack(one) for one in part] for part in made.weights)
    gate_up_gemm = MoeGemm(backend.modules, list(zip(gate, up, strict=True)), made.moe.active, made.moe.act)
    down_gemm = MoeGemm(backend.modules, [(one,) for one in down], made.moe.active)
    plain: list[list[b.LinearFn]] = [[partial(_rounded, one) for one in part] for part in made.weights]
    kernel = CudaMoe(made.moe, gate_up_gemm, down_gemm, plain, backend._fallback.gated(made.moe.act))
    x, logits = made.tokens(b.FUSE_MAX_TOKENS + 7)
    logits[..., 4] = -20  # no token selects it
    monkeypatch.setattr(moe, "MAX_MOE_GEMM_WORK", 0)
    waits = []
    tolist: Callable[[Tensor], list[int]] = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (waits.append(1), tolist(self))[1])
    got = kernel(x, logits)
    assert len(waits) == 1
    assert off(got, made.right(x, logits)) < LIMIT


def test_more_pairs_than_are_aligned_at_once(backend: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experts are read again and again rather than dequantised."""
    made, kernel = backend.named("gguf")
    x, logits = made.tokens(b.FUSE_MAX_TOKENS + 7)
    monkeypatch.setattr(moe, "_MAX_PAIRS", 8)
    got = kernel(x, logits)
    assert off(got, made.right(x, logits)) < LIMIT
    assert kernel(x[:, -3:], logits[:, -3:]).equal(got[:, -3:])


def _rounded(weight: b.Weight, x: Tensor) -> Tensor:
    y = x.double() @ weight.dequantize().double()
    return (y if weight.bias is None else y + weight.bias.double()).half()


def test_what_does_not_fit_together_is_left_to_fallback(backend: Emulated) -> None:
    made, other = mixture("gptq"), mixture("two widths")
    gate, up, down = made.weights
    dense = [DenseWeight(one.dequantize().T.contiguous()) for one in gate]
    for parts, layer, reason in (
        ((dense, up, down), made.moe, "not packed"),
        ((gate, up, down), replace(made.moe, act="relu2"), "relu2"),
        ((gate, other.weights[0][:9], down), made.moe, "kept in different ways"),
        ((gate, up, down), replace(made.moe, routing_groups=2), "groups of experts"),
    ):
        chain = BackendList([backend, ReferenceBackend(backend.device, backend.dtype)])
        bound = [[chain.bind("w", "", lambda x, one=one: x.linear(one)) for one in part] for part in parts]
        chain.bind("mlp", "experts", lambda x, layer=layer, bound=bound: x.moe(layer, *bound))
        assert chain.records[-1].backend == "reference"
        assert reason in chain.records[-1].declined[0]


DEFINES = {
    "gate and up, one token": {
        **KernelVariant((EXL2,) * 2, act=1).m16_defines(1, TileConfig(4, 4, 2), 4),
        **moe_defines(60, 4),
    },
    "gate and up with permutations of their own": {
        **KernelVariant((GPTQ,) * 2, act=3, separate_perm=True).m16_defines(8, TileConfig(2, 8)),
        **moe_defines(60, 4),
    },
    "down, of several widths": {
        **KernelVariant((GGUF,)).m16_defines(8, TileConfig(4, 16, 2)),
        **moe_defines(60, 4, 0b111100),
    },
    "sigmoids": {
        **KernelVariant((GPTQ,) * 2, act=1).m16_defines(8, TileConfig(2, 8)),
        **moe_defines(256, 8, sigmoid=True),
    },
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DEFINES)
def test_it_compiles(target: str, name: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")
    image = compile_source(read_source(SOURCE), SOURCE.name, options(target, DEFINES[name]))
    names = (b"moe_gemm", b"moe_pack_activations", b"moe_align", b"topk", b"combine")
    assert all(kernel in image for kernel in names)
