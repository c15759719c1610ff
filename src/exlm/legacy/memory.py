"""What old scripts ask of GPUs and their memory. Without a GPU there is nothing to wait for."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

MIB = 2**20


def cuda_sync_active() -> None:
    """Wait for every GPU that this process uses."""
    for number in range(torch.cuda.device_count()):
        if torch.cuda.memory_allocated(number):
            torch.cuda.synchronize(number)


def get_all_gpu_memory() -> dict[int, dict[str, int]]:
    """For each GPU its memory in MiB: `total`, `used` and `free`."""
    seen = {number: torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())}
    return {
        number: {"total": total // MIB, "used": (total - free) // MIB, "free": free // MIB}
        for number, (free, total) in seen.items()
    }


def list_live_tensors() -> None:
    """Show how many tensors of each shape, type and device there are."""
    gc.collect()
    kinds = Counter(
        f"{tuple(one.shape)}, {one.dtype}, {one.device}"
        for one in gc.get_objects()
        if issubclass(type(one), Tensor)  # isinstance would ask objects that answer for others
    )
    _show(f"{count} : {kind}" for kind, count in kinds.most_common())


def print_vram_usage() -> None:
    """Show how much the first GPU holds for this process now; what it held at most is counted from here."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats(0)
    print_vram_usage_peak()


def print_vram_usage_peak() -> None:
    """Show how much the first GPU has held for this process at most."""
    most = torch.cuda.max_memory_allocated(0) if torch.cuda.is_available() else 0
    _show([f"Peak memory: {most / MIB:,.2f} MB"])


def _show(lines: Iterable[str]) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line)
