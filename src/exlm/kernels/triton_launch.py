"""Launch: Triton kernels launched again and again, with as little ado as the driver allows.

Triton looks at every argument to find what it compiled, and asks the driver about every address. Here what a
kernel was compiled to is kept, and the driver gets it with its arguments packed, provided that it describes
them as they are known here; else Triton launches it. What a kernel computes is not known here.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelError

MAX_COMPILED = 64  # kernels that are kept ready
ALIGNMENT = 16  # bytes
WARP_SIZE = 32
SCALAR_FORMATS = {"i32": "i", "i64": "q"}
POINTER_FORMAT = "Q"
SCRATCH_PARAMS = 2 * POINTER_FORMAT  # Triton appends two parameters of its own, here without use
CUDA_ERROR_INVALID_CONTEXT = 201  # the driver's word for a thread that has not used a device yet
UNSUPPORTED_FEATURES = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")

Grid = tuple[int, int, int]


class DriverKernel(NamedTuple):
    """A kernel as it was compiled: the kinds of its parameters, and which of the arguments they are."""

    compiled: Any
    param_format: str
    runtime_args: list[int]


class TritonKernel:
    """A Triton kernel, and what it was compiled to. Its first arguments move: they are tensors."""

    def __init__(self, kernel: Any, num_tensors: int, **options: Any) -> None:
        self.num_tensors = num_tensors
        self._kernel, self._options = kernel, options
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._driver_kernels: dict[tuple[object, ...], DriverKernel | None] = {}

    def driver_kernel(self, key: tuple[object, ...]) -> DriverKernel | None:
        """What the driver can launch for a key; None if that is left to Triton."""
        return self._driver_kernels.get(key)

    def launch(self, grid: Grid, args: tuple[Any, ...], key: tuple[object, ...]) -> None:
        """Have Triton launch it, and compile it if that was not done for this key."""
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self._kernel[grid](*args, **self._options)
        if compiled is None:
            return  # it was interpreted
        if len(self._compiled) >= MAX_COMPILED:
            self._compiled.clear()
            self._driver_kernels.clear()
        self._compiled[key], self._driver_kernels[key] = (
            compiled,
            make_driver_kernel(compiled, cuda_driver(), self.num_tensors),
        )


class KernelLaunch:
    """A kernel (logits, what else moves, the logits' stride, what stays, constants) on one grid and stream.

    All tensors but the logits are aligned, and the kernel is not compiled for the numbers among what stays.
    """

    def __init__(
        self,
        kernel: TritonKernel,
        grid: Grid,
        fixed_args: tuple[Tensor | int, ...],
        constants: tuple[int, ...],
        stream: int = 0,
    ) -> None:
        self._kernel, self._grid, self._fixed_args, self._constants = kernel, grid, fixed_args, constants
        self._stream, self._stride, self._misalignment = stream, 0, 0
        self._driver_launch: DriverLaunch | None = None

    def __call__(
        self, x: Tensor, stride: int, per_call_tensors: tuple[Tensor, ...], addresses: tuple[int, ...]
    ) -> None:
        """Launch it, with what moves and the addresses of that."""
        start = x.data_ptr()
        if self._driver_launch is None or stride != self._stride or start % ALIGNMENT != self._misalignment:
            self._stride, self._misalignment = stride, start % ALIGNMENT
            args, key = self._args(x, per_call_tensors), (stride, self._misalignment == 0, self._constants)
            driver_kernel = self._kernel.driver_kernel(key)
            if driver_kernel is None:
                self._driver_launch = None
                self._kernel.launch(self._grid, args, key)
                return
            self._driver_launch = DriverLaunch(
                cuda_driver(), driver_kernel, args, self._kernel.num_tensors, self._grid, self._stream
            )
        self._driver_launch.launch(start, *addresses)

    def _args(self, x: Tensor, per_call_tensors: tuple[Tensor, ...]) -> tuple[Tensor | int, ...]:
        return (x, *per_call_tensors, self._stride, *self._fixed_args, *self._constants)


class DriverLaunch:
    """What a kernel was compiled to, launched by the driver on one stream. For one thread."""

    def __init__(
        self,
        driver: Any,
        kernel: DriverKernel,
        args: tuple[Tensor | int, ...],
        num_tensors: int,
        grid: Grid,
        stream: int,
    ) -> None:
        """With arguments as Triton would be given, the first of which are tensors that move."""
        self._compiled, param_format, runtime_args = kernel  # it must stay loaded
        self._address_struct = struct.Struct(POINTER_FORMAT * num_tensors)
        self._buffer = ctypes.create_string_buffer(struct.calcsize(param_format))
        chosen = [args[i] for i in runtime_args]
        values = [value if isinstance(value, int) else value.data_ptr() for value in chosen]
        struct.pack_into(param_format, self._buffer, 0, *values, 0, 0)
        start = ctypes.addressof(self._buffer)
        param_addresses = [start + offset for offset, _ in param_layout(param_format)]
        metadata, address = self._compiled.metadata, ctypes.c_void_p
        shape = (*grid, WARP_SIZE * metadata.num_warps, 1, 1, metadata.shared)
        self._launch_args = (
            address(self._compiled.function), *map(ctypes.c_uint, shape), address(stream),
            (address * len(param_addresses))(*param_addresses), None,
        )  # fmt: skip
        self._cu_launch_kernel = driver.cuLaunchKernel

    def launch(self, *addresses: int) -> None:
        """Launch it with other addresses of what moves."""
        self._address_struct.pack_into(self._buffer, 0, *addresses)
        error = self._cu_launch_kernel(*self._launch_args)
        if error == CUDA_ERROR_INVALID_CONTEXT:
            init_cuda_context()
            error = self._cu_launch_kernel(*self._launch_args)
        if error:
            raise KernelError(f"The driver refused to launch {self._compiled.name}: CUDA error {error}.")


def make_driver_kernel(compiled: Any, driver: Any, num_tensors: int) -> DriverKernel | None:
    """A kernel as Triton compiled and loaded it; None if it is not of the kind that is known here."""
    metadata = getattr(compiled, "metadata", None)
    is_supported = getattr(metadata, "num_ctas", 0) == 1
    if driver is None or not is_supported or any(getattr(metadata, name, 1) for name in UNSUPPORTED_FEATURES):
        return None
    types = list(compiled.src.signature.values())
    runtime_args = [i for i, kind in enumerate(types) if kind != "constexpr"]
    if not all(types[i][0] == "*" or (types[i] in SCALAR_FORMATS and i >= num_tensors) for i in runtime_args):
        return None
    param_format = "".join([SCALAR_FORMATS.get(types[i], POINTER_FORMAT) for i in runtime_args]) + SCRATCH_PARAMS
    layout_matches = runtime_args[:num_tensors] == list(range(num_tensors)) and driver_param_layout(
        driver, compiled.function
    ) == param_layout(param_format)
    return DriverKernel(compiled, param_format, runtime_args) if layout_matches else None


def param_layout(param_format: str) -> list[tuple[int, int]]:
    """Where parameters of these kinds lie, and their sizes."""
    sizes = [struct.calcsize(kind) for kind in param_format]
    return [(struct.calcsize(param_format[: i + 1]) - size, size) for i, size in enumerate(sizes)]


def driver_param_layout(driver: Any, function: int) -> list[tuple[int, int]]:
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


def init_cuda_context() -> None:
    """Have this thread use the current CUDA device for the first time."""
    cuda: Any = torch.cuda  # its events have no types
    cuda.Event().record()


@lru_cache(maxsize=1)
def cuda_driver() -> Any:
    """The CUDA driver's library; None if there is none, or one that cannot describe parameters."""
    try:
        library: Any = ctypes.CDLL("nvcuda" if sys.platform == "win32" else "libcuda.so.1")
        address, size = ctypes.c_void_p, ctypes.c_size_t
        library.cuLaunchKernel.argtypes = None  # it is given what needs no conversion
        library.cuFuncGetParamInfo.argtypes = [address, size, address, address]
        library.cuMemcpyHtoDAsync_v2.argtypes = [address, address, size, address]
    except (OSError, AttributeError):
        return None
    return library
