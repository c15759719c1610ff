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

COMPILED = 64  # kernels that are kept ready
ALIGNED = 16  # bytes
WARP = 32
KINDS = {"i32": "i", "i64": "q"}
ADDRESS = "Q"
SCRATCH = 2 * ADDRESS  # Triton appends two parameters of its own, here without use
NO_CONTEXT = 201  # the driver's word for a thread that has not used a device yet
UNUSUAL = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")

Grid = tuple[int, int, int]


class Form(NamedTuple):
    """A kernel as it was compiled: the kinds of its parameters, and which of the arguments they are."""

    compiled: Any
    kinds: str
    taken: list[int]


class Kernel:
    """A Triton kernel, and what it was compiled to. Its first arguments move: they are tensors."""

    def __init__(self, kernel: Any, moving: int, **options: Any) -> None:
        self.moving = moving
        self._kernel, self._options = kernel, options
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._forms: dict[tuple[object, ...], Form | None] = {}

    def form(self, key: tuple[object, ...]) -> Form | None:
        """What the driver can launch for a key; None if that is left to Triton."""
        return self._forms.get(key)

    def launch(self, grid: Grid, args: tuple[Any, ...], key: tuple[object, ...]) -> None:
        """Have Triton launch it, and compile it if that was not done for this key."""
        ready = self._compiled.get(key)
        if ready is not None:
            ready[grid](*args)
            return
        ready = self._kernel[grid](*args, **self._options)
        if ready is None:
            return  # it was interpreted
        if len(self._compiled) >= COMPILED:
            self._compiled.clear()
            self._forms.clear()
        self._compiled[key], self._forms[key] = ready, form_of(ready, driver(), self.moving)


class Launch:
    """A kernel (logits, what else moves, the logits' stride, what stays, constants) on one grid and stream.

    All tensors but the logits are aligned, and the kernel is not compiled for the numbers among what stays.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: Grid,
        stays: tuple[Tensor | int, ...],
        constants: tuple[int, ...],
        stream: int = 0,
    ) -> None:
        self._kernel, self._grid, self._stays, self._constants = kernel, grid, stays, constants
        self._stream, self._stride, self._odd = stream, 0, 0
        self._direct: Direct | None = None

    def __call__(self, x: Tensor, stride: int, moves: tuple[Tensor, ...], addresses: tuple[int, ...]) -> None:
        """Launch it, with what moves and the addresses of that."""
        start = x.data_ptr()
        if self._direct is None or stride != self._stride or start % ALIGNED != self._odd:
            self._stride, self._odd = stride, start % ALIGNED
            args, key = self._args(x, moves), (stride, self._odd == 0, self._constants)
            form = self._kernel.form(key)
            if form is None:
                self._direct = None
                self._kernel.launch(self._grid, args, key)
                return
            self._direct = Direct(driver(), form, args, self._kernel.moving, self._grid, self._stream)
        self._direct.launch(start, *addresses)

    def _args(self, x: Tensor, moves: tuple[Tensor, ...]) -> tuple[Tensor | int, ...]:
        return (x, *moves, self._stride, *self._stays, *self._constants)


class Direct:
    """What a kernel was compiled to, launched by the driver on one stream. For one thread."""

    def __init__(
        self, driver: Any, form: Form, args: tuple[Tensor | int, ...], moving: int, grid: Grid, stream: int
    ) -> None:
        """With arguments as Triton would be given, the first of which are tensors that move."""
        self._compiled, kinds, taken = form  # it must stay loaded
        self._moving = struct.Struct(ADDRESS * moving)
        self._buffer = ctypes.create_string_buffer(struct.calcsize(kinds))
        chosen = [args[i] for i in taken]
        values = [value if isinstance(value, int) else value.data_ptr() for value in chosen]
        struct.pack_into(kinds, self._buffer, 0, *values, 0, 0)
        start = ctypes.addressof(self._buffer)
        places = [start + offset for offset, _ in layout(kinds)]
        metadata, address = self._compiled.metadata, ctypes.c_void_p
        shape = (*grid, WARP * metadata.num_warps, 1, 1, metadata.shared)
        self._given = (
            address(self._compiled.function), *map(ctypes.c_uint, shape), address(stream),
            (address * len(places))(*places), None,
        )  # fmt: skip
        self._start = driver.cuLaunchKernel

    def launch(self, *addresses: int) -> None:
        """Launch it with other addresses of what moves."""
        self._moving.pack_into(self._buffer, 0, *addresses)
        error = self._start(*self._given)
        if error == NO_CONTEXT:
            enter()
            error = self._start(*self._given)
        if error:
            raise KernelError(f"The driver refused to launch {self._compiled.name}: CUDA error {error}.")


def form_of(compiled: Any, driver: Any, moving: int) -> Form | None:
    """A kernel as Triton compiled and loaded it; None if it is not of the kind that is known here."""
    metadata = getattr(compiled, "metadata", None)
    usual = getattr(metadata, "num_ctas", 0) == 1
    if driver is None or not usual or any(getattr(metadata, name, 1) for name in UNUSUAL):
        return None
    types = list(compiled.src.signature.values())
    taken = [i for i, kind in enumerate(types) if kind != "constexpr"]
    if not all(types[i][0] == "*" or (types[i] in KINDS and i >= moving) for i in taken):
        return None
    kinds = "".join([KINDS.get(types[i], ADDRESS) for i in taken]) + SCRATCH
    known = taken[:moving] == list(range(moving)) and described(driver, compiled.function) == layout(kinds)
    return Form(compiled, kinds, taken) if known else None


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


def enter() -> None:
    """Have this thread use the current CUDA device for the first time."""
    cuda: Any = torch.cuda  # its events have no types
    cuda.Event().record()


@lru_cache(maxsize=1)
def driver() -> Any:
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
