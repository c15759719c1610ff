"""What the environment says: the only file that reads it, and for one variable writes it.

Every value is read when it is asked for, never at import, and nothing is remembered. What the user chooses in
code belongs to `Config`, not here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import InputError

Amx = Literal["none", "whole", "half"]

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_ISA_BELOW_AMX = "AVX512_CORE_FP16"
_PALETTE_LEAF = 0x1D  # the CPUID leaf that describes AMX tiles


@dataclass(frozen=True)
class Switches:
    """What the old library's variables turn off. Being set is enough; the value does not matter."""

    no_flash_attn: bool
    no_xformers: bool
    no_sdpa: bool
    no_graphs: bool


@dataclass(frozen=True)
class CpuGuard:
    """What `guard_cpu` found and did."""

    amx: Amx
    capped: bool  # this call set the variable; torch heeds it only if it has not computed anything before


def cache_folder() -> Path:
    """Where downloads and compiled kernels are kept.

    EXLM_CACHE, else `exlm` in XDG_CACHE_HOME, else ~/.cache/exlm.
    """
    if own := os.environ.get("EXLM_CACHE"):
        return _at_home(Path(own))
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else _at_home(Path("~/.cache"))) / "exlm"


def log_level() -> str:
    """EXLM_LOG_LEVEL, one of LOG_LEVELS in any case; WARNING if unset."""
    level = os.environ.get("EXLM_LOG_LEVEL") or "WARNING"
    if level.upper() not in LOG_LEVELS:
        raise InputError(
            f"EXLM_LOG_LEVEL is {level!r}; set it to one of {', '.join(LOG_LEVELS)}, or unset it."
        )
    return level.upper()


def default_device() -> str | None:
    """EXLM_DEVICE: the device to use where the caller names none, as torch spells it; None if unset."""
    return os.environ.get("EXLM_DEVICE") or None


def triton_wanted() -> bool:
    """EXLM_TRITON: 0 keeps Triton's kernels out."""
    return _switch("EXLM_TRITON")


def cuda_wanted() -> bool:
    """EXLM_CUDA: the same for the kernels in CUDA C++."""
    return _switch("EXLM_CUDA")


def wide_wanted() -> bool:
    """EXLM_WIDE: 0 keeps out the kernel for 17 to 64 rows, which then go sixteen at a time."""
    return _switch("EXLM_WIDE")


def staging_wanted() -> bool:
    """EXLM_STAGING: 1 loads files to a GPU through pinned buffers; off until it has been measured."""
    return _switch("EXLM_STAGING", otherwise="0")


def cpu_wanted() -> bool:
    """EXLM_CPU: the same for the kernels in C for processors."""
    return _switch("EXLM_CPU")


def legacy_switches() -> Switches:
    """The four EXLLAMA_NO_… variables."""
    return Switches(
        no_flash_attn="EXLLAMA_NO_FLASH_ATTN" in os.environ,
        no_xformers="EXLLAMA_NO_XFORMERS" in os.environ,
        no_sdpa="EXLLAMA_NO_SDPA" in os.environ,
        no_graphs="EXLLAMA_NO_GRAPHS" in os.environ,
    )


def read_amx(cpuinfo: str) -> Amx:
    """Whether the text of /proc/cpuinfo announces AMX, and whether it also lets a program ask how to use it.

    Some virtual machines show the flag but answer no CPUID leaf beyond a limit below AMX's own: `half`.
    """
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None or "amx_tile" not in flags[1].split():
        return "none"
    level = re.search(r"^cpuid level\s*:\s*(\d+)\s*$", cpuinfo, re.MULTILINE)
    return "whole" if level is not None and int(level[1]) >= _PALETTE_LEAF else "half"


def guard_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuGuard:
    """Keep oneDNN off half-announced AMX, where a bfloat16 matrix product would kill the process (SIGILL).

    Only a call before torch's first operation takes effect. A caller that cannot know reads `capped`: if this
    call was the one that set the variable, it may have come too late, and oneDNN must be off for bfloat16 as
    well. A value of ONEDNN_MAX_CPU_ISA that is already there is left alone.
    """
    try:
        amx = read_amx(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        amx = "none"
    capped = amx == "half" and _ISA_VARIABLE not in os.environ
    if capped:
        os.environ[_ISA_VARIABLE] = _ISA_BELOW_AMX
    return CpuGuard(amx, capped)


def _at_home(path: Path) -> Path:
    """The path with its ~ replaced; in a container there may be no such home."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError(
            f"{path} is where downloads would be kept, and {path.parts[0]} is nobody's folder here: set "
            "EXLM_CACHE to a folder that can be written."
        ) from None


def _switch(name: str, otherwise: str = "1") -> bool:
    """A variable that is 0 or 1; `otherwise` if unset."""
    wish = os.environ.get(name) or otherwise
    if wish not in ("0", "1"):
        raise InputError(f"{name} is {wish!r}; set it to 0 or 1, or unset it.")
    return wish == "1"
