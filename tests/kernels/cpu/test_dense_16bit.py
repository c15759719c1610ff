"""Dense matrices in sixteen bits: the same numbers, or left to plain torch; products near float32's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm.errors import Unsupported
from exlm.formats import DenseWeight
from exlm.formats.host_buffers import HugePageArena
from exlm.kernels.cpu import CpuBackend
from exlm.kernels.cpu.bindings import Library
from exlm.kernels.cpu.repack import cast_to_16bit

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float16, torch.bfloat16])


@settings(max_examples=30)
@given(
    dtype=DTYPES,
    shape=st.tuples(st.integers(1, 12).map(lambda n: 8 * n), st.integers(1, 60).map(lambda n: 16 * n)),
    rows=st.integers(1, 33),
    bias=st.booleans(),
    threads=st.integers(1, 4),
)
def test_products(
    backend: CpuBackend, dtype: torch.dtype, shape: tuple[int, int], rows: int, bias: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    data, x = torch.randn(shape).to(dtype).float(), torch.randn(rows, shape[1])
    more = torch.randn(shape[0]) if bias else None
    multiply = backend.linear(DenseWeight(data, more))
    want = F.linear(x.double(), data.double(), None if more is None else more.double())
    error = (multiply(x).double() - want).abs()
    assert bool((error <= 1e-6 * (x.double().abs() @ data.double().abs().T) + 1e-6).all())
    assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))


@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=128), dtype=DTYPES)
def test_numbers_stay_the_same_or_are_left_alone(library: Library, numbers: list[float], dtype: torch.dtype) -> None:
    for data in (torch.tensor(numbers), torch.tensor(numbers).to(dtype).float()):
        whole = data.repeat(128)[:128].view(8, 16)
        fits = any(torch.equal(whole, whole.to(kind).float()) for kind in (torch.float16, torch.bfloat16))
        if bool(whole.isnan().any()):  # equal to nothing; refused or kept, both are right
            continue
        if fits:
            assert torch.equal(cast_to_16bit(whole, library, HugePageArena()).float(), whole)
        else:
            with pytest.raises(Unsupported, match="more than sixteen bits"):
                cast_to_16bit(whole, library, HugePageArena())


def test_many_numbers_and_the_last_one_does_not_fit(library: Library) -> None:
    torch.set_num_threads(3)
    data = torch.randn(4096, 64).half().float()
    assert cast_to_16bit(data, library, HugePageArena()).dtype is torch.float16
    data[-1, -1] = 1 / 3
    with pytest.raises(Unsupported):
        cast_to_16bit(data, library, HugePageArena())


def test_a_table_is_also_the_head(backend: CpuBackend) -> None:
    weight, ids = DenseWeight(torch.randn(64, 32).half().float()), torch.tensor([[3, 63]])
    assert torch.equal(backend.embedding(weight)(ids).float(), weight.data[ids])
    held = backend._embeddings[weight]
    x = torch.randn(2, 1, 32)
    torch.testing.assert_close(backend.linear(weight)(x), F.linear(x, weight.data), rtol=1e-5, atol=1e-5)
    assert backend._embeddings[weight] is held


@pytest.mark.parametrize("outputs", [1, 4, 12])
def test_outputs_are_padded_to_whole_tiles(backend: CpuBackend, outputs: int) -> None:
    weight = DenseWeight(torch.randn(outputs, 32).half().float(), torch.randn(outputs))
    x, linear = torch.randn(1, 9, 32), backend.linear(weight)
    y = linear(x)
    torch.testing.assert_close(y, F.linear(x, weight.data, weight.bias), rtol=1e-5, atol=1e-5)
    assert torch.equal(y, torch.cat([linear(x[:, i : i + 1]) for i in range(9)], 1))


def test_what_is_left_to_plain_torch(backend: CpuBackend) -> None:
    with pytest.raises(Unsupported, match="tiles of 8 by 16"):
        backend.linear(DenseWeight(torch.zeros(16, 24)))
    with pytest.raises(Unsupported, match="those of a head"):
        backend.embedding(DenseWeight(torch.zeros(16, 16, dtype=torch.float16)))
