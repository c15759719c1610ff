"""The C sources under the address and undefined-behaviour sanitizers, on random matrices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exlm.kernels.cpu.building import BuildError, build

ROOT = Path(__file__).resolve().parents[3]

WALK = """
import sys, torch
from pathlib import Path
from hypothesis import given, settings, strategies as st
from exlm.kernels.cpu.blocks import arrange
from exlm.kernels.cpu.library import Library
from exlm.kernels.cpu.linear import PackedLinear, PackedLookup
from exlm.kernels.cpu.small import AddRmsNorm, SiluGate
from tests.kernels.cpu.chance import RECIPES, make

made = Library("plain", Path(sys.argv[1]))

@settings(max_examples=60, database=None, derandomize=True, deadline=None)
@given(RECIPES, st.integers(1, 40), st.integers(1, 3))
def walk(recipe, rows, threads):
    torch.set_num_threads(threads)
    weight = make(recipe)
    blocks = arrange(weight, made, threads)
    assert PackedLinear(made, blocks)(torch.randn(rows, weight.in_features)).isfinite().all()
    PackedLookup(made, blocks, torch.float32)(torch.arange(recipe.columns)[None])
    x = torch.randn(rows, recipe.columns)
    AddRmsNorm(made, torch.ones(recipe.columns), 1e-5, None)(x, x)
    SiluGate(made)(x, x)

walk()
"""


def test_nothing_is_read_or_written_outside(tmp_path: Path) -> None:
    target = tmp_path / "sanitized.so"
    try:
        build("plain", target, ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover"))
    except BuildError as reason:
        pytest.skip(str(reason))
    preload = _runtime("libasan.so")
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": f"{ROOT}/src",
    }
    done = subprocess.run(
        [sys.executable, "-c", WALK, str(target)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def _runtime(name: str) -> str:
    """The sanitizer's own library, which must be there before Python's first allocation."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("only gcc says where its sanitizer is")
    asked = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = asked.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip("gcc has no sanitizer here")
    return path
