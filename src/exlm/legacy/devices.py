"""Helpers of exllamav2 for GPUs: memory reports, streams, moving tensors, a cache for tensor parallelism.

Without a GPU the reports are empty and nothing is waited for.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import NotLoaded
from ..kvcache import Cache, CacheBase
from ..model import Model

MIB = 2**20

BROADCAST_KV, BROADCAST_ID, BROADCAST_VC, BROADCAST_RS, BROADCAST_Q = range(5)
"""Constants of `exllamav2.tensor_p`: how a tensor is split over devices."""

global_streams: dict[int, Any] = {}
"""CUDA streams that the library created, by device: none, exlm uses torch's current streams."""


def set_device_streams() -> None:
    """Do nothing: exlm uses torch's current streams."""


def get_device_stream(index: int) -> None:
    """None: exlm creates no streams of its own."""


def torch_device(idx: int) -> str:
    """The name of a device by its index; -1 is the CPU."""
    return "cpu" if idx == -1 else f"cuda:{idx}"


def safe_move_tensor(tensor: Any, device: int | str | torch.device, non_blocking: bool = False) -> Any:
    """A tensor, or each of a list or tuple of tensors, on a device."""
    if isinstance(tensor, Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    return type(tensor)(safe_move_tensor(one, device, non_blocking) for one in tensor)


def cache_tp(
    model: Model, base: type[CacheBase] = Cache, batch_size: int = 1, max_seq_len: int = -1
) -> CacheBase:
    """A cache of class `base` for a model loaded with `load_tp`: each rank keeps the heads it computes.

    In exlm every cache of a tensor-parallel model is one; the name `ExLlamaV2Cache_TP` stays for scripts.
    """
    if model.tp_context is None:
        raise NotLoaded("Cannot create TP cache unless model is loaded with load_tp(): call it first.")
    return base(model, batch_size, max_seq_len)


def cuda_sync_active() -> None:
    """Wait for every GPU that this process uses."""
    for number in range(torch.cuda.device_count()):
        if torch.cuda.memory_allocated(number):
            torch.cuda.synchronize(number)


def get_all_gpu_memory() -> dict[int, dict[str, int]]:
    """For each GPU its memory in MiB: `total`, `used` and `free`."""
    found = {number: torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())}
    return {
        number: {"total": total // MIB, "used": (total - free) // MIB, "free": free // MIB}
        for number, (free, total) in found.items()
    }


def list_live_tensors() -> None:
    """Print how many tensors of each shape, type and device exist."""
    gc.collect()
    kinds = Counter(
        f"{tuple(one.shape)}, {one.dtype}, {one.device}"
        for one in gc.get_objects()
        if issubclass(type(one), Tensor)  # isinstance would call __class__ of proxy objects
    )
    _print_lines(f"{count} : {kind}" for kind, count in kinds.most_common())


def print_vram_usage() -> None:
    """Print how much memory of the first GPU this process holds, and reset the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats(0)
    print_vram_usage_peak()


def print_vram_usage_peak() -> None:
    """Print the most memory of the first GPU that this process has held since the last reset."""
    most = torch.cuda.max_memory_allocated(0) if torch.cuda.is_available() else 0
    _print_lines([f"Peak memory: {most / MIB:,.2f} MB"])


def _print_lines(lines: Iterable[str]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line)
