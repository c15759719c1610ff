"""Packed matrices in full, on a processor: every number where it belongs, and nothing anywhere else."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.formats.packed import PackedWeight
from exlm.kernels import interface as backend
from exlm.kernels.cuda.backend import CudaFusedLinear, CudaLinear, GemmDispatch
from exlm.kernels.cuda.dequantize import DequantGemm, Dequantizer, dequant_gemms
from exlm.kernels.cuda.tuning import TuneCache
from exlm.kernels.cuda.weight_tile import unify_groups
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.oracle import LIMIT, off, product
from tests.kernels.cuda.random_weights import KINDS, matrix, segment, weight
from tests.kernels.cuda.repack_oracle import repack


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModuleCache:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedModuleCache(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(modules: EmulatedModuleCache, kind: str, order: bool) -> None:
    packed = weight(kind, order=order)
    got = DequantGemm([Dequantizer(modules, repack(packed))]).dequantize()
    assert got.shape == (packed.in_features, -(-packed.out_features // 16) * 16)
    assert got[:, : packed.out_features].equal(packed.dequantize())


@st.composite
def odd(draw: st.DrawFn) -> PackedWeight:
    """A matrix of any width, perhaps with some wider and narrower codes, and a last group cut short."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    bits, outputs = draw(st.sampled_from([2, 3, 4, 5, 6, 8])), draw(st.integers(1, 150))
    zeros, minima = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    size = draw(st.sampled_from([16, 32, 64, 128]))
    sizes = [size] * draw(st.integers(1, 384 // size))
    if size > 16 and draw(st.booleans()):
        sizes.append(draw(st.integers(1, size // 16 - 1)) * 16)
    parts = [(bits, sizes)]
    if not minima:
        parts += [(other, [16] * draw(st.integers(1, 2))) for other in draw(st.permutations([3, 5, 6]))[:2]]
    segments = tuple(segment(width, each, outputs, zeros, minima) for width, each in parts)
    return matrix(segments, outputs, draw(st.booleans()))


@settings(max_examples=20)
@given(packed=odd(), block_tiles=st.sampled_from([4, 8]), before=st.integers(0, 3))
def test_odd_shapes_between_other_columns(
    modules: EmulatedModuleCache, packed: PackedWeight, block_tiles: int, before: int
) -> None:
    dequantizer = Dequantizer(modules, repack(packed), block_tiles)
    widths = [before * 16, dequantizer.columns, 16]
    whole = torch.full((packed.in_features, sum(widths)), float("nan")).half()
    left, mine, right = whole.split_with_sizes(widths, 1)
    dequantizer.fill(mine)
    assert mine[:, : packed.out_features].equal(packed.dequantize())
    assert left.isnan().all()
    assert right.isnan().all()


def test_side_by_side(modules: EmulatedModuleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds, orders, widths and biases of their own; with too little room each by itself, and the same."""
    kinds = {"4 bits": True, "6 and 4 bits": False, "4 bits in small groups": True}
    packed = [weight(kind, bias=bias, order=kind != "4 bits") for kind, bias in kinds.items()]
    dequantizers = [Dequantizer(modules, repack(one)) for one in packed]
    x = torch.randn(70, 512).half()
    for room, count in ((backend.MAX_DEQUANT_BYTES, 1), (512 * 192, 3)):
        monkeypatch.setattr(backend, "MAX_DEQUANT_BYTES", room)
        products = dequant_gemms(dequantizers)
        assert len(products) == count
        answers = [y for one in products for y in one(x)]
        for got, one in zip(answers, packed, strict=True):
            assert got.shape == (70, one.out_features)
            assert off(got, product(x, one)) < LIMIT


def test_rows_may_lie_apart(modules: EmulatedModuleCache) -> None:
    """The last tokens of some rows, by themselves or through matrices side by side; few of them and many."""
    tuned = TuneCache(modules)
    packed = [weight(kind) for kind in ("short last group", "4 bits in small groups")]
    linear, other = (CudaLinear(tuned, repack(one), False) for one in packed)
    every = torch.randn(70, 2, 512).half()
    for rows in (3, 70):
        x = every[:rows, 1:, : packed[0].in_features]
        assert off(linear(x), product(x, packed[0])) < LIMIT
    pair = CudaFusedLinear(GemmDispatch(tuned.gemm(unify_groups([other.weight] * 2)), False), [other, other])
    for rows, answers in ((3, pair(every[:3, 1:], None)), (70, pair.unfused(every[:, 1:]))):
        for got in answers:
            assert off(got, product(every[:rows, 1:], packed[1])) < LIMIT
