"""The CUDA kernels on a processor, compiled as C++: threads are fibres, tensor cores are loops."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exlm.kernels.cuda.module_cache import read_source

HERE = Path(__file__).parent
SHARED = re.compile(r"extern __shared__ __align__\(\d+\) char (\w+)\[\];")
COMPILER = ("g++", "-std=c++20", "-O1", "-w", "-fPIC")
KERNEL = re.compile(r"__global__ void __launch_bounds__\([^)]*\) (\w+)\(")


class Emulated:
    """Kernels that run where the tensors of a CPU are."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        arguments: Sequence[Any],
        pdl: bool = True,
        cooperative: bool = False,
    ) -> None:
        """Blocks one after the other; those that wait for others go on later."""
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        fine = self._library[f"launch_{name}"](*grid, threads, shared, places)
        assert fine & 255, f"{name} wrote behind its {shared} bytes, did not wait for copies, or waits for ever"


class EmulatedModuleCache:
    """Compiles with the machine's own compiler into a folder."""

    device = torch.device("cpu")
    max_smem = 227 * 1024
    num_sms = 4

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[tuple[Path, tuple[tuple[str, int], ...]], Emulated] = {}

    def module(self, source: Path, **defines: int) -> Emulated:
        """Compile a source with these -D constants."""
        key = source, tuple(sorted(defines.items()))
        if key not in self._made:
            self._made[key] = Emulated(ctypes.CDLL(str(self._build(source, defines))))
        return self._made[key]

    def _build(self, source: Path, defines: dict[str, int]) -> Path:
        text = read_source(source).decode()
        source_text = SHARED.sub(r"char* const \1 = shared_memory;", text)
        kernels = "".join(f"KERNEL({name})\n" for name in KERNEL.findall(text))
        stem = self.folder / f"emulated{len(self._made)}"
        stem.with_suffix(".cpp").write_text(source_text + (HERE / "emulator_launch.h").read_text() + kernels)
        choices = [f"-D{name}={value}" for name, value in defines.items()]
        command = [*COMPILER, "-shared", "-include", str(self._begun()), *choices]
        subprocess.run([*command, f"{stem}.cpp", "-o", f"{stem}.so"], check=True)
        return stem.with_suffix(".so")

    def _begun(self) -> Path:
        """What comes before every source, read by the compiler once and for all."""
        start = self.folder / "emulator.h"
        if not start.exists():
            start.write_text((HERE / "emulator.h").read_text())
            subprocess.run([*COMPILER, "-x", "c++-header", start, "-o", f"{start}.gch"], check=True)
        return start
