"""Dense matrices in twelve bits: the very numbers, or left to sixteen bits; products near float32's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm.errors import Unsupported
from exlm.formats import DenseWeight
from exlm.formats.host_buffers import HugePageArena
from exlm.kernels.cpu import CpuBackend
from exlm.kernels.cpu.bindings import Library
from exlm.kernels.cpu.ops import PackedEmbedding, PackedLinear
from exlm.kernels.cpu.repack import NUMBERS_PER_OUTLIER, pack_bf12

SHAPES = st.tuples(st.integers(1, 12).map(lambda n: 8 * n), st.integers(1, 30).map(lambda n: 64 * n))


def brains(*shape: int) -> Tensor:
    """Numbers that bfloat16 has, outputs of very different sizes."""
    sizes = torch.exp2(torch.randint(-30, 30, (shape[0], 1)).float())
    return (torch.randn(shape) * sizes).bfloat16().float()


def sprinkled(data: Tensor, many: int) -> Tensor:
    """The same with some zeros and some far smaller numbers, as many as codes can leave out."""
    places = torch.randperm(data.numel())[: min(many, data.numel() // (2 * NUMBERS_PER_OUTLIER))]
    data.view(-1)[places] *= torch.tensor([0.0, 2.0**-20, -(2.0**-40)])[torch.arange(len(places)) % 3]
    return data


@settings(max_examples=40)
@given(
    shape=SHAPES,
    rows=st.integers(1, 33),
    bias=st.booleans(),
    threads=st.integers(1, 4),
    small=st.integers(0, 40),
)
def test_products(library: Library, shape: tuple[int, int], rows: int, bias: bool, threads: int, small: int) -> None:
    torch.set_num_threads(threads)
    data, x = sprinkled(brains(*shape), small), torch.randn(rows, shape[1])
    more = torch.randn(shape[0]) if bias else None
    multiply = PackedLinear(library, pack_bf12(data, more, library, HugePageArena()))
    want = F.linear(x.double(), data.double(), None if more is None else more.double())
    error = (multiply(x).double() - want).abs()
    assert bool((error <= 1e-6 * (x.double().abs() @ data.double().abs().T) + 1e-6).all())
    assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))


@settings(max_examples=40)
@given(shape=SHAPES, small=st.integers(0, 40), threads=st.integers(1, 4))
def test_columns_are_the_very_numbers(library: Library, shape: tuple[int, int], small: int, threads: int) -> None:
    torch.set_num_threads(threads)
    data = sprinkled(brains(*shape), small)
    data[0] = 0
    blocks = pack_bf12(data, None, library, HugePageArena())
    ids = torch.randperm(shape[0])[None]
    assert torch.equal(PackedEmbedding(library, blocks, torch.float32)(ids)[0], data[ids[0]])
    assert blocks.nbytes < data.numel() * 1.6 + 8 * (shape[0] + 1)


def test_sums_of_few_rows_are_those_of_sixteen_bits(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two change no rounding: where nothing is listed, the answers are the same bits."""
    weight, x = DenseWeight((torch.rand(64, 576) + 1).bfloat16().float()), torch.randn(9, 576)
    answers = []
    for lean in (True, False):
        monkeypatch.setattr(backend._library, "prefers_bf12", lean)
        answers.append(backend.linear(weight)(x))
    assert torch.equal(*answers)


def test_what_is_refused(library: Library) -> None:
    torch.set_num_threads(2)
    for data, why in (
        (torch.zeros(12, 64), "tiles of 8 by 64"),
        (torch.zeros(16, 96), "tiles of 8 by 64"),
        (torch.zeros(16, 64).half(), "tiles of 8 by 64"),
        (torch.full((8, 64), 1 / 3), "eight significant bits"),
        (torch.full((8, 64), torch.inf), "eight significant bits"),
        (torch.full((8, 64), torch.nan), "eight significant bits"),
        (torch.full((8, 64), 2.0**60), "eight significant bits"),
        (torch.full((8, 64), 2.0**-140), "eight significant bits"),
        (torch.cat((torch.full((64, 1), 2.0**20), torch.ones(64, 63)), 1), "far smaller"),
    ):
        with pytest.raises(Unsupported, match=why):
            pack_bf12(data, None, library, HugePageArena())


def test_the_last_number_of_many_does_not_fit(library: Library) -> None:
    torch.set_num_threads(3)
    data = torch.randn(4096, 64).bfloat16().float()
    pack_bf12(data, None, library, HugePageArena())
    data[-1, -1] = 1 / 3
    with pytest.raises(Unsupported):
        pack_bf12(data, None, library, HugePageArena())


def test_a_table_is_also_the_head(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend._library, "prefers_bf12", True)
    weight, ids = DenseWeight(brains(64, 128)), torch.tensor([[3, 63]])
    assert torch.equal(backend.embedding(weight)(ids), weight.data[ids])
    assert backend._embeddings[weight].struct.bf12
    x = torch.randn(2, 1, 128)
    want = F.linear(x, weight.data)
    assert bool(((backend.linear(weight)(x) - want).abs() <= 1e-5 * want.abs().amax((0, 1))).all())
