"""The libraries under test, one for each instruction set that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NoReturn

import pytest
import torch

from exlm import env
from exlm.errors import Unsupported
from exlm.kernels.cpu import CpuBackend
from exlm.kernels.cpu.bindings import Library, load
from exlm.kernels.cpu.compile import sets_here


@cache
def _loaded(instructions: str) -> Library | str:
    try:
        return load(env.cache_folder() / "kernels", instructions)
    except Unsupported as reason:
        return str(reason)


@pytest.fixture(scope="session", params=sets_here())
def library(request: pytest.FixtureRequest) -> Library:
    """A library."""
    found = _loaded(request.param)
    if isinstance(found, str):
        skip_without_compiler(found)
    return found


@pytest.fixture(scope="session")
def backend(library: Library) -> CpuBackend:
    """A backend with that library."""
    return CpuBackend(torch.device("cpu"), torch.float32, library.path.parent, library.instructions)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """What a test sets is its own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def skip_without_compiler(reason: str) -> NoReturn:
    """Skip where there is nothing to build with; sources that do not compile are a failure."""
    if "there is no C compiler" in reason:
        pytest.skip(reason)
    pytest.fail(reason)
