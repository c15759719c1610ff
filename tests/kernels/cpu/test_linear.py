"""Products with packed matrices: every weight bit for bit, sums near float32's, the same in any company.

Products use the weights before they are rounded to float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.errors import Unsupported
from exlm.formats.host_buffers import HugePageArena
from exlm.formats.packed import PackedWeight, PlainScales, Segment, pack
from exlm.kernels.cpu.bindings import Library
from exlm.kernels.cpu.ops import PackedEmbedding, PackedLinear
from exlm.kernels.cpu.repack import repack_panels
from exlm.kernels.interface import ActivationBits
from tests.kernels.cpu.random_weights import (
    IQ4_CODEBOOK,
    RECIPES,
    Recipe,
    effective_weight,
    random_weight,
    rounded_to_bytes,
    tolerance,
)

WIDE = Recipe(((5, (32,) * 9), (3, (128, 96))), 333, order=True, bias=True)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def linear(library: Library, weight: PackedWeight, threads: int = 1, bits: ActivationBits = 16) -> PackedLinear:
    torch.set_num_threads(threads)
    return PackedLinear(library, repack_panels(weight, library, HugePageArena(), bits))


DTYPES = st.sampled_from([torch.float16, torch.float32])
ACTIVATION_BITS: st.SearchStrategy[ActivationBits] = st.sampled_from([16, 8])


@settings(max_examples=60)
@given(
    recipe=RECIPES,
    dtype=DTYPES,
    rows=st.integers(1, 33),
    threads=st.integers(1, 4),
    seed=st.integers(0, 9999),
)
def test_any_matrix(library: Library, recipe: Recipe, dtype: torch.dtype, rows: int, threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = random_weight(recipe, dtype)
    x = torch.randn(rows, weight.in_features) * torch.randn(weight.in_features).exp()
    want = x.double() @ effective_weight(weight).double() + (0 if weight.bias is None else weight.bias)
    error = (linear(library, weight, threads)(x).double() - want).abs()
    assert bool((error <= tolerance(weight, x)).all())


@settings(max_examples=60)
@given(
    recipe=RECIPES,
    rows=st.integers(1, 33),
    threads=st.integers(1, 8),
    size=st.sampled_from([1.0, 1e-33, 1e30]),
    seed=st.integers(0, 9999),
)
def test_activations_of_8_bits_are_rounded_by_32(
    library: Library, recipe: Recipe, rows: int, threads: int, size: float, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = random_weight(replace(recipe, bias=False))
    x = torch.randn(rows, weight.in_features) * torch.randn(weight.in_features).exp() * size
    x[:, torch.rand(weight.in_features) < 0.1] = 0
    rounded, exact = rounded_to_bytes(weight, x), effective_weight(weight).double()
    error = (linear(library, weight, threads, bits=8)(x).double() - rounded @ exact).abs()
    assert bool((error <= 1e-6 * (rounded.abs() @ exact.abs()) + 1e-37).all())


@settings(max_examples=30)
@given(recipe=RECIPES, dtype=DTYPES, seed=st.integers(0, 9999))
def test_every_weight_is_exact(library: Library, recipe: Recipe, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    weight = random_weight(replace(recipe, bias=False), dtype)
    multiply, want = linear(library, weight), effective_weight(weight)
    assert torch.equal(multiply(torch.eye(weight.in_features)), want)
    one = torch.zeros(1, weight.in_features)
    one[0, -1] = 1
    assert torch.equal(multiply(one)[0], want[-1])


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_usual_matrix_is_right_to_some_digits(library: Library, bits: int, dtype: torch.dtype) -> None:
    weight = random_weight(Recipe(((bits, (32,) * 48),), 192), dtype)
    x = torch.randn(5, 1536)
    want = x.double() @ effective_weight(weight).double()
    got = linear(library, weight)(x)
    assert float((got - want).norm() / want.norm()) < 4e-5
    defined = x.double() @ weight.dequantize().double()
    assert float((got - defined).norm() / defined.norm()) < 5e-4  # 2e-4 of it is the rounding left out


def test_the_largest_sums_of_whole_numbers_fit(library: Library) -> None:
    """All codes and all x the largest: 300 inputs of one group, more than a span has room for."""
    codes = torch.full((300, 40), 255)
    segment = Segment(8, (300,), pack(codes, 8), PlainScales(torch.ones(1, 40)), 0)
    weight = PackedWeight("x", 300, 40, (segment,), torch.float32)
    for value in (32638.0, -32638.0):
        got = linear(library, weight)(torch.full((7, 300), value))
        torch.testing.assert_close(got, torch.full((7, 40), value * 76500), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e30])
def test_any_size_of_x(library: Library, size: float) -> None:
    weight = random_weight(Recipe(((4, (32,) * 4), (6, (16,) * 4)), 33, scales="nested", minima=True))
    x = torch.randn(3, 192) * size
    want = x.double() @ weight.dequantize().double()
    assert float((linear(library, weight)(x).double() - want).norm() / want.norm()) < 4e-5


@settings(max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([0.0, 1e-41, 1e-30, 1.0, 3e30]), min_size=4, max_size=11),
    rows=st.integers(1, 9),
    minima=st.booleans(),
    seed=st.integers(0, 9999),
)
def test_every_group_of_32_has_a_scale_of_its_own(
    library: Library, sizes: list[float], rows: int, minima: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = random_weight(Recipe(((4, (32,) * len(sizes)),), 50, minima=minima))
    multiply, exact = linear(library, weight), weight.dequantize().double()
    x = torch.randn(rows, len(sizes), 32) * torch.tensor(sizes)[:, None]
    for group in range(len(sizes)):
        alone = torch.zeros_like(x)
        alone[:, group] = x[:, group]
        want = alone.flatten(1).double() @ exact
        error = (multiply(alone.flatten(1)).double() - want).abs()
        bound = tolerance(weight, alone.flatten(1), absolute=0.0)
        assert bool((error <= bound.clamp_min(1e-35)).all())
    x[-1, len(sizes) // 2, 5] = float("nan")
    got = multiply(x.flatten(1))
    assert bool(got[-1].isnan().all())
    assert bool(got[:-1].isfinite().all())


@settings(max_examples=40)
@given(recipe=RECIPES, dtype=DTYPES, rows=st.integers(2, 33), seed=st.integers(0, 9999), bits=ACTIVATION_BITS)
def test_a_row_is_the_same_bits_alone_and_in_company(
    library: Library, recipe: Recipe, dtype: torch.dtype, rows: int, seed: int, bits: ActivationBits
) -> None:
    torch.manual_seed(seed)
    weight = random_weight(recipe, dtype)
    x = torch.randn(rows, weight.in_features)
    multiply = linear(library, weight, bits=bits)
    alone = torch.cat([multiply(row[None]) for row in x])
    assert torch.equal(multiply(x), alone)
    torch.set_num_threads(3)
    assert torch.equal(multiply(x), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_many_rows_are_the_same_bits_too(library: Library, dtype: torch.dtype) -> None:
    multiply = linear(library, random_weight(WIDE, dtype), 2)
    x = torch.randn(2000, 512)
    assert torch.equal(multiply(x)[[0, 777, 1999]], multiply(x[[0, 777, 1999]]))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("minima", [False, True])
def test_more_inputs_than_the_cache_has_room_for(library: Library, bits: ActivationBits, minima: bool) -> None:
    """Then several panels take a part of the inputs before the next part."""
    recipe = Recipe(((5, (32,) * 9), (4, (128,) * 72)), 323, minima=minima, bias=True)
    multiply = linear(library, random_weight(recipe), 2, bits)
    x = torch.randn(97, 9504)
    many, few = multiply(x), [0, 50, 96]
    assert torch.equal(many[few], multiply(x[few]))
    assert torch.equal(many[few], torch.cat([multiply(row[None]) for row in x[few]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_run_and_every_number_of_threads_gives_the_same(library: Library, dtype: torch.dtype) -> None:
    multiply, x = linear(library, random_weight(WIDE, dtype)), torch.randn(3, 512)
    first = multiply(x)
    for threads in (1, 2, 3, 4, 2, 1):
        torch.set_num_threads(threads)
        assert all(torch.equal(multiply(x), first) for _ in range(20))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_not_finite_stays_in_its_row(library: Library, dtype: torch.dtype, bits: ActivationBits) -> None:
    multiply, x = linear(library, random_weight(WIDE, dtype), bits=bits), torch.randn(4, 512)
    want = multiply(x)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    got = multiply(x)
    assert torch.equal(got[[0, 3]], want[[0, 3]])
    assert bool(got[1].isnan().all())
    assert not bool(got[2].isfinite().any())


def test_nothing_and_very_little(library: Library) -> None:
    multiply = linear(library, random_weight(Recipe(((4, (32, 32)),), 16)))
    assert not bool(multiply(torch.zeros(2, 64)).any())
    assert bool(multiply(torch.full((2, 64), 1e-38)).isfinite().all())
    assert multiply(torch.zeros(0, 64)).shape == (0, 16)


def test_any_leading_shape_and_stride(library: Library) -> None:
    multiply, x = linear(library, random_weight(WIDE)), torch.randn(512, 2, 3).permute(1, 2, 0)
    assert torch.equal(multiply(x), multiply(x.reshape(6, 512)).view(2, 3, 333))


@settings(max_examples=30)
@given(recipe=RECIPES, dtype=st.sampled_from([torch.float16, torch.float32]))
def test_single_columns_are_exact(library: Library, recipe: Recipe, dtype: torch.dtype) -> None:
    weight = random_weight(recipe, dtype)
    ids = torch.randint(0, recipe.columns, (2, 5))
    found = PackedEmbedding(library, repack_panels(weight, library, HugePageArena()), dtype)(ids)
    assert found.dtype is dtype
    assert torch.equal(found, weight.dequantize().T[ids])


@pytest.mark.parametrize("zeros", [False, True])
def test_codes_of_4_bits_may_stand_for_any_bytes(library: Library, zeros: bool) -> None:
    (old,) = random_weight(Recipe(((4, (32,)),), 16, zeros=zeros)).segments
    book = torch.arange(16) * 17.0 - (0 if zeros else 128)
    weight = PackedWeight("x", 32, 16, (replace(old, codebook=book),), torch.float32)
    assert torch.equal(linear(library, weight)(torch.eye(32)), weight.dequantize())
    for wrong in (torch.linspace(-1, 1, 16), torch.arange(16) * 20.0, torch.arange(16) * 16.0 - 129):
        weight = PackedWeight("x", 32, 16, (replace(old, zero=0, codebook=wrong),), torch.float32)
        with pytest.raises(Unsupported, match="whole ones of eight bits"):
            repack_panels(weight, library, HugePageArena())


def test_other_codes_may_not_stand_for_other_numbers(library: Library) -> None:
    (old,) = random_weight(Recipe(((4, (32,)),), 16)).segments
    book = IQ4_CODEBOOK
    weight = PackedWeight("x", 32, 16, (replace(old, zero=0, codebook=book),), torch.float32)
    assert torch.equal(linear(library, weight)(torch.eye(32)), weight.dequantize())
    (wide,) = random_weight(Recipe(((8, (32,)),), 16)).segments
    many = PackedWeight("x", 32, 16, (replace(wide, codebook=torch.linspace(-1, 1, 256)),), torch.float32)
    with pytest.raises(Unsupported, match="8 bits stand for other numbers"):
        repack_panels(many, library, HugePageArena())


def test_halves_at_the_edges(library: Library) -> None:
    """Subnormal, tied and too large: what rounding to float16 makes of them is part of the format."""
    codes = torch.arange(64).view(64, 1).expand(64, 8)
    scales = torch.tensor([[2.0**-24, 2.0**-25, 3 * 2.0**-27, 1.0, 2048.0, 1100.0, 1 + 2.0**-11, 65504.0]])
    segment = Segment(6, (64,), pack(codes, 6), PlainScales(scales), 32)
    weight = PackedWeight("x", 64, 8, (segment,), torch.float16)
    found = PackedEmbedding(library, repack_panels(weight, library, HugePageArena()), torch.float16)(
        torch.arange(8)[None]
    )[0]
    assert torch.equal(found, weight.dequantize().T)


def test_weights_of_another_precision_are_declined(library: Library) -> None:
    with pytest.raises(Unsupported, match="rounded to bfloat16"):
        repack_panels(random_weight(Recipe(((4, (32,)),), 16), torch.bfloat16), library, HugePageArena())
