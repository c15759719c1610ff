"""Quantised models of families that differ in biases, experts, fused and tied matrices, norms."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from exlm import Config, Model, quantize_model, validate_exl2
from tests import tiny
from tests.models.zoo import CASES, build

CHOSEN = ("llama-biased", "granite-tied", "mixtral", "gemma2", "cohere", "phi3")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose letters are among the first hundred ids."""
    return tiny.make_chat_folder(tmp_path_factory.mktemp("reader"))


def logits(path: Path) -> torch.Tensor:
    model = Model(Config(path))
    model.load()
    return model.forward(torch.arange(60, 100)[None])


@pytest.mark.parametrize("case", [case for case in CASES if case.id in CHOSEN], ids=lambda case: case.id)
def test_families_are_quantised(case, reader: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = build(case.architecture, tmp_path / "source", **{**case.overrides, "num_hidden_layers": 2}).folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(reader / name, folder / name)
    text = tmp_path / "text.txt"
    text.write_text("TheRiverRoseAndTheBridgeHeld,ButNobodyKnewForHowLong;" * 50)
    quantize_model(folder, tmp_path / "out", 8.3, head_bits=8, calibration=text, rows=4, length=64, report=False)
    assert validate_exl2(tmp_path / "out") == []
    exact, rounded = logits(folder), logits(tmp_path / "out")
    assert float((exact - rounded).norm() / exact.norm()) < 0.05
