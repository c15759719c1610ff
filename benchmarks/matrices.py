"""GEMM kernels on the packed matrices of a model, beside the copy bandwidth: `python -m
benchmarks.matrices`.

Every matrix is a different one, so that none is in L2; times are of replayed CUDA graphs.
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

from exlm.bench.synthetic import RandomTensors, SyntheticFormat, synthetic_format
from exlm.formats import PackedWeight
from exlm.kernels.cuda import gemm_m16, gemm_m64
from exlm.kernels.cuda.gemm_m16 import GemmM16, RmsNorm, TileConfig
from exlm.kernels.cuda.gemm_m64 import GemmM64, TileConfigM64
from exlm.kernels.cuda.module_cache import ModuleCache, compile_cached, target
from exlm.kernels.cuda.prepacked_acts import MAX_M16
from exlm.kernels.cuda.repack import GpuRepacker, repack
from exlm.kernels.cuda.weight_tile import MmaWeight

from .gpu import copy_bandwidth, replay_seconds

LAYERS = 32
Shapes = dict[str, tuple[int, list[int], bool]]
"""(inputs, outputs, whether a norm is fused before them)"""

MODELS: dict[str, Shapes] = {
    "llama-2-7b": {
        "q, k, v": (4096, [4096] * 3, True),
        "o": (4096, [4096], False),
        "gate, up": (4096, [11008] * 2, True),
        "down": (11008, [4096], False),
    },
    "qwen3.5-27b": {
        "q, k, v, z": (5120, [2048, 2048, 6144, 6144], True),
        "q, k, v, gate": (5120, [6144, 1024, 1024, 6144], True),
        "o": (6144, [5120], False),
        "gate, up": (5120, [17408] * 2, True),
        "down": (17408, [5120], False),
    },
}
CONFIGS = [
    TileConfig(*one)
    for one in (
        (4, 8, 2), (2, 16, 2), (4, 9, 2), (2, 12, 2), (4, 5, 2), (4, 6, 2), (3, 9, 2),
        (3, 8, 2), (2, 24, 2), (6, 9, 2), (6, 12, 2), (6, 16, 2), (3, 8, 3),
    )
]  # fmt: skip
CONFIGS_M64 = [
    *(TileConfigM64(1, 8, 3, 2, split_k) for split_k in (0, 1, 2, 3, 4, 8)),
    *(TileConfigM64(1, 4, 4, 4, split_k) for split_k in (1, 2, 4)),
    TileConfigM64(2, 8, 4, 1),
    TileConfigM64(2, 4, 4, 2),
    *(TileConfigM64(2, 4, 3, 4, split_k) for split_k in (1, 2)),
    TileConfigM64(2, 4, 2, 5, 2),
    TileConfigM64(2, 8, 3, 2, 1),
    TileConfigM64(2, 12, 3, 1, 1),
    *(TileConfigM64(2, 16, 3, 1, split_k) for split_k in (1, 2)),
]

Work = Callable[[], None]


def random_weight(
    modules: ModuleCache, inputs: int, outputs: int, fmt: SyntheticFormat, random: RandomTensors
) -> MmaWeight:
    """A random matrix in a format, repacked for the kernels."""
    weight = fmt.weight(inputs, outputs, random, False, 0.02)
    assert isinstance(weight, PackedWeight)
    return repack(weight, GpuRepacker(modules))


def tile_configs(rows: int) -> Sequence[TileConfig]:
    """The tile configurations to try for so many rows."""
    return CONFIGS if rows <= MAX_M16 else CONFIGS_M64


def bind_gemm(
    modules: ModuleCache, weights: list[MmaWeight], norm: RmsNorm | None, plan: TileConfig
) -> GemmM16 | GemmM64:
    """The GEMM of fused matrices, with a tile configuration."""
    act = "silu" if len(weights) == 2 else None
    if isinstance(plan, TileConfigM64):
        return GemmM64(GemmM16(modules, weights, norm, act), plan)
    return GemmM16(modules, weights, norm, act, plan)


def layer_chain(modules: ModuleCache, layers: list[list[MmaWeight]], norm: bool, plan: TileConfig, rows: int) -> Work:
    """Multiply each matrix with the same rows, one after the other."""
    inputs, device = layers[0][0].in_features, modules.device
    x = torch.randn(rows, inputs, device=device).half()
    normal = RmsNorm(torch.rand(inputs, device=device), 1e-5) if norm else None
    products = [bind_gemm(modules, one, normal, plan) for one in layers]
    out = [torch.empty(rows, width, device=device).half() for width in products[0].output_widths]
    residual = None if norm else out[0].clone()

    def run() -> None:
        for product in products:
            product(x, out, residual)

    return run


def compile_ahead(
    modules: ModuleCache, shapes: Shapes, model: dict[str, list[list[MmaWeight]]], rows: list[int]
) -> None:
    """Compile every kernel that will be needed, in parallel."""
    device = target(*torch.cuda.get_device_capability(modules.device))
    needed = set()
    for name, layers in model.items():
        inputs, _, normed = shapes[name]
        normal = RmsNorm(torch.ones(inputs, device=modules.device), 1e-5) if normed else None
        for number, plan in ((count, plan) for count in rows for plan in tile_configs(count)):
            source = gemm_m64.SOURCE if isinstance(plan, TileConfigM64) else gemm_m16.SOURCE
            product = bind_gemm(modules, layers[0], normal, plan)
            needed.add((source, tuple(sorted(product.defines(number).items()))))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: compile_cached(one[0], one[1], device, modules.cache), needed))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrices", description="Packed matrices.")
    parser.add_argument("--model", default="llama-2-7b", choices=list(MODELS))
    parser.add_argument("--only", nargs="*", help="of its matrices")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--form", default="exl2", help="exl2, gptq or gguf")
    parser.add_argument("--bits", type=float, help="bits per weight; default: the format's usual")
    parser.add_argument("--all", action="store_true", help="print the time of every configuration")
    chosen = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    modules = ModuleCache(device, Path(gettempdir()) / "exlm-kernels")
    roof = copy_bandwidth(device)
    shapes = {name: one for name, one in MODELS[chosen.model].items() if not chosen.only or name in chosen.only}
    stored, random = synthetic_format(chosen.form, chosen.bits), RandomTensors(1, device)
    model = {
        name: [[random_weight(modules, inputs, width, stored, random) for width in widths] for _ in range(LAYERS)]
        for name, (inputs, widths, _) in shapes.items()
    }
    compile_ahead(modules, shapes, model, chosen.rows)
    title = f"{stored}; a copy moves {roof / 1e12:.2f} TB/s"
    table = Table(
        "matrix", "rows", "us", "TB/s", "% of copy", "warp tiles, warps, stages (, min blocks, split-K)", title=title
    )
    for rows in chosen.rows:
        total = 0.0
        for name, layers in model.items():
            inputs, widths, norm = shapes[name]
            size = sum(stored.nbytes(inputs, width, False) for width in widths)
            times = {
                plan: replay_seconds(layer_chain(modules, layers, norm, plan, rows)) / LAYERS
                for plan in tile_configs(rows)
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
