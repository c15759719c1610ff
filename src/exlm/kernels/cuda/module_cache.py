"""CUDA C++ sources compiled by NVRTC when first needed, cached as cubins in a folder, and launched.

Needs the packages cuda-bindings and nvidia-cuda-nvrtc, which come with CUDA builds of torch, and no compiler on
the machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from ...errors import KernelError, MissingExtra
from ...libcuda import libcuda
from ...version import __version__
from ..artifact_cache import ArtifactCache
from ..launch import Grid, launch_config, launch_kernel, pointer_array

_INCLUDE = re.compile(rb'^#include "([^"]+)"$', re.MULTILINE)
Defines = tuple[tuple[str, int], ...]


class CompiledModule(Protocol):
    """A loaded CUDA module."""

    def launch(
        self,
        name: str,
        grid: Grid,
        threads: int,
        shared: int,
        arguments: Sequence[Any],
        pdl: bool = True,
        cooperative: bool = False,
    ) -> None:
        """Start a kernel; `pdl`: before the kernel ahead of it ends; `cooperative`: all of its blocks are resident."""
        ...


class ModuleSource(Protocol):
    """A `ModuleCache`, or the tests' emulator."""

    device: torch.device

    @property
    def max_smem(self) -> int:
        """Bytes of shared memory that a thread block can have."""
        ...

    @property
    def num_sms(self) -> int:
        """Number of streaming multiprocessors."""
        ...

    def module(self, source: Path, **defines: int) -> CompiledModule:
        """Load a source compiled with these -D constants."""
        ...


class ModuleCache:
    """The compiled sources of one device."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device = device
        self.cache = ArtifactCache(folder)
        self._made: dict[tuple[Path, Defines], CudaModule] = {}
        self._lock = threading.Lock()

    @cached_property
    def max_smem(self) -> int:
        """Bytes of shared memory that a thread block can have."""
        properties: Any = torch.cuda.get_device_properties(self.device)
        return int(properties.shared_memory_per_block_optin)

    @cached_property
    def num_sms(self) -> int:
        """Number of streaming multiprocessors."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def module(self, source: Path, **defines: int) -> CudaModule:
        """Load a source compiled with these -D constants, from memory, from the folder, or by compiling it."""
        key = source, tuple(sorted(defines.items()))
        if key not in self._made:
            with self._lock:  # only one of several threads compiles it
                if key not in self._made:
                    self._made[key] = CudaModule(source, key[1], self.device, self.cache)
        return self._made[key]


