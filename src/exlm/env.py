"""Reads environment variables, as the only module of exlm, and sets one of oneDNN's.

Every value is read when it is asked for, never at import, and nothing is cached. Options that a user sets in
code are in `Config`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import InputError

AmxSupport = Literal["none", "flag_only", "usable"]

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

DEFAULT_PACKED_CACHE = "20G"

REMOVED_VARIABLES = {"EXLM_STAGING": "copying weights through pinned buffers did not make loading faster."}
"""Variables of earlier versions, each with the reason why it was removed."""

_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_ISA_BELOW_AMX = "AVX512_CORE_FP16"
_AMX_CPUID_LEAF = 0x1D  # the CPUID leaf that describes AMX tiles


@dataclass(frozen=True)
class LegacySwitches:
    """Switches of exllamav2's variables: a variable that is set, to any value, turns its feature off."""

    no_flash_attn: bool
    no_xformers: bool
    no_sdpa: bool
    no_graphs: bool


@dataclass(frozen=True)
class OnednnIsaCap:
    """What `cap_onednn_isa` found and did."""

    amx: AmxSupport
    capped: bool  # this call set the variable; torch heeds it only if it has not computed anything before


def cache_folder() -> Path:
    """Where downloads and compiled kernels are kept.

    EXLM_CACHE, else `exlm` in XDG_CACHE_HOME, else ~/.cache/exlm, on every system. (`platformdirs` would move
    it on macOS and Windows.)
    """
    if chosen := os.environ.get("EXLM_CACHE"):
        return _expand_user(Path(chosen))
    xdg_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg_cache if xdg_cache.is_absolute() else _expand_user(Path("~/.cache"))) / "exlm"


def log_level() -> str:
    """EXLM_LOG_LEVEL, one of LOG_LEVELS in any case; WARNING if unset."""
    level = os.environ.get("EXLM_LOG_LEVEL") or "WARNING"
    if level.upper() not in LOG_LEVELS:
        raise InputError(f"EXLM_LOG_LEVEL is {level!r}; set it to one of {', '.join(LOG_LEVELS)}, or unset it.")
    return level.upper()


def default_device() -> str | None:
    """EXLM_DEVICE: the device to use where the caller names none, as torch spells it; None if unset."""
    return os.environ.get("EXLM_DEVICE") or None


def triton_enabled() -> bool:
    """EXLM_TRITON: 0 disables the Triton kernels."""
    return _zero_or_one("EXLM_TRITON")


def cuda_enabled() -> bool:
    """EXLM_CUDA: 0 disables the CUDA C++ kernels."""
    return _zero_or_one("EXLM_CUDA")


def gemm_m64_enabled() -> bool:
    """EXLM_WIDE: 0 disables the GEMM for 17 to 64 rows, which then run sixteen at a time."""
    return _zero_or_one("EXLM_WIDE")


def cpu_enabled() -> bool:
    """EXLM_CPU: 0 disables the CPU kernels in C."""
    return _zero_or_one("EXLM_CPU")


def packed_cache_bytes() -> int:
    """EXLM_PACKED_CACHE: most bytes of packed matrices in the cache folder, such as 20G; 0: none are kept."""
    value = os.environ.get("EXLM_PACKED_CACHE") or DEFAULT_PACKED_CACHE
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if found is None:
        raise InputError(f"EXLM_PACKED_CACHE is {value!r}; set it to a number of bytes such as 20G, or to 0.")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def refuse_removed_variables() -> None:
    """Raise InputError if a variable is set that an earlier version knew and this one does not."""
    for name, reason in REMOVED_VARIABLES.items():
        if os.environ.get(name):
            raise InputError(f"{name} is no longer supported: {reason} Unset it.")


def legacy_switches() -> LegacySwitches:
    """The four EXLLAMA_NO_… variables."""
    return LegacySwitches(
        no_flash_attn="EXLLAMA_NO_FLASH_ATTN" in os.environ,
        no_xformers="EXLLAMA_NO_XFORMERS" in os.environ,
        no_sdpa="EXLLAMA_NO_SDPA" in os.environ,
        no_graphs="EXLLAMA_NO_GRAPHS" in os.environ,
    )


def detect_amx(cpuinfo: str) -> AmxSupport:
    """Whether /proc/cpuinfo has the AMX flag, and whether CPUID describes AMX too (`usable`).

    Some virtual machines show the flag but limit CPUID to leaves below that of AMX: `flag_only`.
    """
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None or "amx_tile" not in flags[1].split():
        return "none"
    level = re.search(r"^cpuid level\s*:\s*(\d+)\s*$", cpuinfo, re.MULTILINE)
    return "usable" if level is not None and int(level[1]) >= _AMX_CPUID_LEAF else "flag_only"


def cap_onednn_isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> OnednnIsaCap:
    """Limit oneDNN to instructions below AMX if the CPU shows AMX's flag but CPUID does not describe AMX.

    There, a bfloat16 product with AMX would end the process (SIGILL). A value of ONEDNN_MAX_CPU_ISA that is
    already there is left alone. The limit takes effect only if torch has computed nothing before. A caller that
    does not know whether it has reads `capped`: if this call set the variable, it may have come too late, and the
    caller must disable oneDNN for bfloat16 as well.
    """
    try:
        amx = detect_amx(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        amx = "none"
    capped = amx == "flag_only" and _ISA_VARIABLE not in os.environ
    if capped:
        os.environ[_ISA_VARIABLE] = _ISA_BELOW_AMX
    return OnednnIsaCap(amx, capped)


def _expand_user(path: Path) -> Path:
    """The path with ~ expanded; InputError if there is no home folder, as in some containers."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError(
            f"{path} is where downloads would be kept, and {path.parts[0]} is no known home folder: set "
            "EXLM_CACHE to a folder that can be written."
        ) from None


def _zero_or_one(name: str) -> bool:
    """A variable that is 0 or 1; 1 if it is unset."""
    value = os.environ.get(name) or "1"
    if value not in ("0", "1"):
        raise InputError(f"{name} is {value!r}; set it to 0 or 1, or unset it.")
    return value == "1"
