"""The source model of small jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.quantize.job_options import TINY_SHAPE


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("source"), **TINY_SHAPE)
