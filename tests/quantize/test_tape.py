"""A recording does what the computation does; without a GPU nothing is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exlm.quantize.rounding import factors, feed_back
from exlm.quantize.scaling import choose
from exlm.quantize.settle import settle
from exlm.quantize.tape import Tape
from exlm.quantize.wave import Outputs, round_both


def double(x: Tensor, out: Tensor) -> None:
    """Spoils what it reads."""
    x.mul_(2)
    out.copy_(x)


def test_on_a_processor_things_are_just_done() -> None:
    out = torch.zeros(3)
    Tape().play(double, (torch.ones(3),), (out,))
    assert out.tolist() == [2, 2, 2]


@pytest.mark.gpu
def test_a_recording_is_replayed_with_what_it_is_given() -> None:
    tape, seen = Tape(), []
    for start in range(4):
        for size in (3, 5):
            out = torch.zeros(size, device="cuda")
            tape.play(double, (torch.arange(size, device="cuda") + float(start),), (out,))
            seen.append(out.tolist() == [2 * (start + i) for i in range(size)])
    assert all(seen)


@pytest.mark.gpu
def test_a_gpu_rounds_as_a_processor_does() -> None:
    generator = torch.Generator().manual_seed(1)
    w, x = torch.randn(96, 70, generator=generator), torch.randn(400, 96, generator=generator)
    g = torch.eye(70) + 0.1

    def rounded(device: str) -> tuple[Tensor, ...]:
        there = w.to(device)
        f = factors(there, (x.T @ x / len(x)).to(device), 0.01)
        codes = feed_back(there, f, [64, 32], lambda _, rows, care: choose(rows, 4, care, 8).grid(4)).codes
        upper = torch.linalg.cholesky(torch.linalg.inv(g), upper=True).to(device)
        scale, half = torch.full_like(there, 0.3), torch.full((96,), 8.0, device=device)
        side = Outputs(torch.arange(70, device=device), upper, g.to(device))
        both = round_both(there[f.order], scale, half, f.upper, side)
        settled = settle(both, there[f.order], scale, half, f.hessian, side.gradients)
        return codes.cpu(), both.cpu(), settled.cpu()

    for here, there in zip(rounded("cpu"), rounded("cuda"), strict=True):
        assert (here != there).float().mean() < 0.02
