"""For `from exllamav2.util import …`."""

from exlm.legacy.devices import (
    cuda_sync_active,
    get_all_gpu_memory,
    list_live_tensors,
    print_vram_usage,
    print_vram_usage_peak,
)
from exlm.legacy.util import SeqTensor, Timer, get_basic_progress

__all__ = [
    "SeqTensor",
    "Timer",
    "cuda_sync_active",
    "get_all_gpu_memory",
    "get_basic_progress",
    "list_live_tensors",
    "print_vram_usage",
    "print_vram_usage_peak",
]
