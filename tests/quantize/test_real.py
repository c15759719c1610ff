"""A trained model: file layouts of its fixtures, and less divergence than the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from exlm import evaluate_model, quantize_model, validate_exl2
from exlm.cli.__main__ import app


def held_out(fixtures: Path) -> torch.Tensor:
    """2048 ids that are not in any calibration text."""
    held = next(iter(load_file(fixtures / "reference" / "heldout_ids.safetensors").values()))
    return held.flatten()[:2048].view(8, 256).long()


def layout(file: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(file, "pt") as opened:
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}


def test_gptq_files_have_the_layout_of_other_tools(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "tiny-lm"
    quantize_model(source, tmp_path / "g", method="gptq", rows=8, length=256, report=False)
    of_other_tool = fixtures_dir / "tiny-lm-gptq-g128-act"
    assert layout(tmp_path / "g" / "model.safetensors") == layout(of_other_tool / "model.safetensors")
    ids = held_out(fixtures_dir)
    of_exlm, of_other = (evaluate_model(path, source, ids=ids).kl for path in (tmp_path / "g", of_other_tool))
    assert of_exlm is not None
    assert of_other is not None
    assert of_exlm < of_other


def test_the_measurement_of_exllamav2_is_usable(fixtures_dir: Path, tmp_path: Path) -> None:
    source, of_other_tool = fixtures_dir / "tiny-lm", fixtures_dir / "tiny-lm-exl2-2.5bpw"
    known = fixtures_dir / "reference" / "measurement.json"
    options = {"--bits": 2.496, "--rows": 24, "--length": 256, "--measurement": known}
    arguments = [str(word) for pair in options.items() for word in pair]
    done = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "e"), *arguments, "--no-report", "-q"])
    assert done.exit_code == 0, done.output
    assert validate_exl2(tmp_path / "e") == []
    ids = held_out(fixtures_dir)
    of_exlm, of_other = (evaluate_model(path, source, ids=ids) for path in (tmp_path / "e", of_other_tool))
    assert of_exlm.bits <= of_other.bits
    assert of_exlm.bytes <= of_other.bytes
    assert of_exlm.kl is not None
    assert of_other.kl is not None
    assert of_exlm.kl < 0.8 * of_other.kl


@pytest.mark.parametrize("bits", [2.5, 3.0])
def test_perplexity_is_at_most_that_of_exllamav2(fixtures_dir: Path, tmp_path: Path, bits: float) -> None:
    """With a tenth of the text; `benchmarks.quantize_quality` uses all of it, and 4 and 6 bits."""
    known = json.loads((fixtures_dir / "reference" / "perplexity.json").read_text())
    bound = next(one["ppl"] for one in known if one["name"] == f"exl2-{bits}bpw")
    source = fixtures_dir / "tiny-lm"
    quantize_model(source, tmp_path / "e", bits, rows=24, length=256, report=False)
    ids = load_file(fixtures_dir / "reference" / "heldout_ids.safetensors").popitem()[1].flatten()[:4096]
    of_exlm = evaluate_model(tmp_path / "e", ids=ids.view(8, 512).long())
    assert of_exlm.bits <= bits
    assert of_exlm.perplexity <= bound
