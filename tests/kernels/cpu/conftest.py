"""The libraries under test, one for each instruction set that this machine can run."""

from __future__ import annotations

from functools import cache
from typing import NoReturn

import pytest

from exlm import settings
from exlm.errors import Unsupported
from exlm.kernels.cpu.building import sets_here
from exlm.kernels.cpu.library import Library, load


@cache
def _made(instructions: str) -> Library | str:
    try:
        return load(settings.cache_folder() / "kernels", instructions)
    except Unsupported as reason:
        return str(reason)


@pytest.fixture(scope="session", params=sets_here())
def made(request: pytest.FixtureRequest) -> Library:
    """A library."""
    found = _made(request.param)
    if isinstance(found, str):
        skip_without_compiler(found)
    return found


def skip_without_compiler(reason: str) -> NoReturn:
    """Skip where there is nothing to build with; sources that do not compile are a failure."""
    if "there is no C compiler" in reason:
        pytest.skip(reason)
    pytest.fail(reason)
