"""Describes this machine, and which kernels a model would run on here and why. Uses no network."""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from .. import __version__, env
from ..kernels.cpu.bindings import intact_libraries
from ..kernels.cpu.compile import COMPILERS, SOURCES, sets_here
from ..kernels.dispatch import backends_for
from ..model.devices import pick_dtype

_CPUINFO = Path("/proc/cpuinfo")
_PROC_SELF = Path("/proc/self")


def describe_hardware() -> dict[str, str]:
    """Versions, processor, memory and GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    return {
        "exlm": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}",
        "system": platform.platform(),
        "processor": _processor(),
        "cores": f"{os.cpu_count()}, of which {cores} may be used; torch has {threads} "
        f"thread{'s' if threads != 1 else ''}",
        "memory": f"{_meminfo('MemTotal')}, of which {_meminfo('MemAvailable')} is free",
        **_gpus(),
    }


def describe_system() -> dict[str, str]:
    """`describe_hardware`, then instruction sets, the kernels of each device with the reason, and folders."""
    gpus = range(torch.cuda.device_count())
    return {
        **describe_hardware(),
        "instruction sets": f"{', '.join(sets_here())} (the first is used)",
        "AMX": _amx(),
        "CPU library": _cpu_library(),
        "kernels on cpu": _kernels(torch.device("cpu")),
        **{f"kernels on cuda:{i}": _kernels(torch.device("cuda", i)) for i in gpus},
        "Triton": _package_version("triton", "triton"),
        "NVRTC": _nvrtc(),
        "cache folder": str(env.cache_folder()),
    }


def seconds_since_start() -> float | None:
    """Seconds since this process was started; None where the system does not tell."""
    try:
        ticks = int((_PROC_SELF / "stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process on a device in bytes; 0 where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    found = re.search(r"^VmHWM:\s*(\d+) kB$", _read_text(_PROC_SELF / "status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def reset_peak_memory(device: torch.device) -> None:
    """Reset what `peak_memory` counts, where the system can."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        (_PROC_SELF / "clear_refs").write_text("5")


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read_text(_CPUINFO), re.MULTILINE)
    return f"{found[1].strip() if found else platform.processor() or 'unknown'} ({platform.machine()})"


def _meminfo(field: str) -> str:
    found = re.search(rf"^{field}:\s*(\d+) kB$", _read_text(Path("/proc/meminfo")), re.MULTILINE)
    return f"{int(found[1]) / 2**20:.1f} GiB" if found else "an unknown amount"


def _gpus() -> dict[str, str]:
    gpus = {}
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        free, total = torch.cuda.mem_get_info(i)
        size = f"{total / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB is free"
        gpus[f"GPU {i}"] = f"{torch.cuda.get_device_name(i)}, capability {major}.{minor}, {size}"
    return gpus or {"GPU": "none that torch can use"}


def _amx() -> str:
    cap = env.cap_onednn_isa()
    if cap.amx != "flag_only":
        return {"none": "not announced", "usable": "usable"}[cap.amx]
    done = "oneDNN is limited to older instructions" if cap.capped else "a limit for oneDNN was set already"
    return f"announced, but its description is hidden (a virtual machine's fault): {done}"


def _cpu_library() -> str:
    best = sets_here()[0]
    found = next(intact_libraries(best, env.cache_folder() / "kernels"), None)
    if found is not None:
        wheel = found.parent == SOURCES
        return f"{best}, from the installed wheel" if wheel else f"{best}, built here before ({found})"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return f"none, and no compiler to build it ({', '.join(COMPILERS)}): plain torch computes"
    return f"{best}, to be built at first use with {compiler}"


def _kernels(device: torch.device) -> str:
    backends = backends_for(device, pick_dtype(None, None, device))
    names = ", then ".join(backend.name for backend in backends.backends)
    return "; not ".join([names, *backends.unavailable])


def _nvrtc() -> str:
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "not installed: pip install 'exlm[cuda]' (for the kernels in CUDA C++)"
    return f"through cuda-bindings {_package_version('cuda-bindings', 'cuda')}"


def _package_version(name: str, module: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "installed" if find_spec(module) is not None else "not installed"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
