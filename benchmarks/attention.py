"""Attention kernels on a GPU: `python -m benchmarks.attention`; `--plans` compares launch configurations.

Decode: microseconds per layer (RoPE, cache write and attention together), replayed from a CUDA graph over the
caches of several layers, so that nothing stays in L2; and the bandwidth at which keys and values are read, as
a share of the measured copy bandwidth. Prefill: microseconds per layer of a first chunk. Shapes are those of
Llama-2-7B and Llama-3-8B. Every kernel is checked against plain torch before it is timed.
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
from exlm.kernels.interface import AttentionFn
from exlm.kernels.reference import ReferenceBackend
from exlm.kernels.triton import TritonBackend
from exlm.kvcache.dense import DenseLayer
from exlm.kvcache.layer import PAGE_SIZE, CacheLayer, LayerShape
from exlm.kvcache.quantized import HadamardQuantizer, QuantizedLayer
from exlm.nn import Batch

from .gpu import copy_bandwidth, replay_seconds

HEAD = 128
SHAPES = {"Llama-2-7B": (32, 32), "Llama-3-8B": (32, 8)}
QUANTIZERS = {"Q8": HadamardQuantizer(8), "Q4": HadamardQuantizer(4)}
CACHES = ("FP16", *QUANTIZERS)
REPLAY_BYTES = 256 << 20
"""Bytes of keys and values that a replay must read so that none are in L2."""

FOLDER = Path(gettempdir()) / f"exlm-benchmark-{os.getuid()}"
WARP_CONFIGS = {
    "FP16": [(4, 1, 3), (8, 1, 1), (4, 1, 4)],
    "Q8": [(4, 1, 3), (4, 1, 4), (4, 2, 2)],
    "Q4": [(4, 1, 4), (4, 2, 3), (4, 4, 2)],
}
"""Warps, KV_M16 and resident blocks of the configurations to compare."""
SPLITS = [(64, 32, 1), (64, 32, 2), (128, 32, 2), (256, 32, 2)]
"""Smallest split, most splits and waves."""


class Step(NamedTuple):
    """The inputs of one decode step or prefill chunk: new heads, caches of several layers, positions."""

    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    layers: list[CacheLayer]
    metadata: Batch


def layer(cache: str, pages: int, kv_heads: int, device: torch.device) -> CacheLayer:
    """A cache layer full of random numbers."""
    if cache == "FP16":
        cache_layer: CacheLayer = DenseLayer(pages, PAGE_SIZE, kv_heads, HEAD, torch.float16, device)
    else:
        quantizer = QUANTIZERS[cache]
        cache_layer = QuantizedLayer(pages, PAGE_SIZE, LayerShape(kv_heads, HEAD), quantizer, quantizer, device)
    for tensor in cache_layer.tensors:
        if tensor.dtype is torch.uint8:
            tensor.random_(0, 256)
        else:
            tensor.uniform_(0.01, 0.05)
    return cache_layer


def make_step(cache: str, heads: tuple[int, int], rows: int, past: int, tokens: int, layers: int = 32) -> Step:
    """Rows of `past` stored tokens in shuffled pages, and new tokens for them."""
    device = torch.device("cuda")
    width = -(-(past + tokens) // PAGE_SIZE)
    first_layer = layer(cache, rows * width, heads[1], device)
    size = sum(tensor.nbytes for tensor in first_layer.tensors)
    extra_layers = min(layers - 1, REPLAY_BYTES // size)
    before = torch.full((rows,), past, device=device)
    positions = before[:, None] + torch.arange(tokens, device=device)
    pages = torch.randperm(rows * width, device=device).view(rows, width)
    metadata = Batch(
        ids=positions, positions=positions, past_lens=before, page_table=pages, max_kv_len=past + tokens, uniform=True
    )
    q, k, v = (torch.randn(rows, tokens, n, HEAD, dtype=torch.float16, device=device) for n in (*heads, heads[1]))
    return Step(
        (q, k, v),
        [first_layer, *(layer(cache, rows * width, heads[1], device) for _ in range(extra_layers))],
        metadata,
    )


class Kernels:
    """The attention kernels for one model shape."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.triton = TritonBackend(self.device, torch.float16)
        self.plain = ReferenceBackend(self.device, torch.float16)
        self.rope = spec.Rope(1e4, HEAD)
        self.rope_fn = self.triton.rope(self.rope, 1 << 14)
        self.counters = cuda.SplitCounters(ModuleCache(self.device, FOLDER), self.triton.limits.num_sms)

    def attn(self, heads: tuple[int, int]) -> spec.Attention:
        """The attention layer."""
        return spec.Attention(*heads, HEAD, self.rope, HEAD**-0.5)

    def triton_attention(self, heads: tuple[int, int]) -> AttentionFn:
        """The Triton kernels."""
        return self.triton.attention(self.attn(heads), self.rope_fn)

    def cuda_attention(self, heads: tuple[int, int], plan: cuda.SplitConfig | None = None) -> AttentionFn:
        """The CUDA kernels."""
        return cuda.PagedDecodeAttention(
            self.counters, self.attn(heads), self.rope_fn, self.triton_attention(heads), plan
        )

    def error(self, heads: tuple[int, int], cache: str, attend: AttentionFn) -> float:
        """The largest error in a few cases, compared with plain torch."""
        reference = self.plain.attention(self.attn(heads), self.plain.rope(self.rope, 1 << 14))
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


