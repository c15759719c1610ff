"""Servers for the tests; one is shared by all tests that leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from exlm.serve import Limits, Options
from tests import tiny
from tests.serve.running_server import RunningServer, preloaded, running_server


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 259 bytes and special tokens, with a chat template."""
    return tiny.make_chat_folder(tmp_path_factory.mktemp("chatty"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(chatty: Path) -> Iterator[RunningServer]:
    """The random model, served without keys."""
    with running_server(preloaded(chatty), Options(limits=Limits(answer=32))) as running:
        yield running