class CudaModule:
    """A source compiled with its -D constants, loaded on one device."""

    def __init__(self, source: Path, defines: Defines, device: torch.device, cache: ArtifactCache) -> None:
        self._driver = bindings().driver
        self.device = device
        major, minor = torch.cuda.get_device_capability(device)
        self._has_pdl = major >= 9
        image = compile_cached(source, defines, target(major, minor), cache)
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # torch's context is the one to load into
            self._module = self._call("cuModuleLoadData", image)
        self._kernels: dict[str, Any] = {}

    def kernel(self, name: str) -> Any:
        """A kernel, allowed all the dynamic shared memory that a thread block can have."""
        if name not in self._kernels:
            function = self._call("cuModuleGetFunction", self._module, name.encode())
            attribute = self._driver.CUfunction_attribute
            static_smem = self._call("cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
            properties: Any = torch.cuda.get_device_properties(self.device)
            dynamic_smem = properties.shared_memory_per_block_optin - static_smem
            limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, limit, dynamic_smem)
            self._kernels[name] = ctypes.c_void_p(int(function))
        return self._kernels[name]

    def launch(
        self,
        name: str,
        grid: Grid,
        threads: int,
        shared: int,
        arguments: Sequence[Any],
        pdl: bool = True,
        cooperative: bool = False,
    ) -> None:
        """Start a kernel on the current stream, as `launch_config` says; `arguments` are ctypes objects."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        config = launch_config(grid, threads, shared, stream, pdl and self._has_pdl, cooperative)
        params = pointer_array([ctypes.addressof(one) for one in arguments])
        launch_kernel(libcuda(), name, self.kernel(name), config, params)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *answer = getattr(self._driver, name)(*arguments)
        if error:
            self._fail(name, error)
        return answer[0] if answer else None

    def _fail(self, name: str, error: Any) -> NoReturn:
        _, words = self._driver.cuGetErrorString(error)
        raise KernelError(f"{name} failed on {self.device}: {(words or b'?').decode()}.")


def sizeof_defines(**structs: type[ctypes.Structure]) -> dict[str, int]:
    """The -D constants by which the source asserts that each struct is as large as its ctypes mirror (CHECK_SIZEOF)."""
    return {f"SIZEOF_{name}": ctypes.sizeof(mirror) for name, mirror in structs.items()}


def target(major: int, minor: int) -> str:
    """The architecture to compile for; wgmma needs sm_90a, whose cubins run on Hopper alone."""
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def compile_cached(source: Path, defines: Defines, target: str, cache: ArtifactCache) -> bytes:
    """The cubin of a source for a target such as `sm_90a`; from the cache if an intact one is there."""
    text, choices = read_source(source), compile_options(defines)
    key = hashlib.sha256(b"\0".join([text, target.encode(), __version__.encode(), *map(str.encode, choices)]))
    name = f"{source.stem}-{target}-{key.hexdigest()[:24]}.cubin"
    for kept in cache.find(name):
        return kept.data
    image = compile_source(text, source.name, [f"--gpu-architecture={target}", "--std=c++17", *choices])
    cache.put(name, image)
    return image


def compile_options(defines: Defines) -> list[str]:
    """The -D constants; with NO_FMAD=1 among them, products are fused with sums only where the source calls fmaf."""
    options = [f"-D{name}={value}" for name, value in defines]
    return [*options, "--fmad=false"] if ("NO_FMAD", 1) in defines else options


def read_source(source: Path) -> bytes:
    """A source with each header in place of its first #include."""
    included: set[str] = set()

    def inline(match: re.Match[bytes]) -> bytes:
        name = match[1].decode()
        if name in included:
            return b""
        included.add(name)
        header = source.with_name(name).read_bytes().replace(b"#pragma once\n", b"")
        return _INCLUDE.sub(inline, header)

    return _INCLUDE.sub(inline, source.read_bytes())


def compile_source(text: bytes, name: str, options: Sequence[str]) -> bytes:
    """A cubin; a KernelError with NVRTC's log if the source does not compile."""
    nvrtc = bindings().nvrtc

    def call(function: str, *arguments: Any) -> Any:
        error, *answer = getattr(nvrtc, function)(*arguments)
        if error:
            raise KernelError(f"{name} does not compile for {options[0]}: {log(function)}")
        return answer[0] if answer else None

    def log(function: str) -> str:
        _, size = nvrtc.nvrtcGetProgramLogSize(made)
        words = b" " * size
        nvrtc.nvrtcGetProgramLog(made, words)
        return f"{function}: {words.decode(errors='replace').strip()}"

    _, made = nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], [])
    try:
        encoded = [option.encode() for option in options]
        call("nvrtcCompileProgram", made, len(encoded), encoded)
        image = b" " * int(call("nvrtcGetCUBINSize", made))
        call("nvrtcGetCUBIN", made, image)
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(made)


def bindings() -> Any:
    """The package cuda.bindings with its modules driver and nvrtc; MissingExtra without it."""
    try:
        import cuda.bindings.driver
        import cuda.bindings.nvrtc
    except ImportError as error:
        raise MissingExtra(
            "The CUDA kernels need cuda-bindings and nvidia-cuda-nvrtc: pip install 'exlm[cuda]'."
        ) from error
    return cuda.bindings
