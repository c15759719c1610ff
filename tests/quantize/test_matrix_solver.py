"""The matrix solver against slow, sequential versions of itself and against rounding to nearest."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm.errors import InputError
from exlm.formats import exl2
from exlm.formats import gptq as gptq_format
from exlm.formats.quantization_config import QuantizationConfig
from exlm.quantize import coordinate_descent
from exlm.quantize.allocation import candidate_recipes, make_recipe
from exlm.quantize.coordinate_descent import COLUMNS_PER_MOVE, MAX_SWEEPS, MIN_GAIN, descend_two_sided
from exlm.quantize.gptq import (
    Grid,
    GroupStep,
    HessianFactors,
    OutputFactors,
    factorize,
    gptq,
    gptq_two_sided,
    inverse_cholesky,
)
from exlm.quantize.matrix_solver import (
    Exl2Solution,
    gptq_exl2,
    rounding_losses,
    search_scales,
    solve_exl2,
    solve_gptq,
)
from exlm.quantize.options import SolverOptions
from exlm.quantize.sensitivity import output_factors

RECIPES = list(candidate_recipes())


def problem(inputs: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix and the Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(inputs, columns, generator=generator) * 0.1
    mixing = torch.randn(inputs, inputs, generator=generator) * torch.logspace(0, -1.5, inputs)
    x = torch.randn(4 * inputs, inputs, generator=generator) @ mixing
    return w, x.T @ x / len(x)


def output_losses(w: Tensor, f: HessianFactors, solution: Exl2Solution) -> Tensor:
    """(columns,) eᵀ H e of each column's error e, H damped."""
    error = w[f.perm] - solution.values()
    return (error * (f.hessian @ error)).sum(0)


def loss_of(w: Tensor, found: Tensor, h: Tensor) -> float:
    error = w - found
    return float((error * (h @ error)).sum())


@settings(max_examples=40)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from(RECIPES),
    st.integers(0, 9),
    st.booleans(),
)
def test_packed_weights_decode_to_the_solution(blocks: int, columns: int, recipe, seed: int, bias: bool) -> None:
    w, h = problem(32 * blocks, columns, seed)
    solution = solve_exl2(w, factorize(w, h, 0.02), recipe.groups(len(w)), SolverOptions(sweeps=1, scale_steps=4))
    extra = torch.randn(columns).half() if bias else None
    tensors = exl2.write(solution.pack(extra))
    back = exl2.read(tensors, len(w), columns, "here")
    assert torch.equal(back.dequantize().float(), solution.dequantize())
    assert extra is None or torch.equal(tensors["bias"], extra)


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_every_stage_lowers_the_loss(bits: int) -> None:
    w, h = problem(128, 48)
    f, groups = factorize(w, h, 0.02), make_recipe(32, (bits, 1.0)).groups(128)
    scales = [search_scales(w[f.perm][a : a + 32], bits, torch.ones(32), 24).grid(bits) for a in range(0, 128, 32)]
    nearest = torch.cat(
        [grid.value(grid.nearest(rows)) for grid, rows in zip(scales, w[f.perm].split(32), strict=True)]
    )
    plain = loss_of(w[f.perm], nearest, f.hessian)
    fed = gptq_exl2(w, f, groups, 24)
    assert float(output_losses(w, f, fed).sum()) < 0.8 * plain
    added = rounding_losses(w, f, 32, (8, bits), 24)[1]
    torch.testing.assert_close(added.sum(0), output_losses(w, f, fed), rtol=2e-2, atol=1e-5)
    assert float(output_losses(w, f, solve_exl2(w, f, groups, SolverOptions(sweeps=3))).sum()) < float(
        output_losses(w, f, fed).sum()
    )


def test_gptq_of_two_weights_is_near_the_optimum() -> None:
    grid = Grid(torch.tensor([0.5]), torch.tensor(-2.0), torch.tensor(1.0))
    for seed in range(20):
        w, h = problem(2, 1, seed)
        w = w * 5
        f = factorize(w, h, 0.01)
        found = gptq(w, f, [GroupStep(2, lambda *_: grid)]).codes * 0.5
        target = w[f.perm]
        every = [torch.tensor(pair)[:, None] * 0.5 for pair in product((-2.0, -1.0, 0.0, 1.0), repeat=2)]
        best = min(loss_of(target, one, f.hessian) for one in every)
        assert loss_of(target, found, f.hessian) <= 2.5 * best + 1e-6


