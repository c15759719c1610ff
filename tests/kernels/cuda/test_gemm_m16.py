"""The kernels of packed matrices on a processor: every width, any few rows, the same bits in any company."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import Tensor

from exlm.errors import Unsupported
from exlm.formats.packed import PlainScales
from exlm.kernels.cuda.backend import CudaLinear
from exlm.kernels.cuda.dequantize import DequantGemm, Dequantizer
from exlm.kernels.cuda.gemm_m16 import GemmM16, RmsNorm, TileConfig
from exlm.kernels.cuda.tuning import TuneCache
from exlm.kernels.cuda.weight_tile import MmaWeight, unify_groups
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.oracle import ACTS, LIMIT, gated, off
from tests.kernels.cuda.oracle import product as right
from tests.kernels.cuda.random_weights import KINDS, matrix, segment, weight
from tests.kernels.cuda.repack_oracle import expand, repack

PLANS = (
    TileConfig(1, 8, 2),
    TileConfig(2, 4, 3),
    TileConfig(4, 2, 2),
    TileConfig(1, 1, 3),
    TileConfig(2, 8, 2),
    TileConfig(4, 4, 3),
)
PLANNED = list(zip(KINDS, cycle(PLANS), strict=False))
GATES = list(zip(KINDS, cycle(ACTS), cycle(PLANS[1:3]), strict=False))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModuleCache:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedModuleCache(tmp_path_factory.mktemp("emulated"))


def normal(inputs: int) -> RmsNorm:
    return RmsNorm(torch.rand(inputs), 1e-5)


def answer(product: GemmM16, x: Tensor, residual: Tensor | None = None) -> list[Tensor]:
    out = [torch.full((len(x), width), float("nan")).half() for width in product.output_widths]
    product(x.contiguous(), out, residual)
    return out


def check(product: GemmM16, x: Tensor, want: Sequence[Tensor], rest: Tensor | None, counts: tuple[int, ...]) -> None:
    """Right for all rows, and for any part of them the same bits."""
    whole = answer(product, x, rest)
    for got, one in zip(whole, want, strict=True):
        assert off(got, one) < LIMIT
    for rows in counts:
        last = slice(len(x) - rows, None)
        got = answer(product, x[last], None if rest is None else rest[last].contiguous())
        assert all(torch.equal(a, b[last]) for a, b in zip(got, whole, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_norm(modules: EmulatedModuleCache, kind: str) -> None:
    packed = weight(kind)
    x = torch.randn(8, packed.in_features).half()
    check(GemmM16(modules, [repack(packed)]), x, [right(x, packed)], None, (2, 7))


@pytest.mark.parametrize("widths", [(4, 4, 4, 4), (4, 4, 5, 6), (3, 4, 5, 8)], ids=str)
def test_four_weights_whose_outputs_lie_side_by_side(modules: EmulatedModuleCache, widths: tuple[int, ...]) -> None:
    sizes = (16, 24, 40, 32)
    packed = [
        matrix((segment(bits, [32] * 5, outputs, False, False),), outputs)
        for bits, outputs in zip(widths, sizes, strict=True)
    ]
    norm, x = normal(160), torch.randn(9, 160).half()
    product = GemmM16(modules, unify_groups([repack(one) for one in packed]), norm)
    out = product.empty_outputs(9)
    assert [one.data_ptr() - out[0].data_ptr() for one in out] == [0, 32, 80, 160]
    product(x, out)
    for got, one in zip(out, packed, strict=True):
        assert off(got, right(x, one, norm)) < LIMIT
    check(product, x, [right(x, one, norm) for one in packed], None, (1, 8))
    with pytest.raises(Unsupported, match="5 matrices"):
        GemmM16(modules, [repack(packed[0])] * 5)


@pytest.mark.parametrize(("kind", "plan"), PLANNED)
def test_behind_a_norm_with_bias_and_residual(modules: EmulatedModuleCache, kind: str, plan: TileConfig) -> None:
    packed = weight(kind, bias=True)
    norm, x = normal(packed.in_features), torch.randn(16, packed.in_features).half()
    rest = torch.randn(16, packed.out_features).half()
    product = GemmM16(modules, [repack(packed)], norm, None, plan)
    assert product.config == plan
    check(product, x, [right(x, packed, norm) + rest.double()], rest, (1, 2, 7, 8, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_full_answers_are_the_same_before_they_are_rounded(modules: EmulatedModuleCache, kind: str) -> None:
    packed = weight(kind, bias=True)
    norm, x = normal(packed.in_features), torch.randn(9, packed.in_features).half()
    product = GemmM16(modules, [repack(packed)], norm, None, TileConfig(2, 4, 2), fp32_out=True)
    rounded = GemmM16(modules, [repack(packed)], norm, None, TileConfig(2, 4, 2))
    for rows in (1, 9):
        (out,) = (one.fill_(float("nan")) for one in product.empty_outputs(rows))
        product(x[:rows], [out])
        assert out.dtype is torch.float32
        assert torch.equal(out.half(), answer(rounded, x[:rows])[0])
        assert not torch.equal(out, out.half().float())


@pytest.mark.parametrize(("kind", "act", "plan"), GATES)
def test_a_gate_and_what_it_lets_through(modules: EmulatedModuleCache, kind: str, act: str, plan: TileConfig) -> None:
    gate, up = (weight(kind, bias=True, seed=seed) for seed in (1, 2))
    norm, x = normal(gate.in_features), torch.randn(8, gate.in_features).half()
    product = GemmM16(modules, unify_groups([repack(gate), repack(up)]), norm, act, plan)
    check(product, x, [gated(x, gate, up, norm, act)], None, (3,))


def test_a_gate_of_other_widths(modules: EmulatedModuleCache) -> None:
    """Most codes of one side, none of the other, some of the next."""
    torch.manual_seed(3)
    widths = {"four": [(4, [128] * 5)], "six": [(6, [32] * 20)], "both": [(6, [32] * 8), (4, [128] * 3)]}
    made = {
        name: matrix(tuple(segment(bits, sizes, 40, False, False) for bits, sizes in parts), 40)
        for name, parts in widths.items()
    }
    x = torch.randn(16, 640).half()
    for names in (("four", "six"), ("six", "four"), ("both", "four"), ("six", "both")):
        gate, up = (made[name] for name in names)
        tiles = unify_groups([repack(gate), repack(up)])
        product = GemmM16(modules, tiles, None, "silu", TileConfig(2, 2, 3))
        check(product, x, [gated(x, gate, up, None, "silu")], None, (1, 9))


def test_matrices_of_different_kinds_together(modules: EmulatedModuleCache) -> None:
    """Widths, orders and sizes of their own; the last stores its inputs as they come."""
    kinds = ("4 bits in small groups", "6 and 4 bits", "4 bits")
    packed = [weight(kind, bias=True, order=kind != "4 bits") for kind in kinds]
    norm, x = normal(512), torch.randn(16, 512).half()
    for norm_or_not in (norm, None):
        product = GemmM16(
            modules, unify_groups([repack(one) for one in packed]), norm_or_not, None, TileConfig(2, 4, 2)
        )
        check(product, x, [right(x, one, norm_or_not) for one in packed], None, (1, 8))


def test_two_weights_share_packed_activations(modules: EmulatedModuleCache) -> None:
    packed = weight("all widths, odd columns")
    tiles: list[MmaWeight] = [repack(packed)] * 2
    x = torch.randn(16, packed.in_features).half()
    first, second = answer(GemmM16(modules, tiles, config=TileConfig(4, 8, 2)), x)
    assert torch.equal(first, second)
    assert off(first, right(x, packed)) < LIMIT


def test_small_scales_are_lifted_inside_only(modules: EmulatedModuleCache) -> None:
    """Numbers of float32 formats, as large as real ones: what is multiplied must not be lifted."""
    plain = weight("minimums", order=False)
    (one,) = plain.segments
    assert one.minimum is not None
    scales = (PlainScales(part.expand().float() * 2.0**-9) for part in (one.scales, one.minimum))
    made = replace(one, scales=next(scales), minimum=next(scales))
    packed = replace(plain, segments=(made,), dtype=torch.float32)
    tiles = repack(packed)
    assert tiles.factor < 1.0
    (dequantize,) = DequantGemm([Dequantizer(modules, tiles)]).dequantize().T.split(tiles.out_features)
    assert torch.equal(dequantize, (expand(tiles).float() * tiles.factor).half())
    x = torch.randn(100, packed.in_features).half() * 50
    linear = CudaLinear(TuneCache(modules), tiles, True)
    for rows in (1, 20, 100):
        assert off(linear(x[:rows]), right(x[:rows], packed)) < LIMIT


def test_a_gate_whose_inputs_are_ordered_otherwise(modules: EmulatedModuleCache) -> None:
    """As converters write them: one order for both, but more inputs of the wider codes in one."""
    torch.manual_seed(4)
    widths = {"gate": [(5, [32] * 3), (4, [128] * 4)], "up": [(5, [32] * 7), (4, [128] * 3)]}
    gate, up = (
        matrix(tuple(segment(bits, sizes, 40, False, False) for bits, sizes in parts), 40) for parts in widths.values()
    )
    norm, x = normal(608), torch.randn(16, 608).half()
    product = GemmM16(modules, unify_groups([repack(gate), repack(up)]), norm, "silu", TileConfig(2, 2, 3))
    assert product.variant.separate_perm
    check(product, x, [gated(x, gate, up, norm, "silu")], None, (1, 9))
