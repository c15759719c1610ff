"""Attention kernels on a GPU: `python -m benchmarks.attention`; `--plans` compares launch configurations.

Decode: microseconds per layer (RoPE, cache write and attention together), replayed from a CUDA graph over the
caches of several layers, so that nothing stays in L2; and the bandwidth at which keys and values are read, as
a share of the measured copy bandwidth. Prefill: microseconds per layer of a first chunk. Every kernel is
checked against plain torch before it is timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from exlm import spec
from exlm.kernels.artifact_cache import ArtifactCache
from exlm.kernels.cuda import attention as cuda
from exlm.kernels.cuda.module_cache import ModuleCache, compile_cached
from exlm.kernels.interface import AttentionFn, RopeFn
from exlm.kernels.reference import ReferenceBackend
from exlm.kernels.triton import TritonBackend
from exlm.kvcache import PAGE_SIZE, CacheLayer, LayerShape
from exlm.kvcache.dense import DenseLayer
from exlm.kvcache.quantized import HadamardQuantizer, QuantizedLayer
from exlm.nn import Batch

from .gpu import copy_bandwidth, replay_seconds

Heads = tuple[int, int, int]
"""Query heads, kv heads, head dim."""

SHAPES: dict[str, Heads] = {
    "llama-2-7b": (32, 32, 128),
    "llama-3-8b": (32, 8, 128),
    "gemma-2-9b": (16, 8, 256),
    "qwen3.5-27b": (24, 4, 256),
}
QUANTIZERS = {"Q8": HadamardQuantizer(8), "Q4": HadamardQuantizer(4)}
CACHES = ("FP16", *QUANTIZERS)
MAX_POSITIONS = 1 << 17
REPLAY_BYTES = 256 << 20
"""Bytes of keys and values that a replay must read so that none are in L2."""

FOLDER = Path(gettempdir()) / f"exlm-benchmark-{os.getuid()}"
WARP_CONFIGS = {
    "FP16": [(4, 1, 3), (8, 1, 1), (4, 1, 4)],
    "Q8": [(4, 1, 3), (4, 1, 4), (4, 2, 2)],
    "Q4": [(4, 1, 4), (4, 2, 3), (4, 4, 2)],
}
"""Warps, KV_M16 and resident blocks of the configurations to compare."""

WIDE_WARP_CONFIGS = [(8, 1, 1), (4, 1, 2), (4, 1, 1)]
"""The same for heads of 256 numbers."""

SPLITS = [(64, 32, 1), (64, 32, 2), (128, 32, 2), (256, 32, 2)]
"""Smallest split, most splits and waves."""


class Step(NamedTuple):
    """The inputs of one decode step or prefill chunk: new heads, caches of several layers, positions."""

    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    layers: list[CacheLayer]
    metadata: Batch


def layer(cache: str, pages: int, heads: Heads, device: torch.device) -> CacheLayer:
    """A cache layer full of random numbers."""
    _, kv_heads, head_dim = heads
    if cache == "FP16":
        cache_layer: CacheLayer = DenseLayer(pages, PAGE_SIZE, kv_heads, head_dim, torch.float16, device)
    else:
        quantizer = QUANTIZERS[cache]
        cache_layer = QuantizedLayer(pages, PAGE_SIZE, LayerShape(kv_heads, head_dim), quantizer, quantizer, device)
    for tensor in cache_layer.tensors:
        if tensor.dtype is torch.uint8:
            tensor.random_(0, 256)
        else:
            tensor.uniform_(0.01, 0.05)
    return cache_layer


def make_step(cache: str, heads: Heads, rows: int, past: int, tokens: int, layers: int = 32) -> Step:
    """Rows of `past` stored tokens in shuffled pages, and new tokens for them."""
    device = torch.device("cuda")
    width = -(-(past + tokens) // PAGE_SIZE)
    first_layer = layer(cache, rows * width, heads, device)
    size = sum(tensor.nbytes for tensor in first_layer.tensors)
    extra_layers = min(layers - 1, REPLAY_BYTES // size)
    before = torch.full((rows,), past, device=device)
    positions = before[:, None] + torch.arange(tokens, device=device)
    pages = torch.randperm(rows * width, device=device).view(rows, width)
    metadata = Batch(
        ids=positions, positions=positions, past_lens=before, page_table=pages, max_kv_len=past + tokens, uniform=True
    )
    query_heads, kv_heads, head_dim = heads
    counts = query_heads, kv_heads, kv_heads
    q, k, v = (torch.randn(rows, tokens, n, head_dim, dtype=torch.float16, device=device) for n in counts)
    return Step(
        (q, k, v),
        [first_layer, *(layer(cache, rows * width, heads, device) for _ in range(extra_layers))],
        metadata,
    )


class Kernels:
    """The attention kernels of a device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.triton = TritonBackend(self.device, torch.float16)
        self.plain = ReferenceBackend(self.device, torch.float16)
        self.counters = cuda.SplitCounters(ModuleCache(self.device, FOLDER), self.triton.limits.num_sms)

    def attn(self, heads: Heads) -> spec.Attention:
        """The attention layer."""
        return spec.Attention(*heads, spec.Rope(1e4, heads[2]), heads[2] ** -0.5)

    def rope(self, heads: Heads) -> RopeFn:
        """RoPE with tables."""
        return self.triton.rope(spec.Rope(1e4, heads[2]), MAX_POSITIONS)

    def triton_attention(self, heads: Heads) -> AttentionFn:
        """The Triton kernels."""
        return self.triton.attention(self.attn(heads), self.rope(heads))

    def cuda_attention(self, heads: Heads, plan: cuda.SplitConfig | None = None) -> AttentionFn:
        """The CUDA kernels."""
        return cuda.PagedDecodeAttention(
            self.counters, self.attn(heads), self.rope(heads), self.triton_attention(heads), plan
        )

    def error(self, heads: Heads, cache: str, attend: AttentionFn) -> float:
        """The largest error in a few cases, compared with plain torch."""
        reference = self.plain.attention(self.attn(heads), self.plain.rope(spec.Rope(1e4, heads[2]), MAX_POSITIONS))
        worst = 0.0
        for past, tokens in ((77, 1), (5000, 1), (300, 5)):
            (q, k, v), (kept,), metadata = make_step(cache, heads, 2, past, tokens, layers=1)
            want = reference(q, k, v, kept.clone(), metadata).double()
            got = attend(q, k, v, kept.clone(), metadata).double()
            worst = max(worst, float((got - want).norm() / want.norm()))
        return worst


