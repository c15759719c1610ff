"""Describes this machine, and which kernels a model would run on here and why. Uses no network."""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from .. import __version__, env
from ..kernels.cpu.bindings import intact_libraries
from ..kernels.cpu.compile import COMPILERS, SOURCES, sets_here
from ..kernels.dispatch import backends_for
from ..model.devices import pick_dtype

_CPUINFO = Path("/proc/cpuinfo")
_SELF = Path("/proc/self")


class Fact(NamedTuple):
    """One line about the machine."""

    name: str
    value: str


def facts() -> list[Fact]:
    """Versions, processor, memory, devices."""
    return [
        Fact("exlm", __version__),
        Fact("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        Fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}"),
        Fact("system", platform.platform()),
        Fact("processor", _processor()),
        Fact("cores", f"{os.cpu_count()}, of which {_usable_cores()} may be used; torch has {_threads()}"),
        Fact("memory", f"{_memory('MemTotal')}, of which {_memory('MemAvailable')} is free"),
        *_gpus(),
    ]


def system_facts() -> list[Fact]:
    """`facts`, then instruction sets, kernels with the reason for each, and folders."""
    return [
        *facts(),
        Fact("instruction sets", f"{', '.join(sets_here())} (the first is used)"),
        Fact("AMX", _amx()),
        Fact("CPU library", _library()),
        Fact("kernels on cpu", _kernels(torch.device("cpu"))),
        *(Fact(f"kernels on cuda:{i}", _kernels(torch.device("cuda", i))) for i in _devices()),
        Fact("Triton", _package("triton", "triton")),
        Fact("NVRTC", _nvrtc()),
        Fact("cache folder", str(env.cache_folder())),
    ]


def seconds_since_start() -> float | None:
    """Seconds since this process was started; None where the system does not tell."""
    try:
        ticks = int((_SELF / "stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process on a device in bytes; 0 where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    found = re.search(r"^VmHWM:\s*(\d+) kB$", _text(_SELF / "status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def reset_peak_memory(device: torch.device) -> None:
    """Reset what `peak_memory` counts, where the system can."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(_CPUINFO), re.MULTILINE)
    return f"{found[1].strip() if found else platform.processor() or 'unknown'} ({platform.machine()})"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count != 1 else ''}"


def _memory(field: str) -> str:
    found = re.search(rf"^{field}:\s*(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    return f"{int(found[1]) / 2**20:.1f} GiB" if found else "an unknown amount"


def _devices() -> range:
    return range(torch.cuda.device_count())


def _gpus() -> Iterator[Fact]:
    if not _devices():
        yield Fact("GPU", "none that torch can use")
    for i in _devices():
        major, minor = torch.cuda.get_device_capability(i)
        free, total = torch.cuda.mem_get_info(i)
        size = f"{total / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB is free"
        yield Fact(f"GPU {i}", f"{torch.cuda.get_device_name(i)}, capability {major}.{minor}, {size}")


def _amx() -> str:
    guard = env.cap_onednn_isa()
    if guard.amx != "half":
        return {"none": "not announced", "whole": "usable"}[guard.amx]
    done = "oneDNN was told to stay below it" if guard.capped else "oneDNN's limit was set already"
    return f"announced, but its description is hidden (a virtual machine's fault): {done}"


def _library() -> str:
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
    return f"through cuda-bindings {_package('cuda-bindings', 'cuda')}"


def _package(name: str, module: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "installed" if find_spec(module) is not None else "not installed"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
