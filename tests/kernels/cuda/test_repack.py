"""Rearranging loses nothing: what the kernels would unpack is what the format says, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.errors import Unsupported
from exlm.formats.packed import PackedWeight, PlainScales
from exlm.kernels.cuda import filling
from exlm.kernels.cuda.lanes import BIT_PLANES, TILE_K
from exlm.kernels.cuda.layout import digits
from exlm.kernels.cuda.repack import MmaWeight, expand, repack, tile_perm, unify_groups
from tests.kernels.cuda.random_weights import KINDS, segment, weight


def numbers(tiles: MmaWeight) -> torch.Tensor:
    """(inputs, outputs) in the order of the inputs."""
    stored = expand(tiles).T
    if tiles.source is None:
        return stored[: tiles.in_features]
    out = torch.full((tiles.in_features, tiles.out_features), float("nan"), dtype=torch.float16)
    there = tiles.source >= 0
    out[tiles.source[there].long()] = stored[there]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [True, False])
def test_numbers_stay_what_they_are(kind: str, order: bool) -> None:
    packed = weight(kind, order=order)
    tiles = repack(packed)
    assert numbers(tiles).view(torch.int16).equal(packed.dequantize().view(torch.int16))


@pytest.mark.parametrize("kind", KINDS)
def test_in_pieces_or_as_a_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = weight(kind)
    read_source = repack(packed)
    monkeypatch.setattr(filling, "MOST", 1)
    pieces = repack(packed)
    for one, other in ((read_source.main, pieces.main), (read_source.fine, pieces.fine)):
        assert one.bricks.equal(other.bricks)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(BIT_PLANES)), st.integers(1, 5)), min_size=1, max_size=4),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(1, 50),
    st.booleans(),
    st.booleans(),
)
def test_any_mixture(parts: list[tuple[int, int]], group: int, outputs: int, zeros: bool, minima: bool) -> None:
    segments = tuple(segment(bits, [group] * count, outputs, zeros, minima) for bits, count in parts)
    inputs = sum(one.in_features for one in segments)
    packed = PackedWeight("any", inputs, outputs, segments, torch.float16, torch.randperm(inputs).int())
    tiles = repack(packed)
    assert numbers(tiles).equal(packed.dequantize())
    assert tiles.blocks * TILE_K >= inputs
    assert len(tile_perm(tiles)) == tiles.stored * TILE_K
    codes = sum(one.in_features * digits(one.bits, tiles.layout.bits, not zeros and not minima) for one in segments)
    assert codes <= tiles.stored * TILE_K < codes + len(tiles.shares) * TILE_K * max(s.digits for s in tiles.shares)


def test_several_share_the_finest_layout() -> None:
    kinds = [weight(kind) for kind in ("4 bits", "4 bits in small groups", "6 and 4 bits")]
    dequant_gemms = unify_groups([repack(one) for one in kinds])
    assert {(one.layout.bits, one.layout.steps, one.layout.fine) for one in dequant_gemms} == {(4, 2, 2)}
    for tiles, one in zip(dequant_gemms, kinds, strict=True):
        assert numbers(tiles).equal(one.dequantize())
        assert tiles.main.bricks.shape[2] == tiles.layout.brick(False)
        assert tiles.fine.bricks.shape[2] == tiles.layout.brick(True) or not tiles.fine.shares


def test_zero_points_of_two_sorts_stay_apart() -> None:
    with pytest.raises(Unsupported, match="zero points"):
        unify_groups([repack(weight("4 bits")), repack(weight("zero points"))])


def test_few_codes_of_another_width_keep_their_groups() -> None:
    packed = weight("6 and 4 bits")
    tiles = repack(packed)
    assert (tiles.layout.bits, tiles.layout.steps, tiles.layout.fine) == (4, 8, 2)
    assert [(share.digits, share.blocks) for share in tiles.shares] == [(2, 1), (1, 3)]
    assert numbers(tiles).equal(packed.dequantize())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", sorted(BIT_PLANES))
def test_digits_are_enough_and_no_more(width: int, signed: bool) -> None:
    """All numbers of so many digits, by counting them up."""
    low = -(1 << (width - 1)) if signed else 0
    reach = range(low, low + (1 << width))
    for bits in BIT_PLANES:
        first = -(1 << (bits - 1)) if signed else 0
        wanted = set(range(first, first + (1 << bits)))
        numbers, count = set(reach), 1
        while not wanted <= numbers:
            numbers = {digit + (rest << width) for digit in reach for rest in numbers}
            count += 1
        assert digits(bits, width, signed) == count


def test_small_scales_are_lifted_by_a_power_of_two() -> None:
    tiny = weight("minimums", order=False)
    shrunk = tuple(
        replace(
            one,
            scales=PlainScales(one.scales.expand().float() * 2.0**-20),
            minimum=PlainScales(one.minimum.expand().float() * 2.0**-20) if one.minimum is not None else None,
        )
        for one in tiny.segments
    )
    packed = replace(tiny, segments=shrunk, dtype=torch.float32)
    tiles = repack(packed)
    assert tiles.factor < 1.0
    assert torch.tensor(tiles.factor).log2() % 1 == 0
    exact = packed.dequantize()
    error = (numbers(tiles).float() * tiles.factor - exact).norm() / exact.norm()
    assert error < 5e-4


def test_what_the_kernels_do_not_know_is_declined() -> None:
    odd = segment(4, [24, 24], 16, False, False)
    with pytest.raises(Unsupported, match="groups of"):
        repack(PackedWeight("odd", 48, 16, (odd,), torch.float16))
    book = replace(segment(4, [32], 16, False, False), codebook=torch.arange(16).float())
    with pytest.raises(Unsupported, match="codebooks"):
        repack(PackedWeight("book", 32, 16, (book,), torch.float16))
    seven = segment(7, [32], 16, False, False)
    with pytest.raises(Unsupported, match="7 bits"):
        repack(PackedWeight("seven", 32, 16, (seven,), torch.float16))
