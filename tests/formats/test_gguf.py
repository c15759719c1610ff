"""GGUF's block types: bit for bit as the gguf package dequantises them, and as small as in the file."""

from __future__ import annotations

import logging
import sys

import gguf
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm.errors import BadTensor, MissingExtra
from exlm.formats import DenseWeight, PackedWeight
from exlm.formats import gguf as module
from exlm.formats.gguf import BLOCK_LAYOUTS, GGUF_TYPES, pack_last_dim, read

FLOAT16_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Where each block keeps its float16 numbers: random bytes there may be infinite."""


def random_blocks(kind: str, outputs: int, blocks: int, seed: int = 0) -> Tensor:
    """Random bytes with finite numbers where a block has some, and a few subnormal ones."""
    generator = torch.Generator().manual_seed(seed)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = torch.randint(0, 256, (outputs, blocks, size), dtype=torch.uint8, generator=generator)
    for at in FLOAT16_OFFSETS.get(kind, ()):
        sizes = torch.tensor([1e-6, 0.01, 1.0, 8.0])[torch.randint(4, (outputs, blocks, 1), generator=generator)]
        numbers = torch.randn(outputs, blocks, 1, generator=generator) * sizes
        raw[..., at : at + 2] = numbers.half().view(torch.uint8)
    return raw.flatten(1)


def oracle(raw: Tensor, kind: str) -> Tensor:
    """(inputs, outputs) float32 as the gguf package has it."""
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), GGMLQuantizationType[kind])).T


def test_block_sizes_equal_those_of_the_gguf_package() -> None:
    expected = {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {number: tuple(kind) for number, kind in GGUF_TYPES.items()} == expected
    for name, layout in BLOCK_LAYOUTS.items():
        assert (layout.block_size, layout.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
@given(outputs=st.integers(1, 40), blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_dequantized_weights_equal_the_gguf_package(kind: str, outputs: int, blocks: int, seed: int) -> None:
    raw = random_blocks(kind, outputs, blocks, seed)
    weight = read(raw, kind, blocks * BLOCK_LAYOUTS[kind].block_size, outputs, "here")
    assert isinstance(weight, PackedWeight)
    assert torch.equal(weight.dequantize(), oracle(raw, kind))


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_repacking_in_chunks_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(kind, 37, 2)
    monkeypatch.setattr(module, "REPACK_CHUNK", 5 * 2 * BLOCK_LAYOUTS[kind].block_size)
    weight = read(raw, kind, 2 * BLOCK_LAYOUTS[kind].block_size, 37, "here")
    assert torch.equal(weight.dequantize(), oracle(raw, kind))


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_packed_weights_are_as_small_as_in_the_file(kind: str) -> None:
    inputs = 1024
    raw = random_blocks(kind, 512, inputs // BLOCK_LAYOUTS[kind].block_size)
    weight = read(raw, kind, inputs, 512, "here")
    assert weight.nbytes <= 1.2 * raw.nbytes, weight.nbytes / raw.nbytes
    assert weight.describe().startswith(f"gguf {kind} ")


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_columns_can_be_taken_and_reordered(kind: str) -> None:
    block = BLOCK_LAYOUTS[kind].block_size
    raw = random_blocks(kind, 12, 3)
    weight = read(raw, kind, 3 * block, 12, "here")
    assert isinstance(weight, PackedWeight)
    expected = oracle(raw, kind)
    order = torch.randperm(12)
    assert torch.equal(weight.take_columns(order).dequantize(), expected[:, order])
    left, right = weight.split(0, [(0, block), (block, 3 * block)])
    assert torch.equal(left.dequantize(), expected[:block])
    assert torch.equal(right.dequantize(), expected[block:])


def test_shares_no_memory_with_the_file() -> None:
    raw = random_blocks("Q6_K", 4, 1)
    weight = read(raw, "Q6_K", 256, 4, "here")
    before = weight.dequantize()
    raw.zero_()
    assert torch.equal(weight.dequantize(), before)


@given(bits=st.integers(2, 8), columns=st.integers(1, 4), turns=st.integers(1, 4), data=st.data())
def test_pack_last_dim_equals_bits_pack(bits: int, columns: int, turns: int, data: st.DataObject) -> None:
    from exlm.formats.packed import pack

    seed = data.draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (columns, 32 * turns), dtype=torch.uint8, generator=generator)
    assert torch.equal(pack_last_dim(codes, bits).T, pack(codes.T, bits))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_floats_stay_floats(kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 8).to(dtype)
    weight = read(values.view(torch.uint8), kind, 8, 3, "here")
    assert isinstance(weight, DenseWeight)
    assert torch.equal(weight.data, values)


def test_floats_at_odd_addresses() -> None:
    values = torch.randn(3, 8)
    buffer = torch.empty(3 * 32 + 1, dtype=torch.uint8)
    buffer[1:] = values.view(torch.uint8).flatten()
    weight = read(buffer[1:].view(3, 32), "F32", 8, 3, "here")
    assert torch.equal(weight.dequantize(), values.T)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ3_S", "TQ1_0", "TQ2_0"])
def test_rare_types_are_dequantized_with_a_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    module._warn_unpacked.cache_clear()
    raw = random_blocks(kind, 6, 2)
    with caplog.at_level(logging.WARNING):
        weight = read(raw, kind, 512, 6, "here")
        read(raw, kind, 512, 6, "there")
    assert isinstance(weight, DenseWeight)
    assert torch.equal(weight.data.T, oracle(raw, kind).half())
    assert [kind in record.message for record in caplog.records] == [True]


def test_values_too_large_for_float16_are_refused() -> None:
    raw = random_blocks("MXFP4", 6, 2).view(6, 2, 17)
    raw[..., 0] = torch.randint(115, 130, (6, 2), dtype=torch.uint8)
    raw = raw.flatten(1)
    weight = read(raw, "MXFP4", 64, 6, "here")
    assert torch.equal(weight.dequantize(), oracle(raw, "MXFP4").half())
    raw.view(6, 2, 17)[..., 0] = 254
    with pytest.raises(BadTensor, match="not finite in float16"):
        read(raw, "MXFP4", 64, 6, "here")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match="pip install gguf"):
        read(random_blocks("TQ2_0", 2, 1), "TQ2_0", 256, 2, "here")
    read(random_blocks("Q4_0", 2, 1), "Q4_0", 32, 2, "here")


@pytest.mark.parametrize(
    ("kind", "shape", "inputs", "complaint"),
    [
        ("Q4_0", (4, 18), 64, r"\[4, 36\] bytes, found \[4, 18\]"),
        ("Q4_0", (5, 18), 32, r"\[4, 18\] bytes, found \[5, 18\]"),
        ("Q4_K", (4, 144), 200, "not whole Q4_K blocks of 256"),
        ("Q9_Z", (4, 18), 32, "found the type 'Q9_Z'"),
        ("Q8_1", (4, 40), 32, "no type for a matrix"),
        ("I32", (4, 32), 8, "no type for a matrix"),
    ],
)
def test_refuses_what_does_not_fit(kind: str, shape: tuple[int, int], inputs: int, complaint: str) -> None:
    with pytest.raises(BadTensor, match=complaint) as caught:
        read(torch.zeros(shape, dtype=torch.uint8), kind, inputs, 4, "model.gguf: tensor 'x'")
    assert "model.gguf: tensor 'x'" in str(caught.value)


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_refuses_scales_that_are_not_finite(kind: str) -> None:
    for at in FLOAT16_OFFSETS[kind]:
        raw = random_blocks(kind, 3, 2).view(3, 2, -1)
        raw[1, 1, at : at + 2] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
        with pytest.raises(BadTensor, match="finite scales"):
            read(raw.flatten(1), kind, 2 * BLOCK_LAYOUTS[kind].block_size, 3, "here")
