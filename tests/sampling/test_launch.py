"""Kernels that the driver launches get the arguments that Triton would have given them, or Triton does it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from exlm.errors import KernelError
from exlm.sampling.launch import NO_CONTEXT, Direct, Kernel, Launch, form_of, layout
from exlm.sampling.sheets import PADDED, SHEETS, Sheets, Targets, Told

TYPES = {"x": "*fp32", "other": "*i64", "stride": "i32", "much": "i64", "few": "i32", "TILE": "constexpr"}
KINDS = "QQiqiQQ"
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
        *given, places, extra = args
        *shape, stream = [part.value for part in given]
        kinds: list[Any] = [
            ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32,
            ctypes.c_uint64, ctypes.c_uint64,
        ]  # fmt: skip
        values = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        self.launched.append((*shape, stream or 0, extra, values))
        return self.error


def compiled(types: dict[str, str] = TYPES, **changes: Any) -> Any:
    metadata = SimpleNamespace(**(METADATA | changes))
    return SimpleNamespace(
        src=SimpleNamespace(signature=types), metadata=metadata, function=77, name="a_kernel"
    )


def of(compiled: Any, driver: Any) -> Any:
    """What can be called like a kernel, as the driver launches it."""
    form = form_of(compiled, driver, 2)
    if form is None:
        return None
    return lambda grid, *args: Direct(driver, form, args, 2, grid, 5).launch(
        args[0].data_ptr(), args[1].data_ptr()
    )


def test_arguments_lie_where_the_driver_says() -> None:
    driver, x, other = Driver(), torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    ready = of(compiled(), driver)
    for much in (-(2**40), 3):
        ready((5, 2, 1), x, other, -7, much, 9, 1024)
        values = [x.data_ptr(), other.data_ptr(), -7, much, 9, 0, 0]
        assert driver.launched[-1] == (77, 5, 2, 1, 128, 1, 1, 256, 5, None, values)


def test_what_moves_is_told_anew() -> None:
    driver, x, other = Driver(), torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    form = form_of(compiled(), driver, 2)
    assert form is not None
    direct = Direct(driver, form, (x, other, 1, 2, 3, 64), 2, (1, 1, 1), 0)
    for addresses in ((2**63 + 5, 16), (32, 48)):
        direct.launch(*addresses)
        assert driver.launched[-1][-1] == [*addresses, 1, 2, 3, 0, 0]


def test_a_kernel_of_another_kind_is_left_to_triton() -> None:
    assert form_of(compiled(), Driver(), 2) is not None
    assert form_of(compiled(), None, 2) is None
    assert form_of(compiled(), Driver(KINDS[:-1]), 2) is None
    assert form_of(compiled(), Driver("QQqqiQQ"), 2) is None
    assert form_of(compiled(), Driver(), 3) is None
    assert form_of(compiled(TYPES | {"few": "fp32"}), Driver(), 2) is None
    for change in ({"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8}):
        assert form_of(compiled(**change), Driver(), 2) is None
    assert form_of(object(), Driver(), 2) is None


def test_a_refusal_is_an_error() -> None:
    ready = of(compiled(), Driver(error=700))
    with pytest.raises(KernelError, match=r"a_kernel.*700"):
        ready((1, 1, 1), torch.zeros(1), torch.zeros(1), 1, 2, 3, 4)


def test_a_thread_that_is_new_to_the_device_enters_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, entered = Driver(error=NO_CONTEXT), list[int]()

    def enter() -> None:
        entered.append(1)
        driver.error = 0

    monkeypatch.setattr("exlm.sampling.launch.enter", enter)
    ready, x = of(compiled(), driver), torch.zeros(1)
    for _ in range(2):
        ready((1, 1, 1), x, x, 1, 2, 3, 4)
    assert entered == [1]
    assert len(driver.launched) == 3


def test_once_compiled_the_driver_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, times = Driver(), list[int]()

    def compile_and_launch(*args: Any, **options: Any) -> Any:
        times.append(1)
        return compiled()

    monkeypatch.setattr("exlm.sampling.launch.driver", lambda: driver)
    kernel = Kernel({(2, 1, 1): compile_and_launch, (3, 1, 1): compile_and_launch}, 2)
    x, others = torch.zeros(8), [torch.zeros(2) for _ in range(3)]
    for much, rows in ((5, 2), (6, 3)):  # what it was compiled to serves other grids, too
        launch = Launch(kernel, (rows, 1, 1), (much, 1), (64,))
        for other in others:
            launch(x, 8, (other,), (other.data_ptr(),))
    assert len(times) == 1
    found = [(rows, values[1], values[3]) for _, rows, *_, values in driver.launched]
    expected = [(2, other.data_ptr(), 5) for other in others[1:]]
    assert found == expected + [(3, other.data_ptr(), 6) for other in others]


@pytest.mark.parametrize("count", [1, 3, PADDED, PADDED + 1])
def test_sheets_are_aligned_and_nobody_elses(count: int) -> None:
    with torch.inference_mode():
        sheets = Sheets(count, torch.device("cpu"), None)
        found = [sheets.next() for _ in range(2 * SHEETS + 1)]
        targets = Targets(count, torch.device("cpu"))
        tensors = [tensor for sheet in found for tensor in sheet[:3]] + [targets.next() for _ in found]
    for i, tensor in enumerate(tensors):
        assert tensor.shape == (count,)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        tensor.fill_(i)
    assert [set(tensor.tolist()) for tensor in tensors] == [{i} for i in range(len(tensors))]
    for i, sheet in enumerate(found):
        assert sheet.addresses == tuple(tensor.data_ptr() for tensor in sheet[:3])
        assert set(sheet.told.tolist()) == {3 * i + 2}


def test_what_is_told_is_waited_for() -> None:
    numbers = np.zeros(2, np.int64)

    class Event:
        def synchronize(self) -> None:
            numbers[:] = 7

    assert Told(numbers, Event()).tolist() == [7, 7]
