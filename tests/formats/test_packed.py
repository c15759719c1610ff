"""PackedWeight: dequantize() equals the formula of its module, and taking parts takes parts of the matrix."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm.errors import InputError
from exlm.formats import Exl2Scales, KQuantScales, PackedWeight, PlainScales, Scales, Segment
from exlm.formats.packed import pack, unpack
from tests.formats.oracles import random_scales, round_to_float16


def random_scales_table(kind: str, groups: int, columns: int) -> Scales:
    """Scales of one of the three kinds."""
    if kind == "exl2":
        return Exl2Scales(torch.randint(0, 16, (groups, columns), dtype=torch.uint8), random_scales(groups))
    if kind == "k-quant":
        parents = torch.randint(0, 2, (groups,)).sort().values
        codes = torch.randint(-32, 32, (groups, columns), dtype=torch.int8)
        return KQuantScales(codes, random_scales(2, columns), parents)
    return PlainScales(random_scales(groups, columns))


@st.composite
def segments(draw: st.DrawFn, columns: int) -> Segment:
    """Any valid segment."""
    bits = draw(st.integers(2, 8))
    sizes = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    groups = len(sizes)
    zero: int | Tensor = draw(st.integers(0, 256))
    if draw(st.booleans()):
        zero = torch.randint(0, 256, (groups, columns), dtype=torch.uint8)
    kinds = st.sampled_from(["exl2", "k-quant", "plain"])
    return Segment(
        bits=bits,
        group_sizes=sizes,
        codes=pack(torch.randint(0, 1 << bits, (sum(sizes), columns)), bits),
        scales=random_scales_table(draw(kinds), groups, columns),
        zero=zero,
        minimum=random_scales_table(draw(kinds), groups, columns) if draw(st.booleans()) else None,
        codebook=torch.randn(1 << bits) if draw(st.booleans()) else None,
    )


@st.composite
def weights(draw: st.DrawFn) -> PackedWeight:
    """Any valid weight, in float16 or float32."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    columns = draw(st.integers(1, 9))
    parts = tuple(draw(st.lists(segments(columns), min_size=1, max_size=3)))
    rows = sum(part.in_features for part in parts)
    return PackedWeight(
        format_name="any",
        in_features=rows,
        out_features=columns,
        segments=parts,
        dtype=draw(st.sampled_from([torch.float16, torch.float32])),
        perm=torch.randperm(rows).to(torch.int32) if draw(st.booleans()) else None,
        bias=torch.randn(columns) if draw(st.booleans()) else None,
    )


def dequantize_by_formula(weight: PackedWeight) -> Tensor:
    """The formula in the docstring of packed.py, one number at a time in float32."""
    order = range(weight.in_features) if weight.perm is None else weight.perm.tolist()
    out = torch.zeros(weight.in_features, weight.out_features, dtype=weight.dtype)
    stored = 0
    for part in weight.segments:
        codes = unpack(part.codes, part.bits, part.in_features)
        scales, row = part.scales.expand().float(), 0
        minimum = None if part.minimum is None else part.minimum.expand().float()
        for g, size in enumerate(part.group_sizes):
            for _ in range(size):
                for n in range(weight.out_features):
                    code = codes[row, n]
                    plain = code.float() if part.codebook is None else part.codebook[int(code)]
                    zero = part.zero[g, n] if isinstance(part.zero, Tensor) else torch.tensor(part.zero)
                    value = (plain - zero.float()) * scales[g, n]
                    out[order[stored], n] = value if minimum is None else value - minimum[g, n]
                row, stored = row + 1, stored + 1
    return out


@given(weights())
def test_dequantize_equals_the_formula(weight: PackedWeight) -> None:
    found = weight.dequantize()
    assert found.dtype is weight.dtype
    assert torch.equal(found, dequantize_by_formula(weight))


