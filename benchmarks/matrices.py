"""Packed matrices of a 7B-shaped model on the GPU, next to a copy: `python -m benchmarks.matrices`.

Every matrix is different, so that none is found in a cache; times are of graphs replayed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

import torch
from rich.console import Console
from rich.table import Table

from exlm.kernels.cuda.linear import Entry, Plan, Product
from exlm.kernels.cuda.program import Workshop
from exlm.kernels.cuda.tiles import BLOCK, Layout, Run, Tiles

from .gpu import copy_speed, replayed

LAYERS = 32
SHAPES: dict[str, tuple[int, list[int], Entry]] = {
    "q, k, v": (4096, [4096] * 3, "norm"),
    "o": (4096, [4096], "plain"),
    "gate, up": (4096, [11008] * 2, "norm"),
    "down": (11008, [4096], "gated"),
}
PLANS = [Plan(2, 8, 3), Plan(2, 8, 4), Plan(4, 8, 2), Plan(1, 8, 4), Plan(2, 16, 3), Plan(2, 4, 4)]

Work = Callable[[], None]


def random_tiles(inputs: int, outputs: int, bits: int, group: int, source: torch.Tensor) -> Tiles:
    """A matrix of random codes and small scales."""
    layout = Layout(min(8, group // 16), "half", False)
    shape = (-(-outputs // 16), inputs // BLOCK, layout.brick(bits))
    bricks = torch.randint(0, 256, shape, dtype=torch.uint8, device=source.device)
    scales = torch.rand(*shape[:2], 16 * layout.groups, device=source.device) * 0.001
    bricks[:, :, 256 * bits :] = scales.half().view(torch.uint8)
    return Tiles(layout, (Run(bits, bricks),), inputs, outputs, source, 1.0, None)


def chain(workshop: Workshop, layers: list[list[Tiles]], entry: Entry, plan: Plan, rows: int) -> Work:
    """One matrix after the other, all on the same rows."""
    inputs, device = layers[0][0].in_features, workshop.device
    x = torch.randn(rows, inputs * (2 if entry == "gated" else 1), device=device).half()
    out = [torch.empty(rows, one.out_features, device=device).half() for one in layers[0]]
    norm = torch.rand(inputs, device=device)
    products = [Product(workshop, one, entry, norm, 1e-5, plan) for one in layers]

    def run() -> None:
        for product in products:
            product(x, out)

    return run


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrices", description="Packed matrices.")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128)
    chosen = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    workshop = Workshop(device, Path(gettempdir()) / "exlm-kernels")
    roof = copy_speed(device)
    model = {
        name: [
            [random_tiles(inputs, width, chosen.bits, chosen.group, order) for width in widths]
            for order in (torch.randperm(inputs, device=device).int() for _ in range(LAYERS))
        ]
        for name, (inputs, widths, _) in SHAPES.items()
    }
    title = f"{chosen.bits} bits, groups of {chosen.group}; a copy moves {roof / 1e12:.2f} TB/s"
    table = Table("matrix", "rows", "us", "TB/s", "% of copy", "tiles, warps, stages", title=title)
    for rows in chosen.rows:
        total = 0.0
        for name, layers in model.items():
            size, entry = sum(one.nbytes for one in layers[0]), SHAPES[name][2]
            times = {plan: replayed(chain(workshop, layers, entry, plan, rows)) / LAYERS for plan in PLANS}
            plan = min(times, key=times.__getitem__)
            speed = size / times[plan]
            shape = f"{plan.tiles}, {plan.warps}, {plan.stages}"
            cells = (f"{times[plan] * 1e6:.2f}", f"{speed / 1e12:.2f}", f"{100 * speed / roof:.0f}", shape)
            table.add_row(name, str(rows), *cells)
            total += times[plan]
        table.add_row("all", str(rows), f"{total * 1e6:.1f}", "", "", f"{rows / total / LAYERS:.0f} tokens/s")
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
