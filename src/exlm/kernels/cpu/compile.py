"""How the C sources are compiled: one library for each instruction set.

Uses the standard library only and imports nothing of the package: hatch_build.py runs this file by itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("csrc")
CPUINFO = Path("/proc/cpuinfo")

COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    *("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fwrapv", "-fno-math-errno"),
)

INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "dotprod": ("arch=armv8.2-a+dotprod",),
    "plain": (),
}
"""The compiler's -m flags for each instruction set, the best first.

`plain` runs on every processor; on 64-bit ARM it includes NEON. `dotprod` adds sdot, which compilers for
Apple's processors use by default."""


class BuildError(Exception):
    """The library could not be compiled; the message says why."""


def sets_for_machine(machine: str) -> list[str]:
    """The instruction sets this kind of processor may have, the best first."""
    others = {"x86_64": ("dotprod",), "AMD64": ("dotprod",), "aarch64": ("avx512", "avx2")}
    return [name for name in INSTRUCTION_SETS if name not in others[machine]] if machine in others else ["plain"]


def usable_sets(cpuinfo: str, machine: str) -> list[str]:
    """The instruction sets a processor can run, the best first, by the text of /proc/cpuinfo."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = {flag.replace("_", "") for flag in found[1].split()} if found else set()
    needed = {**INSTRUCTION_SETS, "dotprod": ("asimddp",)}
    return [name for name in sets_for_machine(machine) if flags.issuperset(needed[name])]


def sets_here() -> list[str]:
    """The instruction sets this processor can run, the best first."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return usable_sets(text, platform.machine())


def prebuilt(instructions: str) -> Path:
    """Where a wheel puts the library of an instruction set; the file may not exist.

    Its name ends with a checksum (`exlm-cpu-avx2-<checksum>.so`). Packagers that strip or patch libraries
    remove the checksum from the name; such a library is used unchecked.
    """
    found = sorted(SOURCES.glob(f"exlm-cpu-{instructions}-*.so"))
    return found[0] if found else SOURCES / f"exlm-cpu-{instructions}.so"


def compile_library(instructions: str, target: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile the library of an instruction set; `target` is replaced atomically."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(
            f"there is no C compiler ({', '.join(COMPILERS)}) on the PATH and this installation brings no "
            "library: install one of them, or a wheel of exlm for this platform"
        )
    log.warning("compiling the kernels for processors with %s, once: about ten seconds", instructions)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *FLAGS, *extra, *(f"-m{flag}" for flag in INSTRUCTION_SETS[instructions])]
        command += [str(SOURCES / "exlm_cpu.c"), "-o", name, "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = result.stderr.strip().splitlines()
            errors = "; ".join([line for line in lines if "error" in line] or lines)
            raise BuildError(f"{compiler} cannot build its library: {errors[:400]}")
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def source_digest(instructions: str) -> str:
    """Identifies a library: a hash of its sources, its compiler flags and its platform."""
    parts = [file.read_bytes() for file in sorted(SOURCES.glob("*.[ch]"))]
    words = " ".join((*FLAGS, *INSTRUCTION_SETS[instructions], platform.machine(), platform.system()))
    return hashlib.sha256(b"\0".join((*parts, words.encode()))).hexdigest()[:16]