def slow_two_sided(w: Tensor, scale: Tensor, half: Tensor, upper: Tensor, across: Tensor) -> Tensor:
    """One weight after the other, each error fed back to all weights below and to the right."""
    w, codes = w.clone(), torch.zeros_like(w)
    for i in range(w.shape[0]):
        for n in range(w.shape[1]):
            q = (w[i, n] / scale[i, n]).round().clamp(-half[i], half[i] - 1)
            error = (w[i, n] - (q * scale[i, n]).half().float()) / (upper[i, i] * across[n, n])
            codes[i, n] = q
            w -= error * upper[i][:, None] * across[n][None]
    return codes


@pytest.mark.parametrize(("inputs", "columns"), [(32, 32), (64, 40), (96, 7), (32, 70)])
def test_the_wavefront_matches_sequential_rounding(inputs: int, columns: int) -> None:
    w, h = problem(inputs, columns)
    _, g = problem(columns, 1, 3)
    upper = inverse_cholesky((h + 0.05 * h.diagonal().mean() * torch.eye(inputs)).double())
    side = output_factors(g.double(), 0.1)
    assert upper is not None
    assert side is not None
    scale = (torch.rand(inputs, columns) * 0.02 + 0.02).double()
    half = torch.full((inputs,), 4.0).double()
    found = gptq_two_sided(w.double(), scale, half, upper, side)[:, side.perm]
    slow = slow_two_sided(w.double()[:, side.perm], scale[:, side.perm], half, upper, side.inv_chol)
    assert (found != slow).float().mean() < 0.002


def test_two_sided_solving_lowers_the_two_sided_loss() -> None:
    w, h = problem(64, 64)
    _, g = problem(64, 1, 5)
    f, groups = factorize(w, h, 0.02), make_recipe(32, (4, 1.0)).groups(64)

    def both(outputs: OutputFactors | None) -> float:
        error = w[f.perm] - solve_exl2(w, f, groups, SolverOptions(), outputs).values()
        return float(((f.hessian @ error @ g) * error).sum())

    side = output_factors(g, 0.1)
    assert side is not None
    assert both(side) < 0.8 * both(None)
    order = side.perm.flip(0)  # those that matter least first
    inv_chol = inverse_cholesky(side.hessian[order][:, order])
    assert inv_chol is not None
    assert both(side) < 0.95 * both(OutputFactors(order, inv_chol, side.hessian))


def slow_descent(codes: Tensor, w: Tensor, scale: Tensor, half: Tensor, h: Tensor, g: Tensor) -> Tensor:
    """Every move tried alone, the loss computed anew each time."""
    codes = codes.clone()

    def loss_of_codes(tried: Tensor) -> float:
        error = w - tried * scale
        return float((error * (h @ error @ g)).sum())

    for _ in range(MAX_SWEEPS):
        start_codes = loss_of_codes(codes)
        for row, first in product(range(len(w)), range(0, w.shape[1], COLUMNS_PER_MOVE)):
            least, best = loss_of_codes(codes), codes
            for column, step in product(range(first, min(first + COLUMNS_PER_MOVE, w.shape[1])), (-1, 1)):
                tried = codes.clone()
                tried[row, column] += step
                if -half[row] <= tried[row, column] < half[row] and loss_of_codes(tried) < least:
                    least, best = loss_of_codes(tried), tried
            codes = best
        if start_codes - loss_of_codes(codes) < MIN_GAIN * loss_of_codes(codes):
            break
    return codes


@pytest.mark.parametrize("columns", [5, 64])
def test_descent_makes_the_move_that_gains_most(columns: int) -> None:
    w, h = problem(32, columns)
    _, g = problem(columns, 1, 4)
    scale, half = torch.full_like(w, 2**-4), torch.full((32,), 4.0)
    codes = (w / scale).round().clamp(-4, 3)
    found = descend_two_sided(codes, w, scale, half, h, g)
    assert torch.equal(found, slow_descent(*(x.double() for x in (codes, w, scale, half, h, g))).float())
    assert bool((found != codes).any())


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 140), st.integers(0, 9))
def test_descent_never_raises_the_loss(blocks: int, columns: int, seed: int) -> None:
    w, h = problem(32 * blocks, columns, seed)
    _, g = problem(columns, 1, seed + 1)
    scale, half = torch.rand_like(w) * 0.05 + 0.01, torch.full((len(w),), 8.0)
    codes = (w / scale).round().clamp(-8, 7)
    found = descend_two_sided(codes, w, scale, half, h, g)

    def loss_of_codes(tried: Tensor) -> float:
        error = (w - (tried * scale).half().float()).double()
        return float((error * (h.double() @ error @ g.double())).sum())

    assert loss_of_codes(found) <= loss_of_codes(codes) * (1 + 1e-5)
    assert bool(((found >= -8) & (found <= 7) & (found == found.round())).all())


