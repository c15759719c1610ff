"""The launcher of GPU kernels: cuLaunchKernelEx, called through ctypes, for CUDA C++ and for Triton kernels.

A launch by Triton looks at every argument to find the compiled kernel, and asks the driver about every
address. `KernelLaunch` keeps the compiled kernel and packs the arguments itself, if the driver reports the
parameter layout that it assumes; if not, Triton launches the kernel.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelError
from ..libcuda import libcuda

Grid = tuple[int, int, int]

MAX_COMPILED = 64  # compiled kernels that a TritonKernel keeps
ALIGNMENT = 16  # bytes
WARP_SIZE = 32
SCALAR_FORMATS = {"i32": "i", "i64": "q"}
POINTER_FORMAT = "Q"
SCRATCH_PARAMS = 2 * POINTER_FORMAT  # Triton appends two pointers to scratch memory, which these kernels do not use
CUDA_ERROR_INVALID_CONTEXT = 201  # this thread has not used a device yet
UNSUPPORTED_FEATURES = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")


class _LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15))


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig: filled through ctypes, a launch costs the host a tenth of what it costs
    through the objects of cuda-bindings."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


_PDL = _LaunchAttribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_COOPERATIVE = _LaunchAttribute(2, 0, 1)  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_ATTRIBUTES = (_LaunchAttribute * 2)(_PDL, _COOPERATIVE)


def launch_config(
    grid: Grid, threads: int, shared: int, stream: int, pdl: bool = False, cooperative: bool = False
) -> LaunchConfig:
    """Thread blocks of `threads` threads and `shared` bytes of dynamic shared memory, on a stream.

    With `pdl` (programmatic dependent launch) the kernel may begin while the one before it still runs, and
    waits for it by itself. With `cooperative` all thread blocks run at once and may wait for each other.
    """
    config = LaunchConfig(*grid, threads, 1, 1, shared, stream)
    first, end = 0 if pdl else 1, 2 if cooperative else 1
    if first < end:
        config.attributes, config.num_attributes = ctypes.pointer(_ATTRIBUTES[first]), end - first
    return config


def launch_kernel(driver: Any, name: str, function: Any, config: LaunchConfig, params: Any) -> None:
    """Launch a function of the driver; `params` is a ctypes array of its parameters' addresses."""
    args = ctypes.byref(config), function, params, None
    error = driver.cuLaunchKernelEx(*args)
    if error == CUDA_ERROR_INVALID_CONTEXT:
        init_cuda_context()
        error = driver.cuLaunchKernelEx(*args)
    if error:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(error, ctypes.byref(text))
        raise KernelError(
            f"The CUDA driver did not launch {name}: error {error}, {(text.value or b'unknown').decode()}."
        )


def pointer_array(addresses: Sequence[int]) -> Any:
    """Addresses as a C array of pointers."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def init_cuda_context() -> None:
    """Have this thread use the current CUDA device for the first time."""
    cuda: Any = torch.cuda  # its events have no types
    cuda.Event().record()


@cache
def cuda_driver() -> Any | None:
    """libcuda with the argument types of what is called here and in `sampling`.

    None without a driver, or with one that cannot describe a kernel's parameters (before CUDA 12.4).
    """
    library: Any = libcuda()
    address, size = ctypes.c_void_p, ctypes.c_size_t
    try:
        library.cuFuncGetParamInfo.argtypes = [address, size, address, address]
        library.cuMemcpyHtoDAsync_v2.argtypes = [address, address, size, address]
    except AttributeError:
        return None
    return library


def raw_stream(device: torch.device) -> int:
    """The handle of a CUDA device's current stream; 0 for other devices."""
    if device.type != "cuda":
        return 0
    torch_c: Any = torch._C
    return int(torch_c._cuda_getCurrentRawStream(device.index or 0))


class DriverKernel(NamedTuple):
    """A Triton kernel that the driver can launch."""

    compiled: Any
    param_format: str  # of the parameters, as of `struct`
    runtime_args: list[int]  # which of the kernel's arguments are parameters: all but constexprs


