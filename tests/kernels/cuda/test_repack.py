"""Repacking loses nothing: dequantised tiles are what the format defines, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.errors import Unsupported
from exlm.formats.packed import PackedWeight, PlainScales
from exlm.kernels.cuda.weight_tile import BIT_PLANES, TILE_K, MmaWeight, num_digits, slot_inputs, unify_groups
from tests.kernels.cuda.random_weights import KINDS, segment, weight
from tests.kernels.cuda.repack_oracle import expand, repack


def numbers(tiles: MmaWeight) -> torch.Tensor:
    """(inputs, outputs) in the order of the inputs."""
    stored = expand(tiles).T
    if tiles.perm is None:
        return stored[: tiles.in_features]
    out = torch.full((tiles.in_features, tiles.out_features), float("nan"), dtype=torch.float16)
    there = tiles.perm >= 0
    out[tiles.perm[there].long()] = stored[there]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [True, False])
def test_numbers_stay_what_they_are(kind: str, order: bool) -> None:
    packed = weight(kind, order=order)
    tiles = repack(packed)
    assert numbers(tiles).view(torch.int16).equal(packed.dequantize().view(torch.int16))


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
    assert tiles.k_blocks * TILE_K >= inputs
    assert len(slot_inputs(tiles)) == tiles.k_tiles * TILE_K
    codes = sum(one.in_features * num_digits(one.bits, tiles.layout.bits, not zeros and not minima) for one in segments)
    assert codes <= tiles.k_tiles * TILE_K < codes + len(tiles.spans) * TILE_K * max(s.num_digits for s in tiles.spans)


def test_several_share_the_finest_layout() -> None:
    kinds = [weight(kind) for kind in ("4 bits", "4 bits in small groups", "6 and 4 bits")]
    unified = unify_groups([repack(one) for one in kinds])
    assert {(one.layout.bits, one.layout.group_ksteps, one.layout.fine_ksteps) for one in unified} == {(4, 2, 2)}
    for tiles, one in zip(unified, kinds, strict=True):
        assert numbers(tiles).equal(one.dequantize())
        assert tiles.main.tiles.shape[2] == tiles.layout.tile_bytes(False)
        assert tiles.fine.tiles.shape[2] == tiles.layout.tile_bytes(True) or not tiles.fine.spans


def test_zero_points_of_two_sorts_stay_apart() -> None:
    with pytest.raises(Unsupported, match="zero points"):
        unify_groups([repack(weight("4 bits")), repack(weight("zero points"))])


def test_few_codes_of_another_width_keep_their_groups() -> None:
    packed = weight("6 and 4 bits")
    tiles = repack(packed)
    assert (tiles.layout.bits, tiles.layout.group_ksteps, tiles.layout.fine_ksteps) == (4, 8, 2)
    assert [(span.num_digits, span.k_blocks) for span in tiles.spans] == [(2, 1), (1, 3)]
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
        assert num_digits(bits, width, signed) == count


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
