"""Measures a device's limits for a roofline model: memory bandwidth and GEMM throughput."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

_READ_FLOATS = 64 << 20  # floats a CPU reads
_COPY_FLOATS = 1 << 29  # floats a GPU copies
_REPEATS = 5


class Roofline(NamedTuple):
    """The measured limits of a device."""

    bandwidth: float  # bytes/s: reading on the CPU, reading and writing of a copy on a GPU
    flops: float  # operations/s of one large matrix product in the model's precision


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure a device; the CPU with torch's number of threads."""
    if device.type == "cuda":
        return Roofline(_copy_bandwidth(device), _gemm_flops(8192, device, dtype))
    return Roofline(_read_bandwidth(), _gemm_flops(1024, device, dtype))


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Device time of `work`: the median of a few runs."""
    work()
    if device.type != "cuda":
        return median(_seconds(work) for _ in range(_REPEATS))
    cuda: Any = torch.cuda
    times = []
    for _ in range(_REPEATS):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return median(times)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _read_bandwidth() -> float:
    """The best of a few runs: what other programs use is not the memory's limit."""
    numbers = torch.ones(_READ_FLOATS)
    numbers.sum()
    return float(numbers.nbytes / min(_seconds(numbers.sum) for _ in range(_REPEATS)))


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.ones(_COPY_FLOATS, device=device)
    target = torch.empty_like(source)
    return float(2 * source.nbytes / median_seconds(lambda: torch.neg(source, out=target), device))


def _gemm_flops(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return float(2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device))
