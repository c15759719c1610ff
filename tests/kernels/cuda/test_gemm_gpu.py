"""The kernels on a GPU against plain torch: every width, any few rows, the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exlm import spec
from exlm.errors import Unsupported
from exlm.kernels import interface as b
from exlm.kernels.cuda.backend import MAX_M64, CudaBackend
from exlm.kernels.cuda.dequantize import DequantGemm, Dequantizer
from exlm.kernels.cuda.gemm_m16 import GemmM16, RmsNorm, TileConfig
from exlm.kernels.cuda.gemm_m64 import GemmM64
from exlm.kernels.cuda.module_cache import ModuleCache
from exlm.kernels.cuda.weight_tile import unify_groups
from tests.kernels.cuda.oracle import ACTS, LIMIT, entered, gated, off
from tests.kernels.cuda.oracle import product as right
from tests.kernels.cuda.random_weights import KINDS, weight
from tests.kernels.cuda.repack_oracle import repack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = (16, 1, 2, 7, 8, 9, 15)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> ModuleCache:
    return ModuleCache(torch.device("cuda", 0), tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_on_the_device_is_exact(modules: ModuleCache, kind: str) -> None:
    packed = [weight(kind, order=order).to(modules.device) for order in (True, False)]
    whole = DequantGemm([Dequantizer(modules, repack(one)) for one in packed]).dequantize()
    for one, got in zip(packed, whole.chunk(2, 1), strict=True):
        assert got[:, : one.out_features].equal(one.dequantize())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("plan", [TileConfig(), TileConfig(1, 16, 3), TileConfig(4, 6)])
def test_products_are_right_and_alone_as_in_company(
    modules: ModuleCache, kind: str, normal: bool, plan: TileConfig
) -> None:
    packed = weight(kind, bias=True).to(modules.device)
    torch.manual_seed(1)
    norm = RmsNorm(torch.rand(packed.in_features, device=modules.device), 1e-5) if normal else None
    tiles = repack(packed)
    product = GemmM16(modules, [tiles, tiles], norm, None, plan)
    x = torch.randn(16, packed.in_features, device=modules.device).half()
    rest = torch.randn(16, packed.out_features, device=modules.device).half()
    want = right(x, packed, norm) + rest.double()
    whole = None
    for rows in ROWS:
        out = [torch.full_like(rest[:rows], float("nan")) for _ in range(2)]
        product(x[:rows].contiguous(), out, rest[:rows].contiguous())
        assert out[0].equal(out[1])
        assert off(out[0], want[:rows]) < LIMIT
        whole = out[0] if whole is None else whole
        assert out[0].equal(whole[:rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ACTS)
def test_a_gate_and_what_it_lets_through(modules: ModuleCache, kind: str, act: str) -> None:
    gate, up = (weight(kind, bias=True, seed=seed).to(modules.device) for seed in (1, 2))
    norm = RmsNorm(torch.rand(gate.in_features, device=modules.device), 1e-5)
    product = GemmM16(modules, unify_groups([repack(gate), repack(up)]), norm, act)
    x = torch.randn(16, gate.in_features, device=modules.device).half()
    want = gated(x, gate, up, norm, act)
    whole = None
    for rows in ROWS:
        (out,) = (torch.full((rows, width), float("nan"), device=x.device).half() for width in product.output_widths)
        product(x[:rows].contiguous(), [out])
        assert off(out, want[:rows]) < LIMIT
        whole = out if whole is None else whole
        assert out.equal(whole[:rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [None, "silu"])
def test_more_rows_are_right_and_alike(modules: ModuleCache, kind: str, act: str | None) -> None:
    first, second = (weight(kind, bias=True, seed=seed).to(modules.device) for seed in (1, 2))
    norm = RmsNorm(torch.rand(first.in_features, device=modules.device), 1e-5)
    product = GemmM64(GemmM16(modules, unify_groups([repack(first), repack(second)]), norm, act))
    x = torch.randn(MAX_M64, first.in_features, device=modules.device).half()
    want = gated(x, first, second, norm, act) if act else right(x, first, norm)
    whole = None
    for rows in (MAX_M64, 17, 32, 33, 48, 49, MAX_M64):
        out = [torch.full((rows, width), float("nan"), device=x.device).half() for width in product.output_widths]
        product(x[:rows].contiguous(), out)
        assert off(out[0], want[:rows]) < LIMIT
        whole = out[0] if whole is None else whole
        assert out[0].equal(whole[:rows])


def test_matrices_of_different_kinds_together(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    backend = CudaBackend(device, torch.float16, tmp_path)
    packed = [weight(kind).to(device) for kind in ("4 bits", "4 bits in small groups", "6 and 4 bits")]
    linears = [backend.linear(one) for one in packed]
    scale = torch.rand(512, device=device)
    project = backend.fused_linear(linears, b.NormPrologue(spec.Norm("rms", 1e-5), scale), None)
    x = torch.randn(3, 1, 512, device=device).half()
    entry = entered(x, RmsNorm(scale, 1e-5))
    for got, one in zip(project(x, None), packed, strict=True):
        assert off(got, entry @ one.dequantize().double()) < LIMIT
    for linear, one in zip(linears, packed, strict=True):
        assert off(linear(x), x.double() @ one.dequantize().double()) < LIMIT


@pytest.mark.parametrize("rows", [1, 16, 17, MAX_M64, MAX_M64 + 1, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_the_backend_takes_any_number_of_rows(tmp_path: Path, kind: str, rows: int) -> None:
    device = torch.device("cuda", 0)
    packed = weight(kind, bias=True).to(device)
    linear = CudaBackend(device, torch.float16, tmp_path).linear(packed)
    x = torch.randn(1, rows, packed.in_features, device=device).half()
    want = right(x, packed)
    got = linear(x)
    assert got.shape == want.shape
    assert off(got, want) < LIMIT


def test_other_precisions_are_declined(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="float16"):
        CudaBackend(torch.device("cuda", 0), torch.bfloat16, tmp_path)
