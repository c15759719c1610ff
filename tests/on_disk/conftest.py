"""The data of version 0.1.0, in places of its own for each test."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.on_disk.states import DATA


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """Facts about the data (facts.json)."""
    found: dict[str, Any] = json.loads((DATA / "facts.json").read_text())
    return found


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's folder; not to be changed."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(DATA / "quantize.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
