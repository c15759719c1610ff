"""The devices and the precision of a model, and CPU limits that loading must respect (memory, AMX)."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import env
from ..errors import InputError
from ..memory import require_address_space

log = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")

UNKNOWN_FREE_BYTES = 1 << 62
"""Assumed where the system does not report its free memory."""

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


LIBRARY_BYTES = 64 << 20
"""Memory that C libraries take when a thread first calls them, in addition to the model."""

THREAD_STACK_BYTES = 8 << 20
"""Usual stack of a thread, in bytes."""

OPENMP_GRAIN_SIZE = 32768
"""Fewest elements of an operation that torch gives to one OpenMP thread."""


@dataclass(frozen=True)
class DeviceInfo:
    """A device for placement: its name, torch device and free bytes."""

    name: str
    device: torch.device
    free: int  # bytes


def list_devices(requested: str | None) -> list[DeviceInfo]:
    """The devices a model may use, in order: those requested; else all GPUs, or the CPU if there is none.

    A request names one or several, as in "cuda:0,cuda:1,cpu". The CPU beside GPUs is used only if named.
    """
    if requested is not None:
        devices = [_parse_device(name.strip()) for name in requested.split(",")]
    else:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [DeviceInfo(str(device), device, free_bytes(device)) for device in devices or [torch.device("cpu")]]


def hypothetical_devices(memory_gb: Sequence[float]) -> list[DeviceInfo]:
    """GPUs with that many GB each, for planning."""
    if not isinstance(memory_gb, Sequence) or not memory_gb or not all(map(_is_gb, memory_gb)):
        raise InputError(f"memory is a list with GB for each GPU, as in [24, 24]; found {memory_gb!r}.")
    return [DeviceInfo(f"GPU {i}", torch.device("cuda", i), int(gb * (1 << 30))) for i, gb in enumerate(memory_gb)]


def _is_gb(number: object) -> bool:
    """Whether this is a plausible memory size: positive and at most a PB."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < 1 << 20


def pick_device(requested: str | None) -> torch.device:
    """The first device requested; by default the first GPU, else the CPU."""
    if requested is not None:
        return _parse_device(requested.split(",")[0].strip())
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def free_bytes(device: torch.device) -> int:
    """Free bytes of a device, including torch's cached ones."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", MEMINFO.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else UNKNOWN_FREE_BYTES


def _parse_device(requested: str) -> torch.device:
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise InputError(
            f"{requested!r} is not a device: use 'cpu', 'cuda' or 'cuda:0', or several with commas between."
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"Device {requested!r} is not supported: use 'cpu' or 'cuda'.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise InputError(f"Device {requested!r} is not there: torch sees {count} CUDA devices. Use 'cpu'.")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


def pick_dtype(requested: str | None, stored: str | None, device: torch.device) -> torch.dtype:
    """The precision requested; else float32 on a CPU; on a GPU bfloat16 for bfloat16 files, else float16."""
    if requested is not None:
        if requested.removeprefix("torch.") not in DTYPES:
            raise InputError(f"config.dtype must be one of {', '.join(DTYPES)}, found {requested!r}.")
        return DTYPES[requested.removeprefix("torch.")]
    if device.type == "cpu":
        return torch.float32
    use_bfloat16 = stored == "bfloat16" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if use_bfloat16 else torch.float16


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """A context in which this device is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def disable_broken_amx(device: torch.device, dtype: torch.dtype) -> None:
    """Run bfloat16 without oneDNN if a virtual machine reports AMX but does not let programs use it."""
    if device.type != "cpu":
        return
    isa = env.cap_onednn_isa()
    if isa.capped and dtype is torch.bfloat16:
        # torch may have started oneDNN before the cap was set, and that cannot be seen: disable oneDNN.
        torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
        log.warning("AMX is announced but not usable here: bfloat16 runs without oneDNN, which is slower.")


def start_openmp(what: str) -> None:
    """Start the calling thread's OpenMP threads; DoesNotFit if their stacks do not fit.

    `what` begins the message. Without a limit on memory, the first large operation starts them.
    """
    threads = torch.get_num_threads()
    require_address_space(LIBRARY_BYTES + (threads - 1) * THREAD_STACK_BYTES, what)
    if _has_memory_limit():
        torch.zeros(threads * OPENMP_GRAIN_SIZE).add_(1)


def _has_memory_limit() -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
