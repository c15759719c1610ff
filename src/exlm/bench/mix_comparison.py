"""Compares exlm and llama.cpp on files of random weights, one of each mix, beside what the processor can do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import env
from ..kernels.packed_store import PACKED_FOLDER, PackedStore
from .benchmark import measure_int8_peak, measure_read_bandwidth
from .comparison import compare
from .gguf_mix import Mix, write_mix
from .report import MixResult
from .system_info import describe_hardware

ENGINES = ("exlm", "llama.cpp")


def compare_mixes(
    mixes: Collection[Mix],
    threads: Collection[int],
    turns: int,
    pythons: Mapping[str, str] | None = None,
    on_progress: Callable[[str, int, int], object] = lambda *_: None,
    *,
    only: Collection[str] = ENGINES,
) -> Iterator[MixResult]:
    """A result for each mix and number of threads, as soon as it is there.

    A mix's file is written once, to a temporary folder, and deleted when it has been measured, as are the packed
    matrices that exlm kept of it. The limits are measured before each turn, with as many threads, and are the best so
    far: other programs only make them look lower.
    """
    limits = {count: _Limits(count) for count in threads}
    total = len(mixes) * len(threads) * turns * len(only)
    for number, mix in enumerate(mixes):
        with tempfile.TemporaryDirectory(prefix="exlm-bench-") as folder, ExitStack() as stack:
            path = Path(folder) / f"{mix.name}.gguf"
            stack.callback(_remove_packed_copies, path)
            done = number * len(threads) * turns * len(only)
            on_progress(f"{mix.name}: writing the file", done, total)
            write_mix(path, mix)
            for count in threads:
                step = partial(_forward_progress, on_progress, f"{mix.name}, threads: {count}", done, total)
                yield _measure(path, mix, limits[count], turns, pythons, step, only)
                done += turns * len(only)


def _remove_packed_copies(path: Path) -> None:
    """Remove from the cache folder what starts with this file left there."""
    store = PackedStore(env.cache_folder() / PACKED_FOLDER, env.packed_cache_bytes())
    for entry in store.entries():
        if entry.model == str(path):
            store.remove(entry)


def _forward_progress(
    on_progress: Callable[[str, int, int], object], where: str, before: int, total: int, engine: str, done: int, _: int
) -> None:
    on_progress(f"{where}, {engine}", before + done, total)


def _measure(
    path: Path,
    mix: Mix,
    limits: _Limits,
    turns: int,
    pythons: Mapping[str, str] | None,
    on_progress: Callable[[str, int, int], object],
    only: Collection[str],
) -> MixResult:
    """Run the engines on one file."""
    peers, skipped = compare(path, limits.threads, turns, pythons, on_progress, only=only, before_turn=limits.measure)
    return MixResult(
        mix=mix.name,
        types=mix.types,
        bits=mix.bits,
        file_bytes=path.stat().st_size,
        bytes_per_token=mix.bytes_per_token,
        prompt_products=mix.prompt_products,
        threads=limits.threads,
        bandwidth=limits.bandwidth,
        int8_peak=limits.int8_peak or None,
        peers=tuple(peers),
        skipped=tuple(skipped),
    )


def load_average() -> float | None:
    """Programs that ran or waited to, on average of the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def mixes_json(shape: str, turns: int, load: float | None, results: Sequence[MixResult]) -> dict[str, Any]:
    """What `exlm bench --mix --json` writes; `load` is the load average before the start."""
    return {
        "model": shape,
        "device": "CPU",
        "turns": turns,
        "system": describe_hardware(),
        "load_average": load,
        "mixes": [one.json() for one in results],
    }


class _Limits:
    """The largest read bandwidth and rate of byte products so far."""

    def __init__(self, threads: int) -> None:
        self.bandwidth = self.int8_peak = 0.0
        self.threads = threads

    def measure(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            self.bandwidth = max(self.bandwidth, measure_read_bandwidth())
            self.int8_peak = max(self.int8_peak, measure_int8_peak(self.threads) or 0.0)
        finally:
            torch.set_num_threads(before)
