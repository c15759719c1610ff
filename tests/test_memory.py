"""memory_errors: which errors mean too little memory, and what they become."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

import pytest
import torch

from exlm import DoesNotFit, InputError
from exlm.memory import has_address_space, memory_errors, ran_out, require_address_space

TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
MEAN_IT: list[BaseException] = [
    MemoryError(),
    MemoryError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError("libx.so: failed to map segment from shared object"),
    ImportError("libx.so: failed to map segment from shared object"),
    RuntimeError("can't start new thread"),
    RuntimeError(TORCH),
    RuntimeError("[enforce fail at alloc_cpu.cpp] data. DefaultCPUAllocator: not enough memory: you tried"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
]
MEAN_SOMETHING_ELSE: list[BaseException] = [
    ValueError("out of memory"),
    RuntimeError("shapes differ"),
    OSError(errno.ENOENT, "No such file or directory"),
    DoesNotFit("out of memory"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", MEAN_IT, ids=repr)
def test_errors_for_too_little_memory_become_does_not_fit(error: Exception) -> None:
    assert ran_out(error)
    with pytest.raises(DoesNotFit, match=r"^/m: it failed: there is too little memory \(.+\)\. Free") as raised:
        _raising(error, lambda: "/m: it failed")
    assert raised.value.__cause__ is error
    assert isinstance(raised.value, InputError)
    assert "enforce fail" not in str(raised.value)


@pytest.mark.parametrize("error", MEAN_SOMETHING_ELSE, ids=repr)
def test_other_errors_are_not_changed(error: BaseException) -> None:
    assert not ran_out(error)
    with pytest.raises(type(error)) as raised:
        _raising(error, pytest.fail)
    assert raised.value is error


def _raising(error: BaseException, describe: Callable[[], str]) -> None:
    with memory_errors(describe):
        raise error


def test_torch_raises_such_an_error_for_a_tensor_that_is_too_large() -> None:
    with pytest.raises(DoesNotFit, match=r"can't allocate memory|not enough memory"):
        _allocated(1 << 60)


def _allocated(size: int) -> torch.Tensor:
    with memory_errors(lambda: "a tensor"):
        return torch.empty(size, dtype=torch.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no such limit elsewhere")
def test_address_space_is_tried_and_not_kept() -> None:
    for _ in range(100):  # 100 TB, if it were
        require_address_space(1 << 40, "/m")
    assert not has_address_space(1 << 60)
    assert not has_address_space(1 << 70)
    with pytest.raises(DoesNotFit, match=r"^/m: this needs 1,099,511,627,776 MB of address space.*ulimit -v"):
        require_address_space(1 << 60, "/m")
