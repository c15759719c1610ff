"""The phases that the quantisation benchmark times are those that a job reports."""

from __future__ import annotations

from pathlib import Path

import exlm
from benchmarks.quantize import NAMED_AT_START, PhaseTimer
from tests import tiny


def test_every_phase_that_is_named_at_its_start_is_reported(tmp_path: Path) -> None:
    source = tiny.make_chat_folder(tmp_path / "source", hidden_size=64, intermediate_size=96)
    timer = PhaseTimer()
    exlm.quantize_model(source, tmp_path / "target", rows=6, length=64, device="cpu", progress=timer)
    timer(0, 0, "checking the files")
    assert timer.phases.keys() >= {*NAMED_AT_START}, timer.phases
