"""`benchmarks.first_token`: writes a model once; fresh processes report a timeline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.first_token import Tally, Timeline, started, warm, write

ROOT = Path(__file__).parents[2]


def test_a_fresh_process_generates_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model", "tiny", 4.1)
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert write(folder, "tiny", 4.1) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    assert warm(folder) == sum(path.stat().st_size for path in files)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}.")
    monkeypatch.setenv("EXLM_CPU", "0")  # nothing is compiled
    told = started(folder, "cpu")
    assert told["total"] == pytest.approx(sum(told["times"].values()))
    assert [*told["times"]][:3] == ["interpreter", "import torch", "import exlm"]
    assert {"layers", "prompt, first token"} < {*told["times"]}
    assert all(seconds > 0 for seconds in told["in threads"].values())


def test_phases_of_a_timeline_add_up() -> None:
    times, tally = Timeline(0.0), Tally()
    for name in "aba":
        times.mark(name)
    assert times.total == pytest.approx(sum(times.seconds.values()))
    assert [*times.seconds] == ["a", "b"]
    assert tally.around("sum", sum)([1, 2]) == 3
    assert [*tally.seconds] == ["sum"]