def layer_microseconds(step: Step, attend: AttentionFn) -> float:
    """Microseconds per layer."""

    def work() -> None:
        for one in step.layers:
            attend(*step.heads, one, step.metadata)

    return replay_seconds(work, 20) * 1e6 / len(step.layers)


def bandwidth_share(step: Step, took: float, speed: float) -> float:
    """The share of the copy bandwidth, which is given in bytes per microsecond."""
    stored = sum(t.nbytes for t in step.layers[0].tensors)
    past = step.metadata.max_kv_len - step.heads[0].shape[1]
    return stored * past / (step.metadata.page_table.shape[1] * PAGE_SIZE) / took / speed


def decode_tables(
    kernels: Kernels, shapes: list[str], rows: list[int], pasts: list[int], speed: float
) -> Iterator[Table]:
    """Tables of decode times with the default configurations, beside Triton."""
    table = Table("shape", "cache", "past", "error", *(f"{n} rows" for n in rows))
    table.title = f"decoding, µs for each layer (share of {speed / 1e6:.2f} TB/s) | Triton's µs"
    for name, past, cache in product(shapes, pasts, CACHES):
        heads = SHAPES[name]
        cuda_attention, triton_attention = kernels.cuda_attention(heads), kernels.triton_attention(heads)
        cells = [f"{kernels.error(heads, cache, cuda_attention):.0e}"]
        for n in rows:
            step = make_step(cache, heads, n, past, 1)
            took = layer_microseconds(step, cuda_attention)
            triton = layer_microseconds(step, triton_attention)
            cells.append(f"{took:.1f} ({bandwidth_share(step, took, speed):.0%}) | {triton:.1f}")
        table.add_row(name, cache, str(past), *cells)
    yield table


