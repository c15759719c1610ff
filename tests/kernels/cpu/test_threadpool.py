"""Threads that share work: nothing is lost, nothing is done twice, and nothing is touched by two at once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from exlm.kernels.cpu.compile import COMPILERS, SOURCES

ASKED = Path(__file__).with_name("threadpool.c")


def _made(target: Path, *extra: str) -> bool:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip(f"there is no C compiler ({', '.join(COMPILERS)})")
    flags = ("-std=gnu11", "-pthread", "-Wall", "-Wextra", "-I", str(SOURCES))
    command = [compiler, *flags, *extra, str(ASKED), "-o", str(target)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("callers", [1, 3])
def test_every_chunk_is_done_once(tmp_path: Path, callers: int) -> None:
    assert _made(tmp_path / "pool", "-O2", "-Werror")
    subprocess.run([tmp_path / "pool", str(callers), "20000"], check=True, timeout=120)


def test_nothing_is_touched_by_two_at_once(tmp_path: Path) -> None:
    if not _made(tmp_path / "pool", "-O1", "-g", "-fsanitize=thread"):
        pytest.skip("the compiler cannot watch threads here")
    watched = subprocess.run([tmp_path / "pool", "2", "3000"], capture_output=True, text=True, check=False, timeout=120)
    if "unexpected memory mapping" in watched.stderr:
        pytest.skip("this kernel's memory layout is not the sanitizer's")
    assert watched.returncode == 0, watched.stderr[-3000:]