def test_descent_continues_while_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = problem(64, 100)
    _, g = problem(100, 1, 4)
    scale, half = torch.full_like(w, 2**-4), torch.full((64,), 4.0)
    start_codes = (w / scale).round().clamp(-4, 3)

    def descend(sweeps: int) -> tuple[float, Tensor]:
        monkeypatch.setattr(coordinate_descent, "MAX_SWEEPS", sweeps)
        codes = descend_two_sided(start_codes, w, scale, half, h, g)
        error = w - codes * scale
        return float((error * (h @ error @ g)).sum()), codes

    (one, _), (two, _), (many, _) = map(descend, (1, 2, MAX_SWEEPS))
    assert many < 0.99 * two < 0.99 * one
    assert torch.equal(descend(500)[1], descend(1000)[1])  # it has converged


def test_fewer_codes_move_after_a_sweep_that_raised_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = problem(32, 200)
    g = torch.ones(200, 200) + 0.01 * torch.eye(200)  # all columns correct the same error
    scale, half = torch.full_like(w, 2**-4), torch.full((32,), 4.0)
    start_codes = (w / scale).round().clamp(-4, 3)
    monkeypatch.setattr(coordinate_descent, "COLUMNS_PER_MOVE", 1)

    def loss_after(sweeps: int) -> float:
        monkeypatch.setattr(coordinate_descent, "MAX_SWEEPS", sweeps)
        error = w - descend_two_sided(start_codes, w, scale, half, h, g) * scale
        return float((error * (h @ error @ g)).sum())

    assert loss_after(1) == loss_after(0)
    assert loss_after(MAX_SWEEPS) < 0.5 * loss_after(0)


@pytest.mark.parametrize("group", [32, 128])
def test_gptq_tensors_decode_to_the_solution(group: int) -> None:
    w, h = problem(160, 24)
    bias = torch.ones(24).half()
    values, weight = solve_gptq(w, factorize(w, h, 0.02), group, 2, bias)
    tensors = gptq_format.write(weight)
    config = QuantizationConfig(bits=4, group_size=group, desc_act=True, sym=False)
    back = gptq_format.read(tensors, 160, 24, "here", config)
    assert torch.equal(back.dequantize().float(), values)
    assert bool((tensors["g_idx"].diff() < 0).any())
    assert loss_of(w, values, h) < 0.01 * loss_of(w, torch.zeros_like(w), h)


def test_zero_columns_and_dead_inputs_give_finite_weights() -> None:
    w, h = problem(64, 32)
    w[:, 3] = 0
    h[5], h[:, 5] = 0, 0
    for recipe in (make_recipe(32, (2, 1.0)), make_recipe(64, (8, 0.5), (6, 0.5))):
        found = solve_exl2(w, factorize(w, h, 0.02), recipe.groups(64), SolverOptions()).dequantize()
        assert bool(torch.isfinite(found).all())
    nothing = torch.zeros_like(w)
    assert not solve_exl2(nothing, factorize(nothing, h, 0.02), recipe.groups(64), SolverOptions()).dequantize().any()


def test_nan_and_overflow_name_the_matrix() -> None:
    w, h = problem(32, 8)
    h[0, 0] = torch.inf
    with pytest.raises(InputError, match=r"layers\.3\.mlp\.up.*overflow"):
        factorize(w, h, 0.02, "layers.3.mlp.up")
    with pytest.raises(InputError, match="NaN"):
        factorize(w * torch.nan, torch.eye(32), 0.02, "x")


def test_a_zero_hessian_is_damped() -> None:
    w, _ = problem(32, 8)
    assert isinstance(factorize(w, torch.zeros(32, 32), 0.02), HessianFactors)
