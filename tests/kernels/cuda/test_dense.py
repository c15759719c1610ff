"""Dense matrices with few outputs: right, and the same bits in any batch."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm.errors import Unsupported
from exlm.formats import DenseWeight
from exlm.kernels.cuda.dense import CudaFusedDense, dense_linear
from exlm.kernels.cuda.gemm_m16 import RmsNorm
from exlm.kernels.cuda.module_cache import ModuleCache
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.oracle import LIMIT, off


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModuleCache:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedModuleCache(tmp_path_factory.mktemp("emulated"))


def check(modules: Any, inputs: int, widths: list[int], normed: bool, biased: bool) -> None:
    device = modules.device
    torch.manual_seed(inputs)
    weights = [torch.randn(width, inputs).half().to(device) for width in widths]
    biases = [torch.randn(width).half().to(device) if biased and i == 0 else None for i, width in enumerate(widths)]
    norm = RmsNorm(torch.rand(inputs).to(device) * 2, 1e-5) if normed else None
    linears = [dense_linear(modules, DenseWeight(*one)) for one in zip(weights, biases, strict=True)]
    fused = CudaFusedDense(modules, linears, norm)
    x, residual = torch.randn(2, 9, inputs).half().to(device), torch.randn(2, 9, widths[0]).half().to(device)
    wide = x.double()
    if norm is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    outs = fused(x, residual)
    for i, (out, plain) in enumerate(zip(outs, fused.unfused(x), strict=True)):
        assert out.shape == (2, 9, widths[i])
        bias = 0 if (one := biases[i]) is None else one.double()
        rest = residual.double() if i == 0 else 0
        assert off(out, wide @ weights[i].double().T + bias + rest) < LIMIT
        assert off(plain, x.double() @ weights[i].double().T + bias) < LIMIT
        assert off(linears[i](x), x.double() @ weights[i].double().T + bias) < LIMIT
    for row, token in ((0, 0), (1, 4), (1, 8)):
        alone = fused(x[row : row + 1, token : token + 1], residual[row : row + 1, token : token + 1])
        assert all(one[0, 0].equal(out[row, token]) for one, out in zip(alone, outs, strict=True))


CASES = [(64, [3, 5], True, True), (2056, [7], False, False), (1024, [4, 1, 2], True, False)]


@pytest.mark.parametrize(("inputs", "widths", "normed", "biased"), CASES)
def test_few_outputs(modules: EmulatedModuleCache, inputs: int, widths: list[int], normed: bool, biased: bool) -> None:
    check(modules, inputs, widths, normed, biased)


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "widths", "normed", "biased"), [*CASES, (5120, [48, 48], True, False)])
def test_few_outputs_on_a_gpu(
    tmp_path_factory: pytest.TempPathFactory, inputs: int, widths: list[int], normed: bool, biased: bool
) -> None:
    check(ModuleCache(torch.device("cuda", 0), tmp_path_factory.getbasetemp()), inputs, widths, normed, biased)


def test_many_rows_by_one_product(modules: EmulatedModuleCache) -> None:
    weight = torch.randn(5, 64).half()
    x = torch.randn(65, 64).half()
    assert torch.equal(dense_linear(modules, DenseWeight(weight))(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (torch.zeros(1025, 8).half(), "1025 outputs"),
        (torch.zeros(4, 12).half(), "12 inputs"),
        (torch.zeros(4, 16392).half(), "16392 inputs"),
        (torch.zeros(4, 8), "float32"),
    ],
    ids=["outputs", "odd", "wide", "dtype"],
)
def test_what_it_declines(modules: EmulatedModuleCache, weight: Tensor, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        dense_linear(modules, DenseWeight(weight))
