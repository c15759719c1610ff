"""CUDA graphs give the same bits as direct calls; on a CPU nothing is captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exlm import quantize_model
from exlm.quantize import cuda_graphs
from exlm.quantize.allocation import make_recipe
from exlm.quantize.coordinate_descent import descend_two_sided
from exlm.quantize.cuda_graphs import GraphCache, GraphFunction
from exlm.quantize.gptq import GroupStep, OutputFactors, factorize, gptq, gptq_two_sided
from exlm.quantize.matrix_solver import (
    MultiWidthSearch,
    ScaleSearch,
    rounding_losses,
    solve_exl2,
    solve_gptq,
)
from exlm.quantize.options import SolverOptions
from exlm.quantize.sensitivity import output_factors
from tests import tiny


def double(x: Tensor, out: Tensor) -> None:
    """Overwrites its input."""
    x.mul_(2)
    out.copy_(x)


@dataclass(frozen=True)
class Times:
    """A graph function with a parameter."""

    factor: int

    def __call__(self, x: Tensor, out: Tensor) -> None:
        torch.mul(x, self.factor, out=out)


def run_uncaptured(_: GraphCache, function: GraphFunction, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Without capture, but with contiguous copies of the tensors, as a graph has them."""
    own, out = ([t.clone(memory_format=torch.contiguous_format) for t in each] for each in (inputs, outputs))
    function(*own, *out)
    for now, kept in zip(outputs, out, strict=True):
        now.copy_(kept)


def test_grid_searches_compare_by_their_parameters() -> None:
    assert ScaleSearch(4, 8) == ScaleSearch(4, 8)
    assert (
        len(
            {
                ScaleSearch(4, 8),
                ScaleSearch(3, 8),
                ScaleSearch(4, 24),
                MultiWidthSearch((4,), 8),
                MultiWidthSearch((4, 3), 8),
            }
        )
        == 5
    )


def test_functions_run_directly_on_a_cpu() -> None:
    out = torch.zeros(3)
    GraphCache().run(double, (torch.ones(3),), (out,))
    assert out.tolist() == [2, 2, 2]


@pytest.mark.gpu
def test_a_graph_is_replayed_with_new_inputs() -> None:
    graphs, seen = GraphCache(), []
    for start in range(4):
        for size in (3, 5):
            out = torch.zeros(size, device="cuda")
            graphs.run(double, (torch.arange(size, device="cuda") + float(start),), (out,))
            seen.append(out.tolist() == [2 * (start + i) for i in range(size)])
    assert all(seen)


@pytest.mark.gpu
def test_functions_with_other_parameters_have_their_own_graphs() -> None:
    graphs, out = GraphCache(), torch.zeros(3, device="cuda")
    for factor in (2, 3, 2, 5):
        graphs.run(Times(factor), (torch.ones(3, device="cuda"),), (out,))
        assert out.tolist() == [factor] * 3


@pytest.mark.gpu
def test_the_oldest_graphs_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_BUFFER_BYTES", 100)
    short = GraphCache()
    for size in (3, 5, 9, 3, 20, 5):
        out = torch.zeros(size, device="cuda")
        short.run(Times(3), (torch.ones(size, device="cuda"),), (out,))
        assert out.tolist() == [3] * size
    short.clear()
    short.run(Times(4), (torch.ones(20, device="cuda"),), (torch.zeros(20, device="cuda"),))


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "columns"), [(160, 70), (192, 128)])
def test_graphs_give_the_same_bits_as_direct_calls(inputs: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same device, to the last bit: every step of the solver, of the measurement and of GPTQ."""
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(inputs, columns, generator=generator).cuda()
    x = torch.randn(500, inputs, generator=generator)
    gradients = torch.randn(300, columns, generator=generator)
    f = factorize(w, (x.T @ x / len(x)).cuda(), 0.01)
    output_side = output_factors((gradients.T @ gradients).cuda(), 0.05)
    groups = make_recipe((32, 64), (5, 0.3), (3, 0.7)).groups(inputs)

    def everything() -> list[Tensor]:
        alone, both = (solve_exl2(w, f, groups, SolverOptions(), outputs) for outputs in (None, output_side))
        found = [t for one in (alone, both) for t in (one.codes, *one.scales.tensors)]
        return [*found, *rounding_losses(w, f, 64, (2, 4), 8), solve_gptq(w, f, 128, 2)[0]]

    first = everything()
    again = everything()
    monkeypatch.setattr(GraphCache, "run", run_uncaptured)
    for recorded, replayed, plain in zip(first, again, everything(), strict=True):
        assert torch.equal(recorded, replayed)
        assert torch.equal(recorded, plain)


@pytest.mark.gpu
def test_two_gpu_jobs_give_the_same_model(tmp_path: Path) -> None:
    source = tiny.make_chat_folder(tmp_path / "source", hidden_size=64, intermediate_size=96)
    for name in "ab":
        quantize_model(source, tmp_path / name, 5.0, rows=6, length=64, report=False, device="cuda")
    models = [sorted((tmp_path / name).iterdir()) for name in "ab"]
    assert [path.read_bytes() for path in models[0]] == [path.read_bytes() for path in models[1]]


@pytest.mark.gpu
def test_gpu_and_cpu_round_alike() -> None:
    generator = torch.Generator().manual_seed(1)
    w, x = torch.randn(96, 70, generator=generator), torch.randn(400, 96, generator=generator)
    g = torch.eye(70) + 0.1

    def rounded(device: str) -> tuple[Tensor, ...]:
        there = w.to(device)
        f = factorize(there, (x.T @ x / len(x)).to(device), 0.01)
        steps = [GroupStep(rows, MultiWidthSearch((4,), 8)) for rows in (64, 32)]
        codes = gptq(there, f, steps).codes
        upper = torch.linalg.cholesky(torch.linalg.inv(g), upper=True).to(device)
        scale, half = torch.full_like(there, 0.3), torch.full((96,), 8.0, device=device)
        output_side = OutputFactors(torch.arange(70, device=device), upper, g.to(device))
        both = gptq_two_sided(there[f.perm], scale, half, f.inv_chol, output_side)
        descended = descend_two_sided(both, there[f.perm], scale, half, f.hessian, output_side.hessian)
        return codes.cpu(), both.cpu(), descended.cpu()

    for here, there in zip(rounded("cpu"), rounded("cuda"), strict=True):
        assert (here != there).float().mean() < 0.02
