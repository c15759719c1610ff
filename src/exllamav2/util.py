"""For `from exllamav2.util import …`."""

from exlm.legacy.memory import (
    cuda_sync_active,
    get_all_gpu_memory,
    list_live_tensors,
    print_vram_usage,
    print_vram_usage_peak,
)
from exlm.legacy.progress import get_basic_progress
from exlm.legacy.seq_tensor import SeqTensor
from exlm.legacy.timer import Timer

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
