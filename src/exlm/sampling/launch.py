"""Launch: Triton kernels launched again and again, with as little ado as the driver allows.

Triton looks at every argument to find what it compiled, and asks the driver about every address. Here what a
kernel was compiled to is kept, and the driver gets it with its arguments packed, provided that it describes
them as they are known here; else Triton launches it. What a kernel computes is not known here.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelError

COMPILED = 64  # kernels that are kept ready
WARP = 32
KINDS = {"i32": "i", "i64": "q"}
ADDRESS = "Q"
SCRATCH = 2 * ADDRESS  # Triton appends two parameters of its own, here without use
NO_CONTEXT = 201  # the driver's word for a thread that has not used a device yet
UNUSUAL = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")

Grid = tuple[int, int, int]


class Kernel:
    """A Triton kernel (logits, their stride, arguments, constants) that is launched again and again."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[tuple[object, ...], Any] = {}

    def launch(
        self,
        grid: Grid,
        x: Tensor,
        stride: int,
        args: tuple[Tensor | int, ...],
        constants: tuple[int, ...],
    ) -> None:
        """Launch it. Tensors among the arguments are aligned; it is not compiled for the numbers there."""
        key = (stride, x.data_ptr() % 16 == 0, constants)
        ready = self._compiled.get(key)
        if ready is not None:
            ready[grid](x, stride, *args, *constants)
            return
        ready = self._kernel[grid](x, stride, *args, *constants, **self._options)
        if ready is None:
            return  # it was interpreted
        if len(self._compiled) >= COMPILED:
            self._compiled.clear()
        self._compiled[key] = Direct.of(ready, driver()) or ready


class Direct:
    """What a kernel was compiled to, launched by the driver on torch's current stream. For one thread."""

    def __init__(self, driver: Any, compiled: Any, kinds: str, taken: Sequence[int]) -> None:
        """A kernel with parameters of some `kinds`: the arguments that are `taken`, then Triton's own."""
        self._driver, self._compiled = driver, compiled  # which must stay loaded
        self._chosen = itemgetter(*taken)
        self._layout = struct.Struct(kinds)
        self._buffer = ctypes.create_string_buffer(self._layout.size)
        start = ctypes.addressof(self._buffer)
        places = [start + offset for offset, _ in layout(kinds)]
        self._places = (ctypes.c_void_p * len(places))(*places)
        block, shared = WARP * compiled.metadata.num_warps, compiled.metadata.shared
        self._shape = (block, 1, 1, shared)

    @classmethod
    def of(cls, compiled: Any, driver: Any) -> Direct | None:
        """A kernel as Triton compiled and loaded it; None if it is not of the kind that is known here."""
        metadata = getattr(compiled, "metadata", None)
        usual = getattr(metadata, "num_ctas", 0) == 1
        if driver is None or not usual or any(getattr(metadata, name, 1) for name in UNUSUAL):
            return None
        types = list(compiled.src.signature.values())
        taken = [i for i, kind in enumerate(types) if kind != "constexpr"]
        if not all(kind[0] == "*" or kind in KINDS or kind == "constexpr" for kind in types):
            return None
        kinds = "".join([KINDS.get(types[i], ADDRESS) for i in taken]) + SCRATCH
        known = described(driver, compiled.function) == layout(kinds)
        return cls(driver, compiled, kinds, taken) if known else None

    def __getitem__(self, grid: Grid) -> Any:
        """The kernel, to be called with its arguments as Triton's would be."""
        return lambda *args: self._launch(grid, args)

    def _launch(self, grid: Grid, args: tuple[Any, ...]) -> None:
        values = [value if type(value) is int else value.data_ptr() for value in args]
        self._layout.pack_into(self._buffer, 0, *self._chosen(values), 0, 0)
        kernel = self._compiled
        given = (kernel.function, *grid, *self._shape, raw_stream(args[0].device), self._places, None)
        error = self._driver.cuLaunchKernel(*given)
        if error == NO_CONTEXT:
            enter(args[0].device)
            error = self._driver.cuLaunchKernel(*given)
        if error:
            raise KernelError(f"The driver refused to launch {kernel.name}: CUDA error {error}.")


def layout(kinds: str) -> list[tuple[int, int]]:
    """Where parameters of these kinds lie, and their sizes."""
    sizes = [struct.calcsize(kind) for kind in kinds]
    return [(struct.calcsize(kinds[: i + 1]) - size, size) for i, size in enumerate(sizes)]


def described(driver: Any, function: int) -> list[tuple[int, int]]:
    """Where a function's parameters lie, and their sizes, as the driver says."""
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), []
    for i in count():
        if driver.cuFuncGetParamInfo(function, i, ctypes.byref(offset), ctypes.byref(size)):
            break
        found.append((offset.value, size.value))
    return found


def raw_stream(device: torch.device) -> int:
    """The handle of a CUDA device's current stream; 0 for other devices."""
    if device.type != "cuda":
        return 0
    torch_c: Any = torch._C
    return int(torch_c._cuda_getCurrentRawStream(device.index or 0))


def enter(device: torch.device) -> None:
    """Have this thread use a CUDA device for the first time."""
    cuda: Any = torch.cuda  # its events have no types
    cuda.Event().record(torch.cuda.current_stream(device))


@lru_cache(maxsize=1)
def driver() -> Any:
    """The CUDA driver's library; None if there is none, or one that cannot describe parameters."""
    try:
        library: Any = ctypes.CDLL("nvcuda" if sys.platform == "win32" else "libcuda.so.1")
        word, address, size = ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
        library.cuLaunchKernel.argtypes = [address, *[word] * 7, address, address, address]
        library.cuFuncGetParamInfo.argtypes = [address, size, address, address]
    except (OSError, AttributeError):
        return None
    return library
