"""RoPE frequencies against known numbers, and rotations against complex multiplication."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exlm import spec
from exlm.kernels.reference import RotaryEmbedding, frequencies

CPU = torch.device("cpu")


def complex_rope(x: Tensor, angles: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """The definition: each pair of a head's numbers is a complex number, multiplied by its phase."""
    out = x.clone().double()
    for column, (a, b) in enumerate(pairs):
        z = torch.complex(x[..., a].double(), x[..., b].double()) * torch.polar(
            torch.ones_like(angles[..., column]), angles[..., column]
        ).unsqueeze(-1)
        out[..., a], out[..., b] = z.real, z.imag
    return out


@pytest.mark.parametrize("style", ["neox", "gptj"])
@pytest.mark.parametrize(("head", "dim"), [(8, 8), (12, 6)])
def test_rope_is_complex_multiplication(style: str, head: int, dim: int) -> None:
    rope = spec.Rope(theta=100.0, dim=dim, style=style)  # type: ignore[arg-type]
    q, k = torch.randn(2, 5, 4, head), torch.randn(2, 5, 1, head)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 0, 31, 5]])
    half = dim // 2
    pairs = [(i, i + half) if style == "neox" else (2 * i, 2 * i + 1) for i in range(half)]
    step = torch.tensor([100.0 ** (-2 * i / dim) for i in range(half)], dtype=torch.float64)
    angles = positions[..., None].double() * step
    got_q, got_k = RotaryEmbedding(rope, 32, CPU)(q, k, positions)
    assert torch.allclose(got_q.double(), complex_rope(q, angles, pairs), atol=1e-5)
    assert torch.allclose(got_k.double(), complex_rope(k, angles, pairs), atol=1e-5)


def test_three_equal_axes_are_plain_rope() -> None:
    plain = RotaryEmbedding(spec.Rope(theta=100.0, dim=8), 32, CPU)
    planes = RotaryEmbedding(spec.Rope(theta=100.0, dim=8, mrope_sections=(2, 1, 1)), 32, CPU)
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    positions = torch.arange(6)[None]
    for a, b in zip(plain(q, k, positions), planes(q, k, positions.expand(3, 1, 6)), strict=True):
        assert torch.equal(a, b)


def test_each_axis_rotates_its_own_section() -> None:
    rotate = RotaryEmbedding(spec.Rope(theta=100.0, dim=8, mrope_sections=(2, 1, 1)), 32, CPU)
    q = torch.ones(1, 1, 1, 8)
    still = torch.zeros(3, 1, 1, dtype=torch.int64)
    for plane, columns in ((0, [0, 1, 4, 5]), (1, [2, 6]), (2, [3, 7])):
        moved = still.clone()
        moved[plane] = 5
        got, _ = rotate(q, q, moved)
        changed = (got[0, 0, 0] - 1).abs() > 1e-6
        assert changed.nonzero().flatten().tolist() == columns


def test_llama3_frequencies() -> None:
    rope = spec.Rope(theta=5e5, dim=128, scaling=spec.Llama3Scaling(8.0, 1.0, 4.0, 8192))
    step, magnitude = frequencies(rope, 131072)
    known = {0: 1.0, 28: 3.211446e-3, 29: 2.166571e-3, 32: 5.248462e-4, 35: 9.556212e-5, 36: 7.784655e-5}
    for i, value in {**known, 63: 3.068926e-7}.items():
        assert float(step[i]) == pytest.approx(value, rel=2e-6)
    assert magnitude == 1.0


def test_alpha_raises_the_base() -> None:
    step, _ = frequencies(spec.Rope(theta=1e4, dim=64, ntk_alpha=2.0), 2048)
    base = 1e4 * 2.0 ** (64 / 62)
    assert float(step[-1]) == pytest.approx(base ** (-62 / 64), rel=1e-5)


def test_the_divisor_divides_positions_whatever_the_method() -> None:
    for scaling in (None, spec.Llama3Scaling(8.0, 1.0, 4.0, 8192), spec.YarnScaling.with_defaults(4.0, 512)):
        plain, _ = frequencies(spec.Rope(theta=1e4, dim=64, scaling=scaling), 2048)
        halved, _ = frequencies(spec.Rope(theta=1e4, dim=64, scaling=scaling, linear_factor=2.0), 2048)
        assert torch.allclose(halved, plain / 2)


def test_dynamic_is_plain_up_to_the_trained_length() -> None:
    rope = spec.Rope(theta=1e4, dim=64, scaling=spec.DynamicNtkScaling(2.0, 2048))
    plain, _ = frequencies(spec.Rope(theta=1e4, dim=64), 2048)
    assert torch.equal(frequencies(rope, 2048)[0], plain)
    base = 1e4 * (2.0 * 4096 / 2048 - 1.0) ** (64 / 62)
    assert float(frequencies(rope, 4096)[0][-1]) == pytest.approx(base ** (-62 / 64), rel=1e-5)


def test_longrope_chooses_by_the_configured_length() -> None:
    scaling = spec.LongRopeScaling((1.0, 2.0), (3.0, 4.0), original_max_positions=64, attention_factor=1.25)
    rope = spec.Rope(theta=1e4, dim=4, scaling=scaling)
    short, magnitude = frequencies(rope, 64)
    long, _ = frequencies(rope, 65)
    assert torch.allclose(short, torch.tensor([1.0, 0.01 / 2]))
    assert torch.allclose(long, torch.tensor([1 / 3, 0.01 / 4]))
    assert magnitude == 1.25


def test_yarn_keeps_fast_and_divides_slow_frequencies() -> None:
    rope = spec.Rope(theta=1e4, dim=128, scaling=spec.YarnScaling.with_defaults(4.0, 4096))
    plain, _ = frequencies(spec.Rope(theta=1e4, dim=128), 16384)
    step, magnitude = frequencies(rope, 16384)
    assert float(step[0]) == pytest.approx(float(plain[0]))
    assert float(step[-1]) == pytest.approx(float(plain[-1]) / 4)
    assert magnitude == pytest.approx(0.1 * math.log(4.0) + 1)
