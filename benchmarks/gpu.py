"""Timing on a GPU: replays of a CUDA graph, and the copy bandwidth to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def replay_seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of one replay of the captured work: the median of five runs."""
    torch.cuda.synchronize()  # the side stream would not wait for the inputs
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy by a kernel reads and writes."""
    source = torch.ones(1 << 29, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / replay_seconds(lambda: torch.neg(source, out=target), 5)
