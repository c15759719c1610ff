"""Every instruction set answers with the same bits: those of this machine and, emulated, NEON.

`kernel_digests.c` calls each function with odd shapes; the reference is plain C that rounds as the others do.
That the numbers are right is for the other tests, which compare this machine's sets with torch.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from exlm.kernels.cpu.compile import COMPILERS, FLAGS, INSTRUCTION_SETS, SOURCES, sets_here

ASKED = Path(__file__).with_name("kernel_digests.c")
ARM = platform.machine() in ("aarch64", "arm64")
CROSS = "aarch64-linux-gnu-gcc"
FUSED_MULTIPLY_ADD = () if ARM else ("-mfma",)
"""ARM has it always; `plain` on x86 may not, and then rounds twice where all others round once."""

EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
WARNINGS = (
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-warning-option"),
    "-Wno-psabi",  # vectors stay within the program
    "-Wno-maybe-uninitialized",  # the first slot always fills the tables that seem empty
)


def answers(compiler: str, target: Path, *extra: str, by: tuple[str, ...] = ()) -> list[str]:
    """What the program says, compiled as the library is, and run by an emulator if there is one."""
    flags = [*(flag for flag in FLAGS if flag != "-shared"), *WARNINGS, *extra, "-I", str(SOURCES)]
    command = [compiler, *flags, str(ASKED), "-o", str(target), "-lm"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    told = subprocess.run([*by, target], capture_output=True, text=True, check=False, timeout=240)
    assert told.returncode == 0, told.stderr[-3000:]
    return told.stdout.splitlines()


@pytest.fixture(scope="module")
def compiler() -> str:
    """This machine's own."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return found or pytest.skip(f"there is no C compiler ({', '.join(COMPILERS)})")


@pytest.fixture(scope="module")
def right(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The expected lines: quantised matrices by their definition, all else by portable C."""
    if not ARM and "avx2" not in sets_here():
        pytest.skip("this processor rounds twice where all others round once")
    told = answers(
        compiler,
        tmp_path_factory.mktemp("plain") / "it",
        *("-O0", "-DEXLM_PORTABLE", "-DBY_DEFINITION", *FUSED_MULTIPLY_ADD),
    )
    assert len(told) > 800
    assert not [line for line in told if "differ" in line]
    return told


def test_portable_c(compiler: str, right: list[str], tmp_path: Path) -> None:
    assert answers(compiler, tmp_path / "it", "-O0", "-DEXLM_PORTABLE", *FUSED_MULTIPLY_ADD) == right


@pytest.mark.parametrize("instructions", sets_here())
def test_each_set_of_this_machine(compiler: str, right: list[str], tmp_path: Path, instructions: str) -> None:
    flags = {*(f"-m{flag}" for flag in INSTRUCTION_SETS[instructions]), *FUSED_MULTIPLY_ADD}
    assert answers(compiler, tmp_path / "it", "-O0", *sorted(flags)) == right


@pytest.mark.parametrize("instructions", ["plain", "dotprod"])
def test_neon(right: list[str], tmp_path: Path, instructions: str) -> None:
    cross, emulator = shutil.which(CROSS), next(filter(None, map(shutil.which, EMULATORS)), None)
    if cross is None or emulator is None:
        pytest.skip(f"needs {CROSS} and {EMULATORS[0]}: Debian's gcc-aarch64-linux-gnu and qemu-user-static")
    asked = subprocess.run([cross, "-print-file-name=libc.a"], capture_output=True, text=True, check=True)
    if not Path(asked.stdout.strip()).is_absolute():
        pytest.skip(f"{CROSS} has no C library: Debian's libc6-dev-arm64-cross")
    flags = (f"-m{flag}" for flag in INSTRUCTION_SETS[instructions])
    assert answers(cross, tmp_path / "it", "-static", *flags, by=(emulator,)) == right
