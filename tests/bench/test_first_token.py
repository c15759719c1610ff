"""`benchmarks.first_token`: writes a model once; fresh processes report a timeline."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.first_token import CallTimer, Timeline, read_into_page_cache, run_process
from benchmarks.synthetic import write_exl2
from exlm.bench.shapes import SHAPES

ROOT = Path(__file__).parents[2]


def test_a_fresh_process_generates_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_exl2(tmp_path / "model", SHAPES["tiny"], shared_layers=True)
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert write_exl2(folder, SHAPES["tiny"], shared_layers=True) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    assert read_into_page_cache(folder) == sum(path.stat().st_size for path in files)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}.")
    monkeypatch.setenv("EXLM_CPU", "0")  # nothing is compiled
    timeline = run_process(folder, "cpu")
    assert timeline["total"] == pytest.approx(sum(timeline["times"].values()))
    assert [*timeline["times"]][:3] == ["interpreter", "import torch", "import exlm"]
    assert {"layers", "prompt, first token"} < {*timeline["times"]}
    assert all(seconds > 0 for seconds in timeline["in threads"].values())


def test_layers_of_a_kind_may_share_weights(tmp_path: Path) -> None:
    shape = replace(SHAPES["lfm2-1.2b"], hidden=128, layers=4, mlp=256, heads=4, vocab=320, attended=(1, 3))
    tensors = load_file(write_exl2(tmp_path / "model", shape, shared_layers=True) / "model.safetensors")
    for name, same, other in (("conv.in_proj.q_weight", 2, 1), ("operator_norm.weight", 2, 1)):
        first = tensors[f"model.layers.0.{name}"]
        assert torch.equal(tensors[f"model.layers.{same}.{name}"], first)
        found = tensors.get(f"model.layers.{other}.{name}")
        assert found is None or not torch.equal(found, first)


def test_phases_of_a_timeline_add_up() -> None:
    times, calls = Timeline(0.0), CallTimer()
    for name in "aba":
        times.mark(name)
    assert times.total == pytest.approx(sum(times.seconds.values()))
    assert [*times.seconds] == ["a", "b"]
    assert calls.wrap("sum", sum)([1, 2]) == 3
    assert [*calls.seconds] == ["sum"]
