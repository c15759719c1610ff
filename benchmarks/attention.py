"""Attention on a GPU: `python -m benchmarks.attention`.

Decoding: microseconds for each layer (rotation, cache write and attention together), replayed from a CUDA
graph over the caches of several layers so that nothing stays in the processor's own cache; and the share of
the measured copy bandwidth at which the stored keys and values pass by. Prefill: microseconds for each layer
of a first chunk. Shapes are those of Llama-2-7B and Llama-3-8B.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from exlm import spec
from exlm.cache.coded import CodedLayer, Rotated
from exlm.cache.dense import DenseLayer
from exlm.cache.layer import PAGE, Layer, LayerShape
from exlm.kernels.backend import Attend
from exlm.kernels.triton import TritonBackend
from exlm.nn import Batch

from .gpu import copy_speed, replayed

HEAD = 128
SHAPES = {"Llama-2-7B": (32, 32), "Llama-3-8B": (32, 8)}
CODERS = {"Q8": Rotated(8), "Q4": Rotated(4)}
CACHES = ("FP16", *CODERS)
L2 = 256 << 20
"""Bytes of keys and values a replay must pass to miss every processor's cache."""


class Step(NamedTuple):
    """The new heads of a batch, a cache for each of a few layers, and where the rows stand."""

    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    layers: list[Layer]
    where: Batch


def layer(cache: str, pages: int, kv_heads: int, device: torch.device) -> Layer:
    """A cache layer full of random numbers."""
    if cache == "FP16":
        made: Layer = DenseLayer(pages, PAGE, kv_heads, HEAD, torch.float16, device)
    else:
        coder = CODERS[cache]
        made = CodedLayer(pages, PAGE, LayerShape(kv_heads, HEAD), coder, coder, device)
    for tensor in made.tensors:
        if tensor.dtype is torch.uint8:
            tensor.random_(0, 256)
        else:
            tensor.uniform_(0.01, 0.05)
    return made


def prepare(cache: str, heads: tuple[int, int], rows: int, past: int, tokens: int) -> Step:
    """Rows of `past` stored tokens in shuffled pages, and new tokens for them."""
    device = torch.device("cuda")
    width = -(-(past + tokens) // PAGE)
    one = layer(cache, rows * width, heads[1], device)
    size = sum(tensor.nbytes for tensor in one.tensors)
    layers = [one, *(layer(cache, rows * width, heads[1], device) for _ in range(min(31, L2 // size)))]
    before = torch.full((rows,), past, device=device)
    positions = before[:, None] + torch.arange(tokens, device=device)
    pages = torch.randperm(rows * width, device=device).view(rows, width)
    where = Batch(positions, positions, before, pages, past + tokens, even=True)
    q, k, v = (
        torch.randn(rows, tokens, n, HEAD, dtype=torch.float16, device=device) for n in (*heads, heads[1])
    )
    return Step((q, k, v), layers, where)


def kernel(heads: tuple[int, int]) -> Attend:
    """What a model of this shape gets with EXLM_TRITON=1."""
    backend = TritonBackend(torch.device("cuda", 0), torch.float16)
    rope = spec.Rope(1e4, HEAD)
    attn = spec.Attention(*heads, HEAD, rope, HEAD**-0.5)
    return backend.attention(attn, backend.rotation(rope, 1 << 14))


def time_of(step: Step, attend: Attend) -> float:
    """Microseconds for each layer."""

    def work() -> None:
        for one in step.layers:
            attend(*step.heads, one, step.where)

    return replayed(work, 20) * 1e6 / len(step.layers)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--past", type=int, nargs="*", default=[512, 8000])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048])
    chosen = parser.parse_args()
    console, speed = Console(width=110), copy_speed(torch.device("cuda", 0)) / 1e6
    table = Table("shape", "cache", "past", *(f"{rows} rows" for rows in chosen.rows))
    table.title = f"decoding, µs for each layer and share of the copy bandwidth ({speed / 1e6:.2f} TB/s)"
    for name, heads in SHAPES.items():
        attend = kernel(heads)
        for past in chosen.past:
            for cache in CACHES:
                cells = []
                for rows in chosen.rows:
                    step = prepare(cache, heads, rows, past, 1)
                    stored = sum(t.nbytes for t in step.layers[0].tensors)
                    used = stored * past / (step.where.pages.shape[1] * PAGE)
                    took = time_of(step, attend)
                    cells.append(f"{took:.1f}  {used / took / speed:.0%}")
                table.add_row(name, cache, str(past), *cells)
    console.print(table)
    table = Table("shape", "cache", *(f"{tokens} tokens" for tokens in chosen.prefill))
    table.title = "prefill of a first chunk, µs for each layer"
    for name, heads in SHAPES.items():
        attend = kernel(heads)
        for cache in CACHES:
            steps = (prepare(cache, heads, 1, 0, tokens) for tokens in chosen.prefill)
            table.add_row(name, cache, *(f"{time_of(step, attend):.0f}" for step in steps))
    console.print(table)


if __name__ == "__main__":
    main()
