"""Packed matrices of a 7B-shaped model on the GPU, next to a copy: `python -m benchmarks.matrices`.

Every matrix is different, so that none is found in a cache; times are of graphs replayed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from tempfile import gettempdir

import torch
from rich.console import Console
from rich.table import Table

from exlm.bench.synthetic_weights import RandomTensors, WeightFormat, weight_format
from exlm.formats import PackedWeight
from exlm.kernels.cuda import linear, wide
from exlm.kernels.cuda.lanes import ALIKE
from exlm.kernels.cuda.linear import Normal, Plan, Product
from exlm.kernels.cuda.program import Workshop, compiled, target
from exlm.kernels.cuda.tiles import Tiles, arrange
from exlm.kernels.cuda.wide import WideProduct

from .gpu import copy_speed, replayed

LAYERS = 32
SHAPES: dict[str, tuple[int, list[int], bool]] = {
    "q, k, v": (4096, [4096] * 3, True),
    "o": (4096, [4096], False),
    "gate, up": (4096, [11008] * 2, True),
    "down": (11008, [4096], False),
}
"""Inputs, outputs, and whether a norm stands before them."""
PLANS = [
    Plan(4, 8, 2), Plan(2, 16, 2), Plan(4, 9, 2), Plan(2, 12, 2), Plan(4, 5, 2), Plan(4, 6, 2), Plan(3, 9, 2),
    Plan(3, 8, 2), Plan(2, 24, 2), Plan(6, 9, 2), Plan(6, 12, 2), Plan(6, 16, 2), Plan(3, 8, 3),
]  # fmt: skip
WIDE_PLANS = [
    *(wide.Plan(1, 8, 3, 2, pieces) for pieces in (0, 1, 2, 3, 4, 8)),
    *(wide.Plan(1, 4, 4, 4, pieces) for pieces in (1, 2, 4)), wide.Plan(2, 8, 4, 1), wide.Plan(2, 4, 4, 2),
]  # fmt: skip

Work = Callable[[], None]


def random_tiles(inputs: int, outputs: int, form: WeightFormat, random: RandomTensors) -> Tiles:
    """A matrix of random numbers in the true layout of a format."""
    weight = form.weight(inputs, outputs, random, False, 0.02)
    assert isinstance(weight, PackedWeight)
    return arrange(weight)


def plans(rows: int) -> Sequence[Plan]:
    """Those to try for so many rows."""
    return PLANS if rows <= ALIKE else WIDE_PLANS


def bound(
    workshop: Workshop, matrices: list[Tiles], normal: Normal | None, plan: Plan
) -> Product | WideProduct:
    """Matrices ready to be multiplied."""
    act = "silu" if len(matrices) == 2 else None
    if isinstance(plan, wide.Plan):
        return WideProduct(Product(workshop, matrices, normal, act), plan)
    return Product(workshop, matrices, normal, act, plan)


def chain(workshop: Workshop, layers: list[list[Tiles]], norm: bool, plan: Plan, rows: int) -> Work:
    """One matrix after the other, all on the same rows."""
    inputs, device = layers[0][0].in_features, workshop.device
    x = torch.randn(rows, inputs, device=device).half()
    normal = Normal(torch.rand(inputs, device=device), 1e-5) if norm else None
    products = [bound(workshop, one, normal, plan) for one in layers]
    out = [torch.empty(rows, width, device=device).half() for width in products[0].widths]
    residual = None if norm else out[0].clone()

    def run() -> None:
        for product in products:
            product(x, out, residual)

    return run


def compile_ahead(workshop: Workshop, model: dict[str, list[list[Tiles]]], rows: list[int]) -> None:
    """Every program that will be needed, on all processors at once."""
    device = target(*torch.cuda.get_device_capability(workshop.device))
    needed = set()
    for name, layers in model.items():
        normal = (
            Normal(torch.ones(SHAPES[name][0], device=workshop.device), 1e-5) if SHAPES[name][2] else None
        )
        for number, plan in ((count, plan) for count in rows for plan in plans(count)):
            source = wide.SOURCE if isinstance(plan, wide.Plan) else linear.SOURCE
            product = bound(workshop, layers[0], normal, plan)
            needed.add((source, tuple(sorted(product.choices(number).items()))))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: compiled(one[0], one[1], device, workshop.cache), needed))


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrices", description="Packed matrices.")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--form", default="exl2", help="exl2, gptq or gguf")
    parser.add_argument("--bits", type=float, help="of a weight; what is usual if not given")
    parser.add_argument("--all", action="store_true", help="print every plan's time")
    chosen = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    workshop = Workshop(device, Path(gettempdir()) / "exlm-kernels")
    roof = copy_speed(device)
    stored, random = weight_format(chosen.form, chosen.bits), RandomTensors(1, device)
    model = {
        name: [[random_tiles(inputs, width, stored, random) for width in widths] for _ in range(LAYERS)]
        for name, (inputs, widths, _) in SHAPES.items()
    }
    compile_ahead(workshop, model, chosen.rows)
    title = f"{stored}; a copy moves {roof / 1e12:.2f} TB/s"
    table = Table(
        "matrix", "rows", "us", "TB/s", "% of copy", "tiles, warps, stages (, resident)", title=title
    )
    for rows in chosen.rows:
        total = 0.0
        for name, layers in model.items():
            inputs, widths, norm = SHAPES[name]
            size = sum(stored.nbytes(inputs, width, False) for width in widths)
            times = {
                plan: replayed(chain(workshop, layers, norm, plan, rows)) / LAYERS for plan in plans(rows)
            }
            plan = min(times, key=times.__getitem__)
            speed = size / times[plan]
            shape = ", ".join(map(str, astuple(plan)))
            cells = (f"{times[plan] * 1e6:.2f}", f"{speed / 1e12:.2f}", f"{100 * speed / roof:.0f}", shape)
            table.add_row(name, str(rows), *cells)
            if chosen.all:
                print(name, rows, {astuple(plan): f"{time * 1e6:.2f}" for plan, time in times.items()})
            total += times[plan]
        table.add_row("all", str(rows), f"{total * 1e6:.1f}", "", "", f"{rows / total / LAYERS:.0f} tokens/s")
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
