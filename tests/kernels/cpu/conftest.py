"""The libraries under test, one for each instruction set that this machine can run."""

from __future__ import annotations

from functools import cache

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
        pytest.skip(found)
    return found
