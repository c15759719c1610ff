"""Kernels that the driver launches get the arguments that Triton would have given them, or Triton does it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exlm.errors import KernelError
from exlm.kernels.launch import (
    CUDA_ERROR_INVALID_CONTEXT,
    DriverLaunch,
    KernelLaunch,
    LaunchConfig,
    TritonKernel,
    _LaunchAttribute,
    make_driver_kernel,
    param_layout,
)

TYPES = {"x": "*fp32", "other": "*i64", "stride": "i32", "much": "i64", "few": "i32", "TILE": "constexpr"}
PARAM_FORMAT = "QQiqiQQ"
METADATA = {
    "num_warps": 4, "num_ctas": 1, "shared": 256, "launch_cooperative_grid": False, "launch_pdl": False,
    "global_scratch_size": 0, "profile_scratch_size": 0,
}  # fmt: skip


class FakeDriver:
    """A driver that describes one function and keeps what it is asked to launch."""

    def __init__(self, kinds: str = PARAM_FORMAT, error: int = 0) -> None:
        self.described, self.error = param_layout(kinds), error
        self.launched: list[tuple[Any, ...]] = []

    def cuFuncGetParamInfo(self, function: int, i: int, offset: Any, size: Any) -> int:
        if i >= len(self.described):
            return 1
        offset._obj.value, size._obj.value = self.described[i]
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, places: Any, extra: Any) -> int:
        given: LaunchConfig = config._obj
        assert given.num_attributes == 0
        shape = (given.grid_x, given.grid_y, given.grid_z, given.block_x, given.block_y, given.block_z, given.shared)
        kinds: list[Any] = [
            ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32,
            ctypes.c_uint64, ctypes.c_uint64,
        ]  # fmt: skip
        values = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        self.launched.append((function.value, *shape, given.stream or 0, extra, values))
        return self.error

    def cuGetErrorString(self, error: int, text: Any) -> int:
        text._obj.value = b"a failure"
        return 0


def compiled_kernel(types: dict[str, str] = TYPES, **changes: Any) -> Any:
    metadata = SimpleNamespace(**(METADATA | changes))
    return SimpleNamespace(src=SimpleNamespace(signature=types), metadata=metadata, function=77, name="a_kernel")


def driver_launcher(compiled: Any, driver: Any) -> Any:
    """What can be called like a kernel, as the driver launches it."""
    form = make_driver_kernel(compiled, driver, 2)
    if form is None:
        return None
    return lambda grid, *args: DriverLaunch(driver, form, args, 2, grid, 5).launch(
        args[0].data_ptr(), args[1].data_ptr()
    )


def test_arguments_are_packed_at_the_drivers_offsets() -> None:
    driver, x, other = FakeDriver(), torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    ready = driver_launcher(compiled_kernel(), driver)
    for much in (-(2**40), 3):
        ready((5, 2, 1), x, other, -7, much, 9, 1024)
        values = [x.data_ptr(), other.data_ptr(), -7, much, 9, 0, 0]
        assert driver.launched[-1] == (77, 5, 2, 1, 128, 1, 1, 256, 5, None, values)


def test_addresses_are_repacked_for_each_launch() -> None:
    driver, x, other = FakeDriver(), torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    form = make_driver_kernel(compiled_kernel(), driver, 2)
    assert form is not None
    direct = DriverLaunch(driver, form, (x, other, 1, 2, 3, 64), 2, (1, 1, 1), 0)
    for addresses in ((2**63 + 5, 16), (32, 48)):
        direct.launch(*addresses)
        assert driver.launched[-1][-1] == [*addresses, 1, 2, 3, 0, 0]


def test_an_unsupported_kernel_is_left_to_triton() -> None:
    assert make_driver_kernel(compiled_kernel(), FakeDriver(), 2) is not None
    assert make_driver_kernel(compiled_kernel(), None, 2) is None
    assert make_driver_kernel(compiled_kernel(), FakeDriver(PARAM_FORMAT[:-1]), 2) is None
    assert make_driver_kernel(compiled_kernel(), FakeDriver("QQqqiQQ"), 2) is None
    assert make_driver_kernel(compiled_kernel(), FakeDriver(), 3) is None
    assert make_driver_kernel(compiled_kernel(TYPES | {"few": "fp32"}), FakeDriver(), 2) is None
    for change in ({"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8}):
        assert make_driver_kernel(compiled_kernel(**change), FakeDriver(), 2) is None
    assert make_driver_kernel(object(), FakeDriver(), 2) is None


def test_a_failed_launch_is_an_error() -> None:
    ready = driver_launcher(compiled_kernel(), FakeDriver(error=700))
    with pytest.raises(KernelError, match=r"a_kernel.*700"):
        ready((1, 1, 1), torch.zeros(1), torch.zeros(1), 1, 2, 3, 4)


def test_a_thread_without_a_cuda_context_creates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, entered = FakeDriver(error=CUDA_ERROR_INVALID_CONTEXT), list[int]()

    def enter() -> None:
        entered.append(1)
        driver.error = 0

    monkeypatch.setattr("exlm.kernels.launch.init_cuda_context", enter)
    ready, x = driver_launcher(compiled_kernel(), driver), torch.zeros(1)
    for _ in range(2):
        ready((1, 1, 1), x, x, 1, 2, 3, 4)
    assert entered == [1]
    assert len(driver.launched) == 3


def test_once_compiled_the_driver_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, times = FakeDriver(), list[int]()

    def compile_and_launch(*args: Any, **options: Any) -> Any:
        times.append(1)
        return compiled_kernel()

    monkeypatch.setattr("exlm.kernels.launch.cuda_driver", lambda: driver)
    kernel = TritonKernel({(2, 1, 1): compile_and_launch, (3, 1, 1): compile_and_launch}, 2)
    x, others = torch.zeros(8), [torch.zeros(2) for _ in range(3)]
    for much, rows in ((5, 2), (6, 3)):  # what it was compiled to serves other grids, too
        launch = KernelLaunch(kernel, (rows, 1, 1), (much, 1), (64,))
        for other in others:
            launch(x, 8, (other,), (other.data_ptr(),))
    assert len(times) == 1
    found = [(rows, values[1], values[3]) for _, rows, *_, values in driver.launched]
    expected = [(2, other.data_ptr(), 5) for other in others[1:]]
    assert found == expected + [(3, other.data_ptr(), 6) for other in others]


class RecordingKernel:
    """A kernel that tells when it is compiled and when what it was compiled to is launched."""

    def __init__(self, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_launch(*args: Any, **options: Any) -> Any:
            self.compiled.append((grid, args, options))
            return None if self.interpreted else CompiledRecordingKernel(self)

        return compile_and_launch


class CompiledRecordingKernel:
    """What a `Recorder` was compiled to."""

    def __init__(self, recorder: RecordingKernel) -> None:
        self.recorder = recorder

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.recorder.launched.append((grid, args))


def test_a_kernel_is_compiled_once_for_each_specialization() -> None:
    recorder = RecordingKernel()
    kernel, x, other = TritonKernel(recorder, 2, num_warps=4), torch.zeros(8, 64), torch.zeros(2)
    moves, addresses = (other,), (other.data_ptr(),)
    first = KernelLaunch(kernel, (8, 1, 1), (3,), (64, 1))
    first(x, 64, moves, addresses)
    KernelLaunch(kernel, (5, 1, 1), (4,), (64, 1))(x, 64, moves, addresses)
    assert recorder.compiled == [((8, 1, 1), (x, other, 64, 3, 64, 1), {"num_warps": 4})]
    assert recorder.launched == [((5, 1, 1), (x, other, 64, 4, 64, 1))]
    first(x, 128, moves, addresses)
    first(x.view(-1)[1:], 64, moves, addresses)
    KernelLaunch(kernel, (8, 1, 1), (3,), (64, 0))(x, 64, moves, addresses)
    assert len(recorder.compiled) == 4
    first(x, 64, moves, addresses)
    assert len(recorder.compiled) == 4


def test_an_interpreted_kernel_is_interpreted_again() -> None:
    recorder = RecordingKernel(interpreted=True)
    launch, x = KernelLaunch(TritonKernel(recorder, 1), (2, 1, 1), (), (64,)), torch.zeros(2, 64)
    for _ in range(3):
        launch(x, 64, (), ())
    assert len(recorder.compiled) == 3


def test_the_launch_structs_are_laid_out_as_the_drivers(tmp_path: Path) -> None:
    """cuda.h, which comes with Triton, says how."""
    triton = pytest.importorskip("triton")
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    structs = {
        "CUlaunchConfig": (LaunchConfig, "attributes", "attrs"),
        "CUlaunchAttribute": (_LaunchAttribute, "value", "value"),
    }
    lines = [
        f'printf("%zu %zu\\n", sizeof({name}), offsetof({name}, {field}));' for name, (_, _, field) in structs.items()
    ]
    source, program = tmp_path / "sizes.c", tmp_path / "sizes"
    source.write_text("#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\nint main() {" + "".join(lines) + "}")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    subprocess.run([compiler, f"-I{headers}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    mirrors = [(ctypes.sizeof(mirror), getattr(mirror, field).offset) for mirror, field, _ in structs.values()]
    assert [tuple(map(int, line.split())) for line in printed] == mirrors
