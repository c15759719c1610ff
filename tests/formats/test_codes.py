"""The bit stream, against a huge integer and against vectors from real files."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import InputError
from exlm.formats.packed import num_words, pack, pack_rows, unpack, unpack_rows
from tests.formats.oracles import random_words, read_bit_stream

VECTORS = [
    (2, [i % 4 for i in range(16)], "e4e4e4e4"),
    (3, [i % 8 for i in range(32)], "88fac688 c688fac6 fac688fa"),
    (4, list(range(8)), "76543210"),
    (5, list(range(32)), "8a418820 c5a92839 ca307b9a 38bdab49 ffbbcdeb"),
    (6, [4 * i + 1 for i in range(16)], "51349141 99617595 f79d71b6"),
    (8, [0, 10, 20, 30], "1e140a00"),
]


@pytest.mark.parametrize(("bits", "values", "hexes"), VECTORS)
def test_published_vectors(bits: int, values: list[int], hexes: str) -> None:
    words = pack(torch.tensor(values)[:, None], bits)
    assert [f"{word & 0xFFFFFFFF:08x}" for word in words[:, 0].tolist()] == hexes.split()
    assert unpack(words, bits, len(values))[:, 0].tolist() == values


@given(
    bits=st.integers(2, 8),
    rows=st.integers(0, 140),
    columns=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_unpack_reads_the_stream_and_pack_restores_it(bits: int, rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    words = random_words(num_words(rows, bits), columns)
    values = unpack(words, bits, rows)
    assert values.dtype is torch.uint8
    assert values.shape == (rows, columns)
    for n in range(columns):
        assert values[:, n].tolist() == read_bit_stream(words[:, n].tolist(), bits, rows)
    again = pack(values, bits)
    assert again.dtype is torch.int32
    left = -rows * bits % 32  # the last word's unused bits, which pack leaves empty
    if rows and left:
        words[-1] &= (1 << (32 - left)) - 1
    assert torch.equal(again, words)


@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 4),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**32),
)
def test_pack_rows_and_unpack_rows(bits: int, rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    values = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    words = pack_rows(values, bits)
    assert words.shape == (rows, num_words(columns, bits))
    assert [read_bit_stream(line, bits, columns) for line in words.tolist()] == values.tolist()
    assert torch.equal(unpack_rows(words, bits, columns), values)
    assert words.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_pack_accepts_any_integer_dtype(dtype: torch.dtype) -> None:
    values = torch.arange(32)[:, None]
    assert torch.equal(pack(values.to(dtype), 5), pack(values, 5))


@pytest.mark.parametrize("value", [8, 255, -1])
def test_pack_refuses_what_does_not_fit(value: int) -> None:
    with pytest.raises(InputError, match=f"{value} does not fit 3 bits"):
        pack(torch.tensor([[0], [value]]), 3)


@pytest.mark.parametrize(
    "words", [torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32), random_words(4, 2)]
)
def test_unpack_refuses_a_wrong_number_of_words(words: torch.Tensor) -> None:
    with pytest.raises(InputError, match="24 values of 4 bits need"):
        unpack(words, 4, 24)
