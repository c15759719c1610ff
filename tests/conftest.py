"""What every test may count on: a processor torch can use, one thread, fixed seeds, the shared fixtures."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from exlm.env import cap_onednn_isa
from exlm.kernels.cpu.compile import COMPILERS, prebuilt, sets_here

cap_onednn_isa()  # must come before torch computes anything
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must come before Triton is imported
torch.set_num_threads(1)
if not (any(map(shutil.which, COMPILERS)) or prebuilt(sets_here()[0]).exists()):
    os.environ.setdefault("EXLM_CPU", "0")  # on purpose, then: or else every program says what it lacks

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Every test starts from the same random numbers, in whatever order they run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """Real model files to be right against, kept outside the repository."""
    folder = Path(os.environ.get("EXLM_FIXTURES") or ROOT.parent / "shared" / "fixtures")
    if not folder.is_dir():
        pytest.skip(f"no fixtures at {folder}; point EXLM_FIXTURES at them")
    return folder
