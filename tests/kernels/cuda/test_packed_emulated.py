"""The kernels of packed matrices on a processor: every width, any few rows, the same bits in any company."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import Tensor

from exlm.formats.scales import PlainScales
from exlm.kernels.cuda.backend import PackedLinear
from exlm.kernels.cuda.linear import Normal, Plan, Product
from exlm.kernels.cuda.planner import Planner
from exlm.kernels.cuda.tiles import Tiles, alike, arrange, expand
from exlm.kernels.cuda.unpack import Many, Unpacker
from tests.kernels.cuda.emulator import EmulatedWorkshop
from tests.kernels.cuda.oracle import ACTS, LIMIT, gated, off
from tests.kernels.cuda.oracle import product as right
from tests.kernels.cuda.random_weights import KINDS, matrix, segment, weight

PLANS = (Plan(1, 8, 2), Plan(2, 4, 3), Plan(4, 2, 2), Plan(1, 1, 3), Plan(2, 8, 2), Plan(4, 4, 3))
PLANNED = list(zip(KINDS, cycle(PLANS), strict=False))
GATES = list(zip(KINDS, cycle(ACTS), cycle(PLANS[1:3]), strict=False))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> EmulatedWorkshop:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedWorkshop(tmp_path_factory.mktemp("emulated"))


def normal(inputs: int) -> Normal:
    return Normal(torch.rand(inputs), 1e-5)


def answer(product: Product, x: Tensor, residual: Tensor | None = None) -> list[Tensor]:
    out = [torch.full((len(x), width), float("nan")).half() for width in product.widths]
    product(x.contiguous(), out, residual)
    return out


def check(
    product: Product, x: Tensor, want: Sequence[Tensor], rest: Tensor | None, counts: tuple[int, ...]
) -> None:
    """Right for all rows, and for any part of them the same bits."""
    whole = answer(product, x, rest)
    for got, one in zip(whole, want, strict=True):
        assert off(got, one) < LIMIT
    for rows in counts:
        last = slice(len(x) - rows, None)
        got = answer(product, x[last], None if rest is None else rest[last].contiguous())
        assert all(torch.equal(a, b[last]) for a, b in zip(got, whole, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_norm(workshop: EmulatedWorkshop, kind: str) -> None:
    packed = weight(kind)
    x = torch.randn(8, packed.in_features).half()
    check(Product(workshop, [arrange(packed)]), x, [right(x, packed)], None, (2, 7))


@pytest.mark.parametrize(("kind", "plan"), PLANNED)
def test_behind_a_norm_with_bias_and_residual(workshop: EmulatedWorkshop, kind: str, plan: Plan) -> None:
    packed = weight(kind, bias=True)
    norm, x = normal(packed.in_features), torch.randn(16, packed.in_features).half()
    rest = torch.randn(16, packed.out_features).half()
    product = Product(workshop, [arrange(packed)], norm, None, plan)
    assert product.plan == plan
    check(product, x, [right(x, packed, norm) + rest.double()], rest, (1, 2, 7, 8, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_full_answers_are_the_same_before_they_are_rounded(workshop: EmulatedWorkshop, kind: str) -> None:
    packed = weight(kind, bias=True)
    norm, x = normal(packed.in_features), torch.randn(9, packed.in_features).half()
    product = Product(workshop, [arrange(packed)], norm, None, Plan(2, 4, 2), full=True)
    rounded = Product(workshop, [arrange(packed)], norm, None, Plan(2, 4, 2))
    for rows in (1, 9):
        (out,) = (one.fill_(float("nan")) for one in product.answers(rows))
        product(x[:rows], [out])
        assert out.dtype is torch.float32
        assert torch.equal(out.half(), answer(rounded, x[:rows])[0])
        assert not torch.equal(out, out.half().float())


@pytest.mark.parametrize(("kind", "act", "plan"), GATES)
def test_a_gate_and_what_it_lets_through(workshop: EmulatedWorkshop, kind: str, act: str, plan: Plan) -> None:
    gate, up = (weight(kind, bias=True, seed=seed) for seed in (1, 2))
    norm, x = normal(gate.in_features), torch.randn(8, gate.in_features).half()
    product = Product(workshop, alike([arrange(gate), arrange(up)]), norm, act, plan)
    check(product, x, [gated(x, gate, up, norm, act)], None, (3,))


def test_a_gate_of_other_widths(workshop: EmulatedWorkshop) -> None:
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
        tiles = alike([arrange(gate), arrange(up)])
        product = Product(workshop, tiles, None, "silu", Plan(2, 2, 3))
        check(product, x, [gated(x, gate, up, None, "silu")], None, (1, 9))


def test_matrices_of_different_kinds_together(workshop: EmulatedWorkshop) -> None:
    """Widths, orders and sizes of their own; the last stores its inputs as they come."""
    kinds = ("4 bits in small groups", "6 and 4 bits", "4 bits")
    packed = [weight(kind, bias=True, order=kind != "4 bits") for kind in kinds]
    norm, x = normal(512), torch.randn(16, 512).half()
    for norm_or_not in (norm, None):
        product = Product(workshop, alike([arrange(one) for one in packed]), norm_or_not, None, Plan(2, 4, 2))
        check(product, x, [right(x, one, norm_or_not) for one in packed], None, (1, 8))


def test_two_matrices_share_an_entrance(workshop: EmulatedWorkshop) -> None:
    packed = weight("all widths, odd columns")
    tiles: list[Tiles] = [arrange(packed)] * 2
    x = torch.randn(16, packed.in_features).half()
    first, second = answer(Product(workshop, tiles, plan=Plan(4, 8, 2)), x)
    assert torch.equal(first, second)
    assert off(first, right(x, packed)) < LIMIT


def test_small_scales_are_lifted_inside_only(workshop: EmulatedWorkshop) -> None:
    """Numbers of float32 formats, as large as real ones: what is multiplied must not be lifted."""
    plain = weight("minimums", order=False)
    (one,) = plain.segments
    assert one.minimum is not None
    scales = (PlainScales(part.expand().float() * 2.0**-9) for part in (one.scales, one.minimum))
    made = replace(one, scales=next(scales), minimum=next(scales))
    packed = replace(plain, segments=(made,), dtype=torch.float32)
    tiles = arrange(packed)
    assert tiles.factor < 1.0
    (unpacked,) = Many([Unpacker(workshop, tiles)]).unpacked().T.split(tiles.out_features)
    assert torch.equal(unpacked, (expand(tiles).float() * tiles.factor).half())
    x = torch.randn(100, packed.in_features).half() * 50
    linear = PackedLinear(Planner(workshop), tiles, True)
    for rows in (1, 20, 100):
        assert off(linear(x[:rows]), right(x[:rows], packed)) < LIMIT


def test_a_gate_whose_inputs_are_ordered_otherwise(workshop: EmulatedWorkshop) -> None:
    """As converters write them: one order for both, but more inputs of the wider codes in one."""
    torch.manual_seed(4)
    widths = {"gate": [(5, [32] * 3), (4, [128] * 4)], "up": [(5, [32] * 7), (4, [128] * 3)]}
    gate, up = (
        matrix(tuple(segment(bits, sizes, 40, False, False) for bits, sizes in parts), 40)
        for parts in widths.values()
    )
    norm, x = normal(608), torch.randn(16, 608).half()
    product = Product(workshop, alike([arrange(gate), arrange(up)]), norm, "silu", Plan(2, 2, 3))
    assert product.form.apart
    check(product, x, [gated(x, gate, up, norm, "silu")], None, (1, 9))
