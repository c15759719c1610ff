"""Hadamard-rotated 4- and 8-bit codes, bit for bit: published vectors, a scalar oracle, limits of float16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exlm.kvcache import hadamard
from exlm.kvcache.hadamard import FP16_MAX, dequantize, hadamard_transform, quantize

SIZES = [32, 64, 96, 128, 160, 192]
VECTOR = torch.tensor([((37 * i) % 64 - 31.5) / 16 for i in range(64)]).half()
BYTES = {
    4: "9766c488888088080888800088f8008fb58b885885b5f38888b85b85b3888b5b",
    8: "7090606040c0808080800080808080008000808000800000808080ff0000ff80"
    "55abab8080808055558055ab2bff8080808080abab5555802bab8080ab80ab55",
}
SCALES = {4: [0x3C00, 0x4200], 8: [0x2C00, 0x3200]}


def half(x: float) -> float:
    return float(np.float16(min(max(x, -FP16_MAX), FP16_MAX)))


def transform(values: list[float]) -> list[float]:
    """Butterflies: each element plus or minus its partner, whose index differs in one bit, for five bits."""
    for bit in (1, 2, 4, 8, 16):
        values = [half(values[i ^ bit] - x) if i & bit else half(x + values[i ^ bit]) for i, x in enumerate(values)]
    return values


def transform_interleaved(values: list[float]) -> list[float]:
    out = list(values)
    step = 64 if len(values) % 64 == 0 else 32
    for start in range(0, len(values), step):
        for first in range(start, start + step // 32):
            places = slice(first, start + step, step // 32)
            out[places] = transform(values[places])
    return out


def scalar_quantize(values: list[float], bits: int) -> tuple[list[int], list[float]]:
    centre, turned = 2 ** (bits - 1), transform_interleaved(values)
    codes: list[int] = []
    scales = []
    for start in range(0, len(turned), 32):
        group = turned[start : start + 32]
        peak = max(abs(x) for x in group)
        scales.append(half(peak / centre))
        for x in group:
            level = half(half(x / peak) * centre + centre) if peak else 0.0
            codes.append(min(max(round(level), 0), 2 * centre - 1))
    if bits == 4:
        codes = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return codes, scales


def scalar_dequantize(codes: list[int], scales: list[float], bits: int) -> list[float]:
    if bits == 4:
        codes = [nibble for byte in codes for nibble in (byte & 15, byte >> 4)]
    centre = 2 ** (bits - 1)
    turned = [half((code - centre) * scales[i // 32]) for i, code in enumerate(codes)]
    return [half(x / 32) for x in transform_interleaved(turned)]


def numbers(seed: int, size: int) -> Tensor:
    """Normal numbers of any magnitude, some outliers, some zeros, maybe a range of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 10 ** (torch.rand(1, generator=generator) * 9 - 7)
    kind = torch.rand(size, generator=generator)
    x = torch.where(kind < 0.03, x * 20, torch.where(kind > 0.9, torch.zeros(()), x))
    if seed % 5 == 0:
        x[: size // 2] = 0
    return x.half()


@pytest.mark.parametrize("bits", [4, 8])
def test_published_vectors(bits: int) -> None:
    codes, scales = quantize(VECTOR, bits)
    assert bytes(codes.tolist()).hex() == BYTES[bits]
    assert scales.view(torch.int16).tolist() == SCALES[bits]


def test_published_decoding() -> None:
    assert dequantize(*quantize(VECTOR, 4), 4)[:4].tolist() == [-1.9375, 0.25, -1.25, 0.9375]


@pytest.mark.parametrize("bits", [4, 8])
@given(st.integers(0, 2**40), st.sampled_from(SIZES))
def test_every_bit_equals_the_scalar_version(bits: int, seed: int, size: int) -> None:
    x = numbers(seed, size)
    codes, scales = quantize(x, bits)
    want, factors = scalar_quantize(x.tolist(), bits)
    assert codes.tolist() == want
    assert scales.tolist() == factors
    assert dequantize(codes, scales, bits).tolist() == scalar_dequantize(want, factors, bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_normalized_value_gets_the_right_code(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every float16 from -1 to 1 beside a peak of 1, against double precision rounded once."""
    monkeypatch.setattr(hadamard, "hadamard_transform", lambda x: x)
    shares = torch.arange(0x3C01).to(torch.int16).view(torch.float16)
    shares = torch.cat((-shares, shares, torch.zeros(-2 * shares.numel() % 31)))
    groups = torch.cat((torch.ones(shares.numel() // 31, 1), shares.view(-1, 31)), 1)
    codes, scales = quantize(groups, bits)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    centre = 2 ** (bits - 1)
    levels = (groups.double().numpy() * centre + centre).astype(np.float16)
    assert np.array_equal(codes.numpy(), np.clip(np.rint(levels), 0, 2 * centre - 1))
    assert scales.unique().tolist() == [1 / centre]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_other_floats_are_rounded_to_half_first(bits: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, 128, dtype=dtype) * 3
    for got, want in zip(quantize(x, bits), quantize(x.half(), bits), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_decode_to_zeros(bits: int) -> None:
    codes, scales = quantize(torch.zeros(3, 64), bits)
    assert not codes.any()
    assert not scales.any()
    assert not dequantize(codes, scales, bits).any()


@pytest.mark.parametrize(("bits", "limit"), [(4, 0.10), (8, 0.007)])
def test_quantization_error(bits: int, limit: float) -> None:
    x = torch.randn(64, 128).half()
    back = dequantize(*quantize(x, bits), bits)
    assert float((back.float() - x.float()).norm() / x.float().norm()) < limit


def test_an_outlier_is_shared_by_its_neighbours() -> None:
    x = torch.randn(256, 128)
    x[:, 5] = 60.0
    back = dequantize(*quantize(x, 4), 4).float()
    others = torch.arange(128) != 5
    error = (back - x)[:, others].norm() / x[:, others].norm()
    plain = (x / 60.0 * 8).round() / 8 * 60.0  # 4 bits without a rotation lose everything else
    assert float(error) < 0.9 * float((plain - x)[:, others].norm() / x[:, others].norm())
    assert torch.allclose(back[:, 5], x[:, 5], rtol=0.15)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [2000.0, 2100.0, 30000.0, 65504.0, 1e30, float("inf")])
def test_beyond_half_precision_numbers_saturate(bits: int, value: float) -> None:
    for x in (torch.full((64,), value), torch.full((64,), -value), torch.eye(64)[3] * min(value, 1e38)):
        codes, scales = quantize(x, bits)
        back = dequantize(codes, scales, bits)
        assert scales.isfinite().all()
        assert back.isfinite().all()
        assert float(back.abs().max()) <= FP16_MAX / 32
    assert float(dequantize(*quantize(torch.eye(64)[3] * 2000, bits), bits)[3]) == pytest.approx(2000, rel=0.13)


def test_nan_is_propagated() -> None:
    x = torch.randn(2, 64)
    x[0, 9] = float("nan")
    back = dequantize(*quantize(x, 8), 8)
    assert back[0].isnan().any()
    assert back[1].isfinite().all()


@pytest.mark.parametrize("size", SIZES)
def test_transforming_twice_is_32_times_the_input(size: int) -> None:
    x = torch.randint(-8, 9, (5, size)).half()
    assert torch.equal(hadamard_transform(hadamard_transform(x)), x * 32)


def test_the_input_is_left_alone() -> None:
    x = torch.randn(4, 64).half()
    before = x.clone()
    dequantize(*quantize(x, 4), 4)
    hadamard_transform(x)
    assert torch.equal(x, before)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_gives_the_same_bits(bits: int, size: int) -> None:
    x = torch.stack([numbers(seed, size) for seed in range(200)])
    codes, scales = quantize(x, bits)
    for got, want in zip(quantize(x.cuda(), bits), (codes, scales), strict=True):
        assert torch.equal(got.cpu(), want)
    assert torch.equal(dequantize(codes.cuda(), scales.cuda(), bits).cpu(), dequantize(codes, scales, bits))
