"""Kernels that the driver launches get the arguments that Triton would have given them, or Triton does it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exlm.errors import KernelError
from exlm.sampling.fused import ALIGNED, SHEETS, Sheets
from exlm.sampling.launch import NO_CONTEXT, Direct, Kernel, layout

TYPES = {"x": "*fp32", "stride": "i32", "other": "*i64", "much": "i64", "few": "i32", "TILE": "constexpr"}
KINDS = "QiQqiQQ"
METADATA = {
    "num_warps": 4, "num_ctas": 1, "shared": 256, "launch_cooperative_grid": False, "launch_pdl": False,
    "global_scratch_size": 0, "profile_scratch_size": 0,
}  # fmt: skip


class Driver:
    """A driver that describes one function and keeps what it is asked to launch."""

    def __init__(self, kinds: str = KINDS, error: int = 0) -> None:
        self.described, self.error = layout(kinds), error
        self.launched: list[tuple[Any, ...]] = []

    def cuFuncGetParamInfo(self, function: int, i: int, offset: Any, size: Any) -> int:
        if i >= len(self.described):
            return 1
        offset._obj.value, size._obj.value = self.described[i]
        return 0

    def cuLaunchKernel(self, *args: Any) -> int:
        *shape, stream, places, extra = args
        kinds: list[Any] = [
            ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32,
            ctypes.c_uint64, ctypes.c_uint64,
        ]  # fmt: skip
        values = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        self.launched.append((*shape, stream, extra, values))
        return self.error


def compiled(types: dict[str, str] = TYPES, **changes: Any) -> Any:
    metadata = SimpleNamespace(**(METADATA | changes))
    return SimpleNamespace(
        src=SimpleNamespace(signature=types), metadata=metadata, function=77, name="a_kernel"
    )


def test_arguments_lie_where_the_driver_says() -> None:
    driver = Driver()
    ready, x, other = Direct.of(compiled(), driver), torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    assert ready is not None
    for much in (-(2**40), 3):
        ready[(5, 2, 1)](x, -7, other, much, 9, 1024)
        values = [x.data_ptr(), -7, other.data_ptr(), much, 9, 0, 0]
        assert driver.launched[-1] == (77, 5, 2, 1, 128, 1, 1, 256, 0, None, values)


def test_a_kernel_of_another_kind_is_left_to_triton() -> None:
    assert Direct.of(compiled(), None) is None
    assert Direct.of(compiled(), Driver(KINDS[:-1])) is None
    assert Direct.of(compiled(), Driver("QqQqiQQ")) is None
    assert Direct.of(compiled(TYPES | {"few": "fp32"}), Driver()) is None
    for change in ({"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8}):
        assert Direct.of(compiled(**change), Driver()) is None
    assert Direct.of(object(), Driver()) is None


def test_a_refusal_is_an_error() -> None:
    ready = Direct.of(compiled(), Driver(error=700))
    assert ready is not None
    with pytest.raises(KernelError, match=r"a_kernel.*700"):
        ready[(1, 1, 1)](torch.zeros(1), 1, torch.zeros(1), 2, 3, 4)


def test_a_thread_that_is_new_to_the_device_enters_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, entered = Driver(error=NO_CONTEXT), list[torch.device]()

    def enter(device: torch.device) -> None:
        entered.append(device)
        driver.error = 0

    monkeypatch.setattr("exlm.sampling.launch.enter", enter)
    ready, x = Direct.of(compiled(), driver), torch.zeros(1)
    assert ready is not None
    for _ in range(2):
        ready[(1, 1, 1)](x, 1, x, 2, 3, 4)
    assert entered == [x.device]
    assert len(driver.launched) == 3


def test_once_compiled_the_driver_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, times = Driver(), list[int]()

    def compile_and_launch(*args: Any, **options: Any) -> Any:
        times.append(1)
        return compiled()

    monkeypatch.setattr("exlm.sampling.launch.driver", lambda: driver)
    kernel, x = Kernel({(2, 1, 1): compile_and_launch}), torch.zeros(8)
    for much in (5, 6, 7):
        kernel.launch((2, 1, 1), x, 8, (x, much, 1), (64,))
    assert len(times) == 1
    assert [values[3] for *_, values in driver.launched] == [6, 7]


@pytest.mark.parametrize("count", [1, 3, ALIGNED, ALIGNED + 1])
def test_sheets_are_aligned_and_nobody_elses(count: int) -> None:
    with torch.inference_mode():
        sheets = Sheets(count, torch.int64, torch.device("cpu"))
        found = [sheets.next() for _ in range(2 * SHEETS + 1)]
    for i, sheet in enumerate(found):
        assert sheet.shape == (count,)
        assert sheet.is_contiguous()
        assert sheet.data_ptr() % 16 == 0
        sheet.fill_(i)
    assert [set(sheet.tolist()) for sheet in found] == [{i} for i in range(len(found))]