def decode_tables(kernels: Kernels, rows: list[int], pasts: list[int], speed: float) -> Iterator[Table]:
    """Tables of decode times with the default configurations, beside Triton."""
    table = Table("shape", "cache", "past", "error", *(f"{n} rows" for n in rows))
    table.title = f"decoding, µs for each layer (share of {speed / 1e6:.2f} TB/s) | Triton's µs"
    for (name, heads), past, cache in product(SHAPES.items(), pasts, CACHES):
        cuda_attention, triton_attention = kernels.cuda_attention(heads), kernels.triton_attention(heads)
        cells = [f"{kernels.error(heads, cache, cuda_attention):.0e}"]
        for n in rows:
            step = make_step(cache, heads, n, past, 1)
            took = layer_microseconds(step, cuda_attention)
            triton = layer_microseconds(step, triton_attention)
            cells.append(f"{took:.1f} ({bandwidth_share(step, took, speed):.0%}) | {triton:.1f}")
        table.add_row(name, cache, str(past), *cells)
    yield table


def split_configs(cache: str) -> Iterator[cuda.SplitConfig]:
    """Every launch configuration to compare."""
    for warps, splits in product(WARP_CONFIGS[cache], SPLITS):
        yield cuda.SplitConfig(*warps, *splits)


def compile_ahead(kernels: Kernels) -> None:
    """Compile the kernels of every configuration, in several processes."""
    major, minor = torch.cuda.get_device_capability(kernels.device)
    wanted = set()
    for heads, cache in product(SHAPES.values(), CACHES):
        pages = layer(cache, 1, heads[1], kernels.device).kv_pages
        for plan, n8_tiles in product(split_configs(cache), (1, 2)):
            chosen = cuda.attn_defines(kernels.attn(heads), pages, plan, n8_tiles, False)
            if n8_tiles == 1 or 5 * heads[0] > 8 * heads[1]:
                wanted.add(tuple(sorted(chosen.items())))
    folder = ArtifactCache(FOLDER)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        compiled = [
            pool.submit(compile_cached, cuda.SOURCE, constants, f"sm_{major}{minor}", folder) for constants in wanted
        ]
        for future in compiled:
            future.result()


def config_tables(kernels: Kernels, speed: float) -> Iterator[Table]:
    """Tables of every configuration at every size."""
    compile_ahead(kernels)
    sizes = [(1, 512), (1, 8000), (8, 512), (64, 512)]
    for (name, heads), cache in product(SHAPES.items(), CACHES):
        table = Table("warps/KV_M16/blocks, split/splits/waves", "error", *(f"{n} × {past}" for n, past in sizes))
        table.title = f"{name} {cache}: µs for each layer (share of {speed / 1e6:.2f} TB/s)"
        steps = [make_step(cache, heads, n, past, 1) for n, past in sizes]
        times = [layer_microseconds(step, kernels.triton_attention(heads)) for step in steps]
        cells = [
            f"{took:.1f} ({bandwidth_share(step, took, speed):.0%})" for step, took in zip(steps, times, strict=True)
        ]
        table.add_row("Triton", "", *cells)
        for plan in split_configs(cache):
            cuda_attention = kernels.cuda_attention(heads, plan)
            cells = [f"{kernels.error(heads, cache, cuda_attention):.0e}"]
            for step in steps:
                took = layer_microseconds(step, cuda_attention)
                cells.append(f"{took:.1f} ({bandwidth_share(step, took, speed):.0%})")
            form = f"{plan.warps}/{plan.kv_m16}/{plan.min_blocks}, {plan.min_split}/{plan.max_splits}/{plan.max_waves}"
            table.add_row(form, *cells)
        yield table


def prefill_tables(kernels: Kernels, sizes: list[int]) -> Iterator[Table]:
    """The table of prefill times of a first chunk."""
    table = Table("shape", "cache", *(f"{tokens} tokens" for tokens in sizes))
    table.title = "prefill of a first chunk, µs for each layer"
    for (name, heads), cache in product(SHAPES.items(), CACHES):
        steps = (make_step(cache, heads, 1, 0, tokens) for tokens in sizes)
        table.add_row(
            name, cache, *(f"{layer_microseconds(step, kernels.cuda_attention(heads)):.0f}" for step in steps)
        )
    yield table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--past", type=int, nargs="*", default=[512, 8000])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048])
    parser.add_argument("--plans", action="store_true", help="compare launch configurations")
    chosen = parser.parse_args()
    console, kernels = Console(width=110), Kernels()
    speed = copy_bandwidth(kernels.device) / 1e6
    if chosen.plans:
        for table in config_tables(kernels, speed):
            console.print(table)
        return
    for table in decode_tables(kernels, chosen.rows, chosen.past, speed):
        console.print(table)
    for table in prefill_tables(kernels, chosen.prefill):
        console.print(table)


if __name__ == "__main__":
    main()
