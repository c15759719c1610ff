"""Corrected weights of one layer, against plain least squares."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from exlm.formats import DenseWeight
from exlm.quantize.layer_loader import HookedLinear, make_batch
from exlm.quantize.layer_solver import HiddenStates, propagate, solve_layer

TOKENS, WIDTH, INNER = 600, 12, 8
OUT, UP, DOWN = "layers.0.attn.o", "layers.0.mlp.up", "layers.0.mlp.down"


class Layer:
    """Attention and MLP halves that each add to the residual stream."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def linear(outputs: int, inputs: int) -> HookedLinear:
            return HookedLinear(DenseWeight(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, None))

        self.mixing = torch.randn(WIDTH, INNER, generator=generator)
        self.linears = {OUT: linear(WIDTH, INNER), UP: linear(INNER, WIDTH), DOWN: linear(WIDTH, INNER)}

    def attended(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.mixing)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        x = x + self.linears[OUT](self.attended(x))
        return x + self.linears[DOWN](torch.tanh(self.linears[UP](x)))


def hidden_states(noise: float) -> HiddenStates:
    """Float states, and quantised states whose error depends on them."""
    generator = torch.Generator().manual_seed(7)
    exact = torch.randn(2, TOKENS // 2, WIDTH, generator=generator)
    rounded = exact - noise * torch.tanh(exact.roll(1, -1))
    return HiddenStates([exact], [rounded], [make_batch(torch.zeros(2, TOKENS // 2, dtype=torch.long))])


def no_rounding(role: str, w: Tensor, h: Tensor) -> Any:
    """A solver that rounds nothing."""
    return w, cast(Any, role)


@pytest.mark.parametrize("seed", range(3))
def test_a_residual_matrix_corrects_the_residual_stream(seed: int) -> None:
    layer, s = Layer(seed), hidden_states(0.2)
    exact = {role: linear.weight for role, linear in layer.linears.items()}
    solve_layer(layer.linears, layer.forward, s, no_rounding, 1e-6, {}, [OUT, DOWN])
    x, y = s.float_states[0].flatten(0, 1), s.quantized_states[0].flatten(0, 1)
    inputs = layer.attended(y)
    wanted = x + layer.attended(x) @ exact[OUT].T - y
    # the input error is fitted with little damping, the rest of the residual error with more
    input_error = (layer.attended(x) - inputs) @ exact[OUT].T
    rest = wanted - inputs @ exact[OUT].T - input_error
    hessian = inputs.T @ inputs / TOKENS
    ridge = INNER / TOKENS * hessian.diagonal().mean() * torch.eye(INNER)
    found = exact[OUT].T + torch.linalg.lstsq(inputs, input_error).solution
    found = found + torch.linalg.solve(hessian + ridge, inputs.T @ rest / TOKENS)
    torch.testing.assert_close(layer.linears[OUT].weight, found.T, atol=1e-3, rtol=1e-3)


def test_residual_correction_lowers_the_error_of_the_states() -> None:
    def error(adding: list[str]) -> float:
        layer, s = Layer(1), hidden_states(0.2)
        exact = {role: linear.weight for role, linear in layer.linears.items()}
        solve_layer(layer.linears, layer.forward, s, no_rounding, 0.01, {}, adding)
        propagate(layer.linears, exact, layer.forward, s)
        return s.relative_error()

    assert error([OUT, DOWN]) < 0.9 * error([])
    assert error([OUT]) < error([])


def test_weights_stay_where_the_states_are_exact() -> None:
    layer, s = Layer(2), hidden_states(0.0)
    before = {role: linear.weight.clone() for role, linear in layer.linears.items()}
    solve_layer(layer.linears, layer.forward, s, no_rounding, 0.01, {}, [OUT, DOWN])
    for role, linear in layer.linears.items():
        torch.testing.assert_close(linear.weight, before[role], atol=1e-5, rtol=1e-5)