@given(weights(), st.data())
def test_take_columns_equals_columns_of_the_matrix(weight: PackedWeight, data: st.DataObject) -> None:
    column_lists = st.lists(st.integers(0, weight.out_features - 1), min_size=1, max_size=12)
    index = torch.tensor(data.draw(column_lists))
    piece = weight.take_columns(index)
    assert torch.equal(piece.dequantize(), weight.dequantize()[:, index])
    assert (piece.bias is None) == (weight.bias is None)
    if weight.bias is not None and piece.bias is not None:
        assert torch.equal(piece.bias, weight.bias[index])


@given(weights(), st.integers(0, 1), st.data())
def test_split_pieces_concatenate_to_the_matrix(weight: PackedWeight, dim: int, data: st.DataObject) -> None:
    whole = weight.dequantize()
    length = whole.shape[dim]
    cuts = data.draw(st.sets(st.integers(1, length - 1), max_size=3) if length > 1 else st.just(set()))
    edges = [0, *sorted(cuts), length]
    ranges = list(pairwise(edges))
    pieces = weight.split(dim, ranges)
    assert torch.equal(torch.cat([piece.dequantize() for piece in pieces], dim), whole)
    if weight.bias is None:
        assert all(piece.bias is None for piece in pieces)
    elif dim == 0:
        assert pieces[0].bias is weight.bias
        assert all(piece.bias is None for piece in pieces[1:])
    else:
        assert torch.equal(torch.cat([piece.bias for piece in pieces if piece.bias is not None]), weight.bias)


@given(weights())
def test_a_mapped_weight_is_equal(weight: PackedWeight) -> None:
    moved = weight.to(torch.device("cpu")).map(torch.clone)
    assert torch.equal(moved.dequantize(), weight.dequantize())
    assert moved.nbytes == weight.nbytes == sum(tensor.nbytes for tensor in weight.tensors)


@given(codes=st.lists(st.integers(0, 15), min_size=1, max_size=20), largest=st.floats(0, 65504, width=16))
def test_exl2_scales_round_twice(codes: list[int], largest: float) -> None:
    table = Exl2Scales(torch.tensor([codes], dtype=torch.uint8), torch.tensor([largest], dtype=torch.float16))
    assert table.expand()[0].tolist() == [
        round_to_float16((code + 1) ** 2 * round_to_float16(largest / 256)) for code in codes
    ]


def plain_segment(sizes: tuple[int, ...] = (8, 8), bits: int = 4) -> Segment:
    """A valid segment of three columns to spoil."""
    rows = sum(sizes)
    return Segment(
        bits,
        sizes,
        pack(torch.zeros(rows, 3, dtype=torch.uint8), bits),
        PlainScales(torch.ones(len(sizes), 3)),
    )


def test_bits_per_weight() -> None:
    weight = PackedWeight("gptq", 16, 3, (plain_segment(),), torch.float16, bias=torch.ones(3))
    assert weight.bits == 8 * (2 * 3 * 4 + 2 * 3 * 4) / 48
    assert weight.describe() == "gptq 8.00 bit"


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 9},
        {"bits": 1},
        {"bits": 8},
        {"group_sizes": ()},
        {"group_sizes": (16, 0)},
        {"group_sizes": (8, 9)},
        {"group_sizes": (16,)},
        {"scales": PlainScales(torch.ones(3, 3))},
    ],
)
def test_a_segment_refuses_parts_that_do_not_fit(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        replace(plain_segment(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(17, 3), (16, 4)])
def test_a_weight_refuses_segments_that_do_not_fit(shape: tuple[int, int]) -> None:
    with pytest.raises(InputError):
        PackedWeight("gptq", *shape, (plain_segment(),), torch.float16)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("piece", [(0, 0), (2, 1), (-1, 2), (2, 17)])
def test_split_refuses_ranges_outside_the_matrix(dim: int, piece: tuple[int, int]) -> None:
    weight = PackedWeight("gptq", 16, 3, (plain_segment(),), torch.float16)
    with pytest.raises(InputError, match="no part of"):
        weight.split(dim, [piece])
