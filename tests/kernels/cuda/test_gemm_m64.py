"""The kernel of 17 to 64 rows on a processor: every width, any stretches of work, the same bits always."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor

from exlm.errors import Unsupported
from exlm.kernels.cuda.backend import CudaLinear
from exlm.kernels.cuda.gemm_m16 import RESERVED_SMEM, GemmM16, RmsNorm, balance_occupancy
from exlm.kernels.cuda.gemm_m64 import GemmM64, TileConfigM64
from exlm.kernels.cuda.tuning import TuneCache
from exlm.kernels.cuda.weight_tile import unify_groups
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.oracle import ACTS, LIMIT, gated, off
from tests.kernels.cuda.oracle import product as right
from tests.kernels.cuda.random_weights import KINDS, matrix, segment, weight
from tests.kernels.cuda.repack_oracle import repack

PLANS = (
    TileConfigM64(1, 2, 3),
    TileConfigM64(2, 1, 2, split_k=1),
    TileConfigM64(2, 4, 4, 1, 2),
    TileConfigM64(1, 4, 2, 2, 3),
)
PLANNED = list(zip(KINDS, cycle(PLANS), strict=False))
GATED = ("all widths, odd columns", "minimums", "zero points", "6 and 4 bits")
GATES = list(zip(GATED, PLANS, ACTS, strict=True))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModuleCache:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedModuleCache(tmp_path_factory.mktemp("emulated"))


def answer(product: GemmM64, x: Tensor, residual: Tensor | None = None) -> list[Tensor]:
    out = [torch.full((len(x), width), float("nan")).half() for width in product.output_widths]
    product(x.contiguous(), out, residual)
    return out


def check(product: GemmM64, x: Tensor, want: Sequence[Tensor], rest: Tensor | None, rows: int) -> None:
    """Right for all rows, and the same bits for the last of them alone."""
    whole = answer(product, x, rest)
    for got, one in zip(whole, want, strict=True):
        assert off(got, one) < LIMIT
    last = slice(len(x) - rows, None)
    few = answer(product, x[last], None if rest is None else rest[last].contiguous())
    assert all(torch.equal(a, b[last]) for a, b in zip(few, whole, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(answer(product, x, rest), whole, strict=True))
    assert not (product.arrivals % product.split_k).any()  # ready for the next round


@pytest.mark.parametrize(("kind", "plan"), PLANNED)
def test_products(modules: EmulatedModuleCache, kind: str, plan: TileConfigM64) -> None:
    packed = weight(kind, bias=True)
    norm, x = RmsNorm(torch.rand(packed.in_features), 1e-5), torch.randn(31, packed.in_features).half()
    rest = torch.randn(31, packed.out_features).half()
    product = GemmM64(GemmM16(modules, [repack(packed)], norm), plan)
    assert product.config == plan
    check(product, x, [right(x, packed, norm) + rest.double()], rest, 18)


@pytest.mark.parametrize(("kind", "plan", "act"), GATES)
def test_a_gate_and_what_it_lets_through(
    modules: EmulatedModuleCache, kind: str, plan: TileConfigM64, act: str
) -> None:
    gate, up = (weight(kind, bias=True, seed=seed) for seed in (1, 2))
    x = torch.randn(17, gate.in_features).half()
    product = GemmM64(GemmM16(modules, unify_groups([repack(gate), repack(up)]), None, act), plan)
    (got,) = answer(product, x)
    assert off(got, gated(x, gate, up, None, act)) < LIMIT


def test_a_gate_of_other_widths(modules: EmulatedModuleCache) -> None:
    torch.manual_seed(3)
    widths = {"four": [(4, [128] * 5)], "six": [(6, [32] * 20)], "both": [(6, [32] * 8), (4, [128] * 3)]}
    made = {
        name: matrix(tuple(segment(bits, sizes, 40, False, False) for bits, sizes in parts), 40)
        for name, parts in widths.items()
    }
    x = torch.randn(20, 640).half()
    for names in (("four", "six"), ("six", "four"), ("both", "both")):
        gate, up = (made[name] for name in names)
        tiles = unify_groups([repack(gate), repack(up)])
        product = GemmM64(GemmM16(modules, tiles, None, "silu"), TileConfigM64(4, 2, 3))
        check(product, x, [gated(x, gate, up, None, "silu")], None, 18)
    apart = GemmM16(modules, unify_groups([repack(made["four"]), repack(made["both"])]), None, "silu")
    with pytest.raises(Unsupported, match="ordered differently"):
        GemmM64(apart)


def test_matrices_of_different_kinds_together(modules: EmulatedModuleCache) -> None:
    """Widths, orders and sizes of their own; thread blocks work on several of them."""
    kinds = ("4 bits in small groups", "6 and 4 bits", "4 bits")
    packed = [weight(kind, bias=True, order=kind != "4 bits") for kind in kinds]
    norm, x = RmsNorm(torch.rand(512), 1e-5), torch.randn(64, 512).half()
    tiles = unify_groups([repack(one) for one in packed])
    want = [right(x, one, norm) for one in packed]
    for pieces, rows in ((1, 49), (2, 49), (4, 20)):  # 20 are added up by one thread block, 64 by all
        product = GemmM64(GemmM16(modules, tiles, norm), TileConfigM64(2, 1, 3, split_k=pieces))
        check(product, x, want, None, rows)


@pytest.mark.parametrize("kind", ["4 bits", "all widths, odd columns"])
def test_full_answers_are_the_same_before_they_are_rounded(modules: EmulatedModuleCache, kind: str) -> None:
    packed = weight(kind, bias=True)
    x, plan = torch.randn(40, packed.in_features).half(), TileConfigM64(1, 4, 2, 2, 2)
    full = GemmM16(modules, [repack(packed)], fp32_out=True)
    rounded = GemmM64(GemmM16(modules, [repack(packed)]), plan)
    for rows in (17, 40):
        (out,) = (one.fill_(float("nan")) for one in full.empty_outputs(rows))
        GemmM64(full, plan)(x[:rows], [out])
        assert torch.equal(out.half(), answer(rounded, x[:rows])[0])
        assert not torch.equal(out, out.half().float())


def test_inputs_are_cut_where_outputs_are_few(modules: EmulatedModuleCache) -> None:
    product = GemmM16(modules, [repack(matrix((segment(4, [128] * 16, 40, False, False),), 40))])
    modules.num_sms = 1000
    assert GemmM64(product, TileConfigM64(1, 4, 3)).split_k == 8
    modules.num_sms = 1
    assert GemmM64(product, TileConfigM64(1, 4, 3)).split_k == 1
    modules.num_sms = EmulatedModuleCache.num_sms


def test_numbers_of_rows(modules: EmulatedModuleCache) -> None:
    packed = weight("4 bits")
    product = GemmM64(GemmM16(modules, [repack(packed)]), TileConfigM64(1, 4, 3))
    x = torch.randn(64, 512).half()
    (whole,) = answer(product, x)
    for rows in (17, 24, 31, 32, 33, 48, 63):
        (got,) = answer(product, x[:rows])
        assert torch.equal(got, whole[:rows])
    with pytest.raises(Unsupported, match="65 rows"):
        answer(product, torch.randn(65, 512).half())


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("rows", [16, 20, 65])
def test_the_backend_takes_any_number_of_rows(modules: EmulatedModuleCache, rows: int, wide: bool) -> None:
    packed = weight("short last group", bias=True)
    product = CudaLinear(TuneCache(modules), repack(packed), wide)
    x = torch.randn(1, rows, packed.in_features).half()
    assert off(product(x), right(x, packed)) < LIMIT


def test_few_thread_blocks_start_early_and_find_even_room(modules: EmulatedModuleCache) -> None:
    product = GemmM64(GemmM16(modules, [repack(weight("6 and 4 bits"))]), TileConfigM64(1, 2, 3))
    num_sms = modules.num_sms
    for rows in (32, 33):
        seen = []
        for blocks in range(1, 5 * num_sms):
            memory, early = product._launch_smem(rows, blocks)
            seen.append(early)
            fit = (modules.max_smem + RESERVED_SMEM) // (memory + RESERVED_SMEM)
            assert not early or fit == -(-blocks // num_sms)  # no more than come out evenly
            assert early or memory == product._smem_bytes(-(-rows // 16) * 16, product.config)
        assert seen == [n < 3 * num_sms for n in range(len(seen))]
    assert balance_occupancy(modules, 1, 200 << 10) == 200 << 10


def test_plans_fit(modules: EmulatedModuleCache) -> None:
    """As many warps and stages as there is shared memory for."""
    product = GemmM16(modules, [repack(weight("all widths, odd columns"))] * 2, None, "silu")
    modules.max_smem = 99 * 1024
    fitted = GemmM64(product, TileConfigM64(1, 8, 4, 2)).config
    assert (fitted.warp_tiles, fitted.min_blocks) == (2, 1)
    assert fitted.stages < 4
    modules.max_smem = 20 * 1024
    with pytest.raises(Unsupported, match="20480 bytes"):
        GemmM64(product)
    modules.max_smem = EmulatedModuleCache.max_smem
