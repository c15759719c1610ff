"""Recurrent mixers on a GPU: `python -m benchmarks.recurrent`; `--configs` compares how states are divided.

Microseconds per layer of everything between a mixer's projections, replayed from a CUDA graph. Decode: over the states
of several layers, so that nothing stays in L2, and the bandwidth at which states are read and written, as a share of
the measured copy bandwidth. Prefill: one row's prompt from an empty state, and microseconds for each of its tokens.
Every kernel is checked against plain torch before it is timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from exlm import spec
from exlm.errors import Unsupported
from exlm.kernels import interface as b
from exlm.kernels.cuda import recurrent as cuda
from exlm.kernels.cuda.attention import SplitCounters
from exlm.kernels.cuda.module_cache import ModuleCache
from exlm.kernels.reference import ReferenceBackend
from exlm.nn import Batch

from .gpu import copy_bandwidth, replay_seconds

Mixer = spec.DeltaNet | spec.Mamba2 | spec.ShortConv
Kernel = Callable[[tuple[Tensor, ...], b.RecurrentState | None, Batch], Tensor]

SHAPES: dict[str, Mixer] = {
    "qwen3.5-27b": spec.DeltaNet(16, 48, 128, 128, 4, 1e-6),
    "qwen3-next": spec.DeltaNet(16, 32, 128, 128, 4, 1e-6),
    "kimi-linear": spec.DeltaNet(32, 32, 128, 128, 4, 1e-5, decay="channel", gate_act="sigmoid"),
    "nemotron-nano-9b": spec.Mamba2(128, 80, 8, 128, 4, spec.Norm(eps=1e-5), norm_groups=8),
    "lfm2-1.2b": spec.ShortConv(2048, 3),
}
SCANS = {spec.DeltaNet: cuda.DELTA_NET_SCAN, spec.Mamba2: cuda.MAMBA2_SCAN}
REPLAY_BYTES = 256 << 20
"""Bytes of states that a replay must read so that none are in L2."""

MAX_LAYERS = 64
FOLDER = Path(gettempdir()) / f"exlm-benchmark-{os.getuid()}"


class Layer:
    """A mixer with random parameters, bound by the CUDA kernels and by plain torch."""

    def __init__(self, counters: SplitCounters, mixer: Mixer, scan: cuda.ScanConfig | None = None) -> None:
        self.mixer, self.device = mixer, counters.modules.device
        plain = ReferenceBackend(self.device, torch.float32)
        fast: Any  # a kernel of one of three signatures
        slow: Any
        if isinstance(mixer, spec.DeltaNet):
            channels = 2 * mixer.key_width + mixer.value_width
            delta = b.DeltaNetParams(
                self._randn(channels, mixer.conv_kernel),
                self._randn(mixer.value_heads),
                self._randn(mixer.decay_width),
                self._randn(mixer.value_dim),
            )
            fast = cuda.CudaDeltaNet(counters.modules, mixer, delta, scan or cuda.DELTA_NET_SCAN)
            slow = plain.delta_net(mixer, delta)
            self.widths = [channels, mixer.value_width, mixer.decay_width, mixer.value_heads]
        elif isinstance(mixer, spec.Mamba2):
            mamba = b.Mamba2Params(
                self._randn(mixer.conv_channels, mixer.conv_kernel),
                self._randn(mixer.conv_channels),
                self._randn(mixer.heads),
                self._randn(mixer.heads),
                self._randn(mixer.heads),
                self._randn(mixer.width),
            )
            fast = cuda.CudaMamba2(counters, mixer, mamba, scan or cuda.MAMBA2_SCAN)
            slow = plain.mamba2(mixer, mamba)
            self.widths = [mixer.width + mixer.conv_channels + mixer.heads]
        else:
            weight = self._randn(mixer.width, mixer.conv_kernel)
            fast = cuda.CudaShortConv(counters.modules, mixer, weight, None)
            slow = plain.short_conv(mixer, weight, None)
            self.widths = [3 * mixer.width]
        self.kernel: Kernel = lambda inputs, state, batch: fast(*inputs, state, batch)
        self.reference: Kernel = lambda inputs, state, batch: slow(*inputs, state, batch)

    def _randn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device)

    def inputs(self, rows: int, tokens: int) -> tuple[Tensor, ...]:
        """Projections."""
        return tuple(self._randn(rows, tokens, width).half() for width in self.widths)

    def states(self, rows: int) -> b.RecurrentState:
        """Two slots for each row."""
        shape = self.mixer.state
        matrix = None if shape.matrix is None else self._randn(2 * rows, *shape.matrix)
        return b.RecurrentState(self._randn(2 * rows, *shape.conv).half(), matrix)

    def batch(self, rows: int, tokens: int, fresh: bool) -> Batch:
        """Each row from one of its slots, or from nothing, to the other."""
        row = torch.arange(rows, device=self.device)
        targets = torch.full((rows, tokens), -1, device=self.device)
        targets[:, -1] = row + rows
        zeros = torch.zeros(rows, tokens, dtype=torch.int64, device=self.device)
        return Batch(
            ids=zeros, positions=zeros, past_lens=zeros[:, 0], page_table=zeros, max_kv_len=tokens, uniform=False,
            state_slots=b.StateSlots(torch.full_like(row, -1) if fresh else row, targets),
        )  # fmt: skip

    def error(self) -> float:
        """The largest error of an output or a state, compared with plain torch."""
        worst = 0.0
        for tokens in (1, 5, 40):
            inputs, batch, state = self.inputs(2, tokens), self.batch(2, tokens, False), self.states(2)
            copy = b.RecurrentState(state.conv.float(), None if state.matrix is None else state.matrix.clone())
            pairs = [(self.kernel(inputs, state, batch), self.reference(inputs, copy, batch)), (state.conv, copy.conv)]
            if state.matrix is not None and copy.matrix is not None:
                pairs.append((state.matrix, copy.matrix))
            for got, want in pairs:
                worst = max(worst, float((got.double() - want.double()).norm() / want.double().norm()))
        return worst

    def decode_seconds(self, rows: int, tokens: int = 1) -> tuple[float, int]:
        """Seconds for each layer, and the bytes of states that it reads and writes."""
        first = self.states(rows)
        size = sum(x.nbytes for x in first if x is not None)
        count = min(MAX_LAYERS, 1 + REPLAY_BYTES // size)
        states = [first, *(self.states(rows) for _ in range(count - 1))]
        inputs, batch = self.inputs(rows, tokens), self.batch(rows, tokens, False)

        def work() -> None:
            for state in states:
                self.kernel(inputs, state, batch)

        return replay_seconds(work, 20) / count, size

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds for one row's prompt."""
        inputs, batch, state = self.inputs(1, tokens), self.batch(1, tokens, True), self.states(1)
        return replay_seconds(lambda: self.kernel(inputs, state, batch), 5)


