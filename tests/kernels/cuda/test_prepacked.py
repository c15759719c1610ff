"""Prepacked activations: the same numbers as in memory, in any batch, for any permutation."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm.errors import Unsupported
from exlm.formats.packed import PackedWeight
from exlm.kernels.cuda.gemm_m16 import GemmM16, RmsNorm, TileConfig
from exlm.kernels.cuda.gemm_m64 import GemmM64, TileConfigM64
from exlm.kernels.cuda.module_cache import ModuleCache
from exlm.kernels.cuda.prepacked_acts import InputLayout
from exlm.kernels.cuda.weight_tile import unify_groups
from tests.kernels.cuda.emulator import EmulatedModuleCache
from tests.kernels.cuda.oracle import LIMIT, gated, off
from tests.kernels.cuda.oracle import product as right
from tests.kernels.cuda.prepacked_oracle import prepack, read_back
from tests.kernels.cuda.random_weights import matrix, segment
from tests.kernels.cuda.repack_oracle import repack

MIXED = ((6, (32,) * 3), (5, (32,) * 2), (4, (128,) * 3 + (32,)))
FOUR = ((4, (32,) * 18),)
INNER = ((6, (32,) * 3), (4, (128,) * 4 + (32,)))
Kinds = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass
class Chain:
    """A part of a layer: o, gate with up, down; and the next one's q and k, each in an order of its own."""

    weights: dict[str, PackedWeight]
    norms: tuple[RmsNorm, RmsNorm]
    gemms: tuple[GemmM16, ...]

    def wide(self, *plans: TileConfigM64) -> list[GemmM64]:
        return [GemmM64(one, plan) for one, plan in zip(self.gemms, plans, strict=True)]


def chain(modules: Any, plans: tuple[TileConfig, ...]) -> Chain:
    torch.manual_seed(len(plans))

    def made(kinds: Kinds, outputs: int, bias: bool = False) -> PackedWeight:
        parts = tuple(segment(bits, list(sizes), outputs, False, False) for bits, sizes in kinds)
        return matrix(parts, outputs, True, bias).to(modules.device)

    weights = {
        "o": made(MIXED, 576, bias=True),
        "gate": made(MIXED, 640),
        "up": made(MIXED, 640),
        "down": made(INNER, 576),
        "q": made(MIXED, 72),
        "k": made(FOUR, 40),
    }
    norms = tuple(RmsNorm(torch.randn(576).to(modules.device) * size, 1e-5) for size in (0.3, 7.0))
    tiles = {name: repack(one) for name, one in weights.items()}
    products = (
        GemmM16(modules, [tiles["o"]], None, None, plans[0]),
        GemmM16(modules, unify_groups([tiles["gate"], tiles["up"]]), norms[0], "silu", plans[1]),
        GemmM16(modules, [tiles["down"]], None, None, plans[2]),
        GemmM16(modules, unify_groups([tiles["q"], tiles["k"]]), norms[1], None, plans[3]),
    )
    return Chain(weights, (norms[0], norms[1]), products)


def run(parts: Any, input_layouts: list[InputLayout], x: Tensor, rest: Tensor) -> list[Tensor]:
    """The outputs of o, of gate and up as down reads them, of down, and of q and k."""
    o, gate, down, last = parts
    rows, nan = len(x), float("nan")
    start, middle = prepack(input_layouts[0], x), torch.full_like(rest, nan)
    normed, hidden = input_layouts[1].allocate(rows, o.num_partials), input_layouts[2].allocate(rows, 0)
    for one in (normed, hidden):
        one.packed_x.fill_(nan)
    o(start, [middle], rest, normed)
    gate(normed, [], None, hidden)
    out, left = torch.full_like(rest, nan), input_layouts[3].allocate(rows, down.num_partials)
    left.packed_x.fill_(nan)
    down(hidden, [out], middle, left)
    answers = [torch.full((rows, width), nan, device=x.device).half() for width in last.output_widths]
    last(left, answers)
    for acts, norm, y in ((normed, input_layouts[1].norm_weight, middle), (left, input_layouts[3].norm_weight, out)):
        assert acts.rms_partials is not None
        assert norm is not None
        assert torch.equal(read_back(acts), (y.float() * norm).half().cpu())
        squares = acts.rms_partials.view(rows, -1).double().sum(1)
        torch.testing.assert_close(squares, y.double().square().sum(1), rtol=1e-5, atol=0)
    return [middle, read_back(hidden).to(x.device), out, *answers]


