"""Corrected weights of one layer, against plain least squares."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from exlm.formats import DenseWeight
from exlm.quantize.layer_loader import HookedLinear, make_batch
from exlm.quantize.layer_solver import HiddenStates, advance, solve_layer

TOKENS, WIDTH, INNER = 600, 12, 8
OUT, UP, DOWN = "layers.0.attn.o", "layers.0.mlp.up", "layers.0.mlp.down"


class Layer:
    """Attention and MLP halves that each add to the residual stream."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def tap(outputs: int, inputs: int) -> HookedLinear:
            return HookedLinear(
                DenseWeight(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, None)
            )

        self.mixing = torch.randn(WIDTH, INNER, generator=generator)
        self.taps = {OUT: tap(WIDTH, INNER), UP: tap(INNER, WIDTH), DOWN: tap(WIDTH, INNER)}

    def attended(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.mixing)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        x = x + self.taps[OUT](self.attended(x))
        return x + self.taps[DOWN](torch.tanh(self.taps[UP](x)))


def streams(noise: float) -> HiddenStates:
    """Float states, and quantised states whose error depends on them."""
    generator = torch.Generator().manual_seed(7)
    exact = torch.randn(2, TOKENS // 2, WIDTH, generator=generator)
    rounded = exact - noise * torch.tanh(exact.roll(1, -1))
    return HiddenStates([exact], [rounded], [make_batch(torch.zeros(2, TOKENS // 2, dtype=torch.long))])


def kept(role: str, w: Tensor, h: Tensor) -> Any:
    """A solver that rounds nothing."""
    return w, cast(Any, role)


@pytest.mark.parametrize("seed", range(3))
def test_a_residual_matrix_corrects_the_residual_stream(seed: int) -> None:
    layer, s = Layer(seed), streams(0.2)
    exact = {role: tap.data for role, tap in layer.taps.items()}
    solve_layer(layer.taps, layer.forward, s, kept, 1e-6, {}, [OUT, DOWN])
    x, y = s.float_states[0].flatten(0, 1), s.quantized_states[0].flatten(0, 1)
    inputs = layer.attended(y)
    wanted = x + layer.attended(x) @ exact[OUT].T - y
    # the input error is fitted with little damping, the rest of the residual error with more
    off = (layer.attended(x) - inputs) @ exact[OUT].T
    lost = wanted - inputs @ exact[OUT].T - off
    covariance = inputs.T @ inputs / TOKENS
    ridge = INNER / TOKENS * covariance.diagonal().mean() * torch.eye(INNER)
    found = exact[OUT].T + torch.linalg.lstsq(inputs, off).solution
    found = found + torch.linalg.solve(covariance + ridge, inputs.T @ lost / TOKENS)
    torch.testing.assert_close(layer.taps[OUT].data, found.T, atol=1e-3, rtol=1e-3)


def test_residual_correction_lowers_the_error_of_the_states() -> None:
    def error(adding: list[str]) -> float:
        layer, s = Layer(1), streams(0.2)
        exact = {role: tap.data for role, tap in layer.taps.items()}
        solve_layer(layer.taps, layer.forward, s, kept, 0.01, {}, adding)
        advance(layer.taps, exact, layer.forward, s)
        return s.relative_error()

    assert error([OUT, DOWN]) < 0.9 * error([])
    assert error([OUT]) < error([])


def test_weights_stay_where_the_states_are_exact() -> None:
    layer, s = Layer(2), streams(0.0)
    before = {role: tap.data.clone() for role, tap in layer.taps.items()}
    solve_layer(layer.taps, layer.forward, s, kept, 0.01, {}, [OUT, DOWN])
    for role, tap in layer.taps.items():
        torch.testing.assert_close(tap.data, before[role], atol=1e-5, rtol=1e-5)