def cells(layer: Layer, rows: list[int], prompts: list[int], speed: float) -> list[str]:
    """A row of a table."""
    made = [f"{layer.error():.0e}"]
    for n in rows:
        took, size = layer.decode_seconds(n)
        made.append(f"{took * 1e6:.1f} ({size / took / speed:.0%})")
    for tokens in prompts:
        took = layer.prefill_seconds(tokens)
        made.append(f"{took * 1e6:.0f} ({took * 1e6 / tokens:.2f})")
    return made


def scan_configs(mixer: Mixer) -> Iterator[tuple[str, cuda.ScanConfig | None]]:
    """Every way to divide a state that fits the mixer."""
    if isinstance(mixer, spec.ShortConv):
        return
    lines, length = (
        (mixer.value_dim, mixer.key_dim) if isinstance(mixer, spec.DeltaNet) else (mixer.head_dim, mixer.state_dim)
    )
    base = SCANS[type(mixer)]
    for threads, per_thread, warps in product((4, 8, 16), (1, 2, 4), (1, 2, 4, 8)):
        scan = replace(base, line_threads=threads, scan_lines=per_thread, step_lines=per_thread, max_warps=warps)
        try:
            scan.check(lines, length)
        except Unsupported:
            continue
        if scan.scan_warps(lines) == warps:
            yield f"{threads} threads x {per_thread} lines, {warps} warps", scan


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--configs", action="store_true", help="compare how states are divided")
    chosen = parser.parse_args()
    device = torch.device("cuda", 0)
    modules = ModuleCache(device, FOLDER)
    counters = SplitCounters(modules, modules.num_sms)
    speed = copy_bandwidth(device)
    heads = (*(f"{n} rows" for n in chosen.rows), *(f"{n} tokens" for n in chosen.prompts))
    table = Table("shape", "error", *heads)
    table.title = f"µs for each layer (decode: share of {speed / 1e12:.2f} TB/s; prefill: µs for each token)"
    for name in chosen.shapes:
        mixer = SHAPES[name]
        table.add_row(name, *cells(Layer(counters, mixer), chosen.rows, chosen.prompts, speed))
        for label, scan in scan_configs(mixer) if chosen.configs else ():
            table.add_row(label, *cells(Layer(counters, mixer, scan), chosen.rows, chosen.prompts, speed))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