def check(made: Chain, parts: Any, plain: Any, counts: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    w, most = made.weights, max(counts)
    x, rest = (torch.randn(most, n).half().to(made.norms[0].weight.device) for n in (w["o"].in_features, 576))
    input_layouts = [one.input_layout for one in made.gemms]
    whole = middle, hidden, out, q, k = run(parts, input_layouts, x, rest)
    prepared = torch.empty_like(middle)
    plain(x, [prepared], rest)
    assert torch.equal(middle, prepared)  # without a norm it is the same sum of the same numbers
    assert off(hidden, gated(middle, w["gate"], w["up"], made.norms[0], "silu")) < LIMIT
    assert off(out, right(hidden, w["down"]) + middle.double()) < LIMIT
    assert off(q, right(out, w["q"], made.norms[1])) < LIMIT
    assert off(k, right(out, w["k"], made.norms[1])) < LIMIT
    for rows in counts:
        part = run(parts, input_layouts, x[most - rows :], rest[most - rows :].contiguous())
        assert all(torch.equal(a, b[most - rows :]) for a, b in zip(part, whole, strict=True))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModuleCache:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return EmulatedModuleCache(tmp_path_factory.mktemp("emulated"))


PLANS = (TileConfig(2, 4, 2), TileConfig(4, 2, 2), TileConfig(1, 4, 3), TileConfig(2, 2, 2))
WIDE = (
    TileConfigM64(1, 4, 3, split_k=2),
    TileConfigM64(2, 2, 2, split_k=1),
    TileConfigM64(2, 4, 2, 1, 3),
    TileConfigM64(1, 2, 3),
)


def test_few_rows(modules: EmulatedModuleCache) -> None:
    made = chain(modules, PLANS)
    check(made, made.gemms, made.gemms[0], (16, 9, 8, 3, 1))


def test_more_rows(modules: EmulatedModuleCache) -> None:
    made = chain(modules, PLANS)
    parts = made.wide(*WIDE)
    check(made, parts, parts[0], (64, 33, 17))


@pytest.mark.gpu
@pytest.mark.parametrize("plans", [(TileConfig(),) * 4, PLANS])
def test_on_a_gpu(tmp_path_factory: pytest.TempPathFactory, plans: tuple[TileConfig, ...]) -> None:
    made = chain(ModuleCache(torch.device("cuda", 0), tmp_path_factory.mktemp("kernels")), plans)
    check(made, made.gemms, made.gemms[0], tuple(range(16, 0, -1)))
    for planned in (WIDE, (TileConfigM64(),) * 4):
        parts = made.wide(*planned)
        check(made, parts, parts[0], (64, 63, 49, 48, 33, 32, 18, 17))


def test_rows_that_were_not_prepacked_have_no_prepacked_output(modules: EmulatedModuleCache) -> None:
    made = chain(modules, PLANS)
    o, gate, *_ = made.gemms
    x, rest = torch.randn(2, o.in_features).half(), torch.zeros(2, 576).half()
    with pytest.raises(Unsupported, match="not prepacked"):
        o(x, [rest], None, gate.input_layout.allocate(2, o.num_partials))


def test_too_many_stored_inputs(modules: EmulatedModuleCache) -> None:
    product = GemmM16(modules, [repack(matrix((segment(2, [128], 16, False, False),), 16))])
    with pytest.raises(Unsupported, match="9 times"):
        InputLayout(product.weights * 9, list(range(9)), None)
