"""The kernels on a GPU against plain torch: every width, any few rows, the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exlm.errors import Unsupported
from exlm.kernels.cuda.backend import FEW, CudaBackend
from exlm.kernels.cuda.linear import Entry, Plan, Product, expanded
from exlm.kernels.cuda.program import Workshop
from exlm.kernels.cuda.tiles import arrange, expand
from tests.kernels.cuda.random_weights import KINDS, weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENTRIES: tuple[Entry, ...] = ("plain", "norm", "gated")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(torch.device("cuda", 0), tmp_path_factory.mktemp("kernels"))


def entered(x: torch.Tensor, entry: Entry, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """x as it enters the matrix, in float64."""
    wide = x.double()
    if entry == "norm":
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.double()
        return scaled.half().double()
    if entry == "gated":
        gate, up = wide.chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).half().double()
    return wide


@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_on_the_device_is_exact(workshop: Workshop, kind: str) -> None:
    (tiles,) = arrange(weight(kind).to(workshop.device))
    assert expanded(workshop, tiles)[: tiles.out_features].equal(expand(tiles))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("plan", [Plan(), Plan(4, 8, 2), Plan(1, 12, 3)])
def test_products_are_right_and_alone_as_in_company(
    workshop: Workshop, kind: str, entry: Entry, plan: Plan
) -> None:
    packed = weight(kind, bias=True).to(workshop.device)
    torch.manual_seed(1)
    norm = torch.rand(packed.in_features, device=workshop.device)
    (tiles,) = arrange(packed)
    product = Product(workshop, [tiles, tiles], entry, norm, 1e-5, plan)
    x = torch.randn(16, packed.in_features * (2 if entry == "gated" else 1), device=workshop.device).half()
    rest = torch.randn(16, packed.out_features, device=workshop.device).half()
    assert packed.bias is not None
    want = entered(x, entry, norm, 1e-5) @ packed.dequantize().double() + packed.bias.double() + rest.double()
    whole = None
    for rows in (16, 1, 2, 7, 8, 9, 15):
        out = [torch.full_like(rest[:rows], float("nan")) for _ in range(2)]
        product(x[:rows].contiguous(), out, rest[:rows].contiguous())
        assert out[0].equal(out[1])
        assert float((out[0].double() - want[:rows]).norm() / want[:rows].norm()) < 1.5e-3
        whole = out[0] if whole is None else whole
        assert out[0].equal(whole[:rows])


@pytest.mark.parametrize("rows", [1, 16, 17, FEW, FEW + 1, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_the_backend_takes_any_number_of_rows(tmp_path: Path, kind: str, rows: int) -> None:
    device = torch.device("cuda", 0)
    packed = weight(kind, bias=True).to(device)
    linear = CudaBackend(device, torch.float16, tmp_path).linear(packed)
    x = torch.randn(1, rows, packed.in_features, device=device).half()
    assert packed.bias is not None
    want = x.double() @ packed.dequantize().double() + packed.bias.double()
    got = linear(x)
    assert got.shape == want.shape
    assert float((got.double() - want).norm() / want.norm()) < 1.5e-3


def test_other_precisions_are_declined(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="float16"):
        CudaBackend(torch.device("cuda", 0), torch.bfloat16, tmp_path)
