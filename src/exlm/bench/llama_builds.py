"""The instruction sets that a llama.cpp was compiled for, which ones of this processor it lacks, how to add them."""

from __future__ import annotations

import re

from .. import env
from ..kernels.cpu.compile import CPUINFO

_FLAGS = {
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX_VNNI": "avx_vnni",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
}
"""llama.cpp's names of the instruction sets that decide its speed, and those of /proc/cpuinfo."""

_WITHOUT_AMX = "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"

INSTALL = "pip install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"


def instruction_sets(line: str) -> frozenset[str]:
    """The instruction sets in llama.cpp's line, as in `CPU : AVX2 = 1 | AVX512 = 0 |`."""
    return frozenset(name for name, value in re.findall(r"(\w+)\s*=\s*(\w+)", line) if value != "0")


def missing_sets(line: str, cpuinfo: str | None = None) -> list[str]:
    """What this processor has, by the text of /proc/cpuinfo, and the llama.cpp with this line does not use."""
    built = instruction_sets(line)
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo() if cpuinfo is None else cpuinfo, re.MULTILINE)
    flags = found[1].split() if found else []
    missing = [name for name, flag in _FLAGS.items() if flag in flags and name not in built]
    # AVX-VNNI has the same instructions for shorter vectors.
    return [name for name in missing if name != "AVX_VNNI" or _FLAGS["AVX512_VNNI"] not in flags]


def build_command(cpuinfo: str | None = None) -> str:
    """The command that compiles llama-cpp-python for this processor.

    AMX stays off where a virtual machine announces it without letting programs use it: llama.cpp would crash.
    """
    broken_amx = env.detect_amx(_cpuinfo() if cpuinfo is None else cpuinfo) == "flag_only"
    return f'CMAKE_ARGS="{_WITHOUT_AMX if broken_amx else "-DGGML_NATIVE=ON"}" {INSTALL}'


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