def split_configs(cache: str, head_dim: int) -> Iterator[cuda.SplitConfig]:
    """Every launch configuration to compare."""
    wide = head_dim > cuda.MAX_NARROW_HEAD_DIM
    for warps, splits in product(WIDE_WARP_CONFIGS if wide else WARP_CONFIGS[cache], SPLITS):
        yield cuda.SplitConfig(*warps, *splits)


def compile_ahead(kernels: Kernels, shapes: list[str]) -> None:
    """Compile the kernels of every configuration, in several processes."""
    major, minor = torch.cuda.get_device_capability(kernels.device)
    wanted = set()
    for heads, cache in product([SHAPES[name] for name in shapes], CACHES):
        pages = layer(cache, 1, heads, kernels.device).kv_pages
        for plan, n8_tiles in product(split_configs(cache, heads[2]), (1, 2)):
            chosen = cuda.attn_defines(kernels.attn(heads), pages, plan, n8_tiles, False)
            if n8_tiles == 1 or (5 * heads[0] > 8 * heads[1] and heads[2] <= cuda.MAX_NARROW_HEAD_DIM):
                wanted.add(tuple(sorted(chosen.items())))
    folder = ArtifactCache(FOLDER)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        compiled = [
            pool.submit(compile_cached, cuda.SOURCE, constants, f"sm_{major}{minor}", folder) for constants in wanted
        ]
        for future in compiled:
            future.result()


def config_tables(kernels: Kernels, shapes: list[str], speed: float) -> Iterator[Table]:
    """Tables of every configuration at every size."""
    compile_ahead(kernels, shapes)
    sizes = [(1, 512), (1, 8000), (1, 65000), (8, 512), (32, 512)]
    for name, cache in product(shapes, CACHES):
        heads = SHAPES[name]
        table = Table("warps/KV_M16/blocks, split/splits/waves", "error", *(f"{n} × {past}" for n, past in sizes))
        table.title = f"{name} {cache}: µs for each layer (share of {speed / 1e6:.2f} TB/s)"
        steps = [make_step(cache, heads, n, past, 1) for n, past in sizes]
        times = [layer_microseconds(step, kernels.triton_attention(heads)) for step in steps]
        cells = [
            f"{took:.1f} ({bandwidth_share(step, took, speed):.0%})" for step, took in zip(steps, times, strict=True)
        ]
        table.add_row("Triton", "", *cells)
        for plan in split_configs(cache, heads[2]):
            cuda_attention = kernels.cuda_attention(heads, plan)
            cells = [f"{kernels.error(heads, cache, cuda_attention):.0e}"]
            for step in steps:
                took = layer_microseconds(step, cuda_attention)
                cells.append(f"{took:.1f} ({bandwidth_share(step, took, speed):.0%})")
            form = f"{plan.warps}/{plan.kv_m16}/{plan.min_blocks}, {plan.min_split}/{plan.max_splits}/{plan.max_waves}"
            table.add_row(form, *cells)
        yield table


def prefill_tables(kernels: Kernels, shapes: list[str], sizes: list[int]) -> Iterator[Table]:
    """The table of prefill times of a first chunk."""
    table = Table("shape", "cache", *(f"{tokens} tokens" for tokens in sizes))
    table.title = "prefill of a first chunk, µs for each layer"
    for name, cache in product(shapes, CACHES):
        heads = SHAPES[name]
        steps = (make_step(cache, heads, 1, 0, tokens) for tokens in sizes)
        table.add_row(
            name, cache, *(f"{layer_microseconds(step, kernels.cuda_attention(heads)):.0f}" for step in steps)
        )
    yield table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--past", type=int, nargs="*", default=[512, 8000])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048])
    parser.add_argument("--plans", action="store_true", help="compare launch configurations")
    chosen = parser.parse_args()
    console, kernels = Console(width=110), Kernels()
    speed = copy_bandwidth(kernels.device) / 1e6
    if chosen.plans:
        for table in config_tables(kernels, chosen.shapes, speed):
            console.print(table)
        return
    for table in decode_tables(kernels, chosen.shapes, chosen.rows, chosen.past, speed):
        console.print(table)
    for table in prefill_tables(kernels, chosen.shapes, chosen.prefill):
        console.print(table)


if __name__ == "__main__":
    main()