class TritonKernel:
    """A Triton kernel and what it was compiled to. Its first `num_tensors` arguments change from call to call."""

    def __init__(self, kernel: Any, num_tensors: int, **options: Any) -> None:
        self.num_tensors = num_tensors
        self._kernel, self._options = kernel, options
        self._compiled: dict[tuple[object, ...], tuple[Any, DriverKernel | None]] = {}

    def driver_kernel(self, key: tuple[object, ...]) -> DriverKernel | None:
        """What the driver can launch for a key; None if it is not compiled yet or must be launched by Triton."""
        return self._compiled.get(key, (None, None))[1]

    def launch(self, grid: Grid, args: tuple[Any, ...], key: tuple[object, ...]) -> None:
        """Launch it by Triton; compiles it if this is the first launch for the key."""
        if key in self._compiled:
            self._compiled[key][0][grid](*args)
            return
        compiled = self._kernel[grid](*args, **self._options)
        if compiled is None:
            return  # Triton's interpreter ran it
        if len(self._compiled) >= MAX_COMPILED:
            self._compiled.clear()
        self._compiled[key] = compiled, make_driver_kernel(compiled, cuda_driver(), self.num_tensors)


class KernelLaunch:
    """A Triton kernel on one grid and stream, with arguments that stay the same.

    Its signature is (logits, other tensors of each call, the stride of the logits' rows, fixed arguments,
    constexprs). All tensors but the logits are aligned, and the kernel is not specialised for the fixed numbers.
    """

    def __init__(
        self,
        kernel: TritonKernel,
        grid: Grid,
        fixed_args: tuple[Tensor | int, ...],
        constexprs: tuple[int, ...],
        stream: int = 0,
    ) -> None:
        self._kernel, self._grid, self._fixed_args, self._constexprs = kernel, grid, fixed_args, constexprs
        self._stream, self._stride, self._misalignment = stream, 0, 0
        self._driver_launch: DriverLaunch | None = None

    def __call__(
        self, x: Tensor, stride: int, per_call_tensors: tuple[Tensor, ...], addresses: tuple[int, ...]
    ) -> None:
        """Launch it for these logits and tensors, whose addresses the caller knows."""
        start = x.data_ptr()
        if self._driver_launch is None or stride != self._stride or start % ALIGNMENT != self._misalignment:
            self._stride, self._misalignment = stride, start % ALIGNMENT
            args = (x, *per_call_tensors, stride, *self._fixed_args, *self._constexprs)
            key = stride, self._misalignment == 0, self._constexprs
            driver_kernel = self._kernel.driver_kernel(key)
            if driver_kernel is None:
                self._driver_launch = None
                self._kernel.launch(self._grid, args, key)
                return
            self._driver_launch = DriverLaunch(
                cuda_driver(), driver_kernel, args, self._kernel.num_tensors, self._grid, self._stream
            )
        self._driver_launch.launch(start, *addresses)


class DriverLaunch:
    """A Triton kernel with its packed arguments, launched by the driver on one stream. For one thread."""

    def __init__(
        self,
        driver: Any,
        kernel: DriverKernel,
        args: tuple[Tensor | int, ...],
        num_tensors: int,
        grid: Grid,
        stream: int,
    ) -> None:
        """`args` are all arguments, as Triton takes them; `launch` replaces the first `num_tensors`."""
        self._driver = driver
        self._compiled, param_format, runtime_args = kernel  # keeps the kernel loaded
        self._address_struct = struct.Struct(POINTER_FORMAT * num_tensors)
        self._buffer = ctypes.create_string_buffer(struct.calcsize(param_format))
        chosen = [args[i] for i in runtime_args]
        values = [value if isinstance(value, int) else value.data_ptr() for value in chosen]
        struct.pack_into(param_format, self._buffer, 0, *values, 0, 0)
        start = ctypes.addressof(self._buffer)
        self._params = pointer_array([start + offset for offset, _ in param_layout(param_format)])
        metadata = self._compiled.metadata
        self._config = launch_config(grid, WARP_SIZE * metadata.num_warps, metadata.shared, stream)
        self._function = ctypes.c_void_p(self._compiled.function)

    def launch(self, *addresses: int) -> None:
        """Launch it with the addresses of this call's tensors."""
        self._address_struct.pack_into(self._buffer, 0, *addresses)
        launch_kernel(self._driver, self._compiled.name, self._function, self._config, self._params)


def make_driver_kernel(compiled: Any, driver: Any | None, num_tensors: int) -> DriverKernel | None:
    """A kernel as Triton compiled and loaded it; None if it has features or parameters not supported here."""
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
    """The offset and size of each parameter of these formats."""
    sizes = [struct.calcsize(kind) for kind in param_format]
    return [(struct.calcsize(param_format[: i + 1]) - size, size) for i, size in enumerate(sizes)]


def driver_param_layout(driver: Any, function: int) -> list[tuple[int, int]]:
    """The offset and size of each parameter, as the driver reports them."""
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), []
    for i in count():
        if driver.cuFuncGetParamInfo(function, i, ctypes.byref(offset), ctypes.byref(size)):
            break
        found.append((offset.value, size.value))
    return found
