"""Unfinished quantiser jobs of 0.1.0 are resumed; its models and measurements are read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Config, InputError, Model, evaluate_model, quantize_model, validate_exl2
from tests.on_disk.states import FEW, FOLDER, JOBS, LAYERS, MEASURED, MTIME, PROMPT, digest, machine

TARGET = "model"
HIDDEN = ".model.quantizing"


@pytest.fixture(scope="module")
def whole(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, models of uninterrupted jobs, made by the version under test."""
    folder = tmp_path_factory.mktemp("whole")
    made = {}
    for name in ("solved", "gptq", "second-try"):
        job = JOBS[name]
        made[job.finished or name] = folder / name / TARGET
        quantize_model(unpacked / "source", folder / name / TARGET, **job.asked(unpacked))
    return made


def begun(name: str, unpacked: Path, place: Path) -> Path:
    """Restore the state in which a stopped job left its folder; returns the job's target."""
    for file in ("source", "text.txt", "measurement.json"):
        copy = shutil.copytree if (unpacked / file).is_dir() else shutil.copy2
        copy(unpacked / file, place / file)
    target = place / "jobs" / name / TARGET
    shutil.copytree(unpacked / "jobs" / name, target.parent)
    said = target.parent / HIDDEN / "job.json"
    said.write_text(said.read_text().replace(FOLDER, str(place)))
    assert int((place / "source" / "model.safetensors").stat().st_mtime_ns) == MTIME * 10**9
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def divergence(model: Path, source: Path) -> float:
    found = evaluate_model(model, source, ids=torch.arange(3, 195).view(3, 64)).kl
    assert found is not None
    return found


@pytest.mark.parametrize("name", JOBS)
def test_a_job_resumes_to_the_same_model(
    name: str, whole: dict[str, Path], unpacked: Path, tmp_path: Path, facts: dict[str, Any]
) -> None:
    job, target = JOBS[name], begun(name, unpacked, tmp_path)
    steps: list[str] = []
    quantize_model(
        tmp_path / "source",
        target,
        **job.asked(tmp_path),
        progress=lambda done, total, what: steps.append(what),
    )
    assert [path.name for path in target.parent.iterdir()] == [TARGET]
    assert not {*job.done} & {*steps}, "finished steps ran again"
    left = {*LAYERS, *(() if job.options.get("method") == "gptq" else MEASURED)} - {*job.done}
    assert left <= {*steps}
    expected = whole[job.finished or name]
    alike = machine() == facts["machine"] and digest(whole["exl2"]) == facts["weights"]["exl2"]
    if alike or name == "calibrated":
        assert contents(target) == contents(expected)
        return
    # Other processors round sums differently, and the job continues from sums of the machine that made it.
    # On the same machine the next test shows whether weights have changed.
    assert contents(target).keys() == contents(expected).keys()
    assert (target / "config.json").read_bytes() == (expected / "config.json").read_bytes()
    found, usual = (divergence(model, unpacked / "source") for model in (target, expected))
    assert usual / 1.5 < found < usual * 1.5


@pytest.mark.parametrize("name", ["exl2", "gptq"])
def test_models_have_the_bytes_that_0_1_0_gave_them(name: str, whole: dict[str, Path], facts: dict[str, Any]) -> None:
    """On the same kind of machine only. A change that is meant to change weights ends this test."""
    if machine() != facts["machine"]:
        pytest.skip(f"the data was made on {facts['machine']}, this is {machine()}")
    assert digest(whole[name]) == facts["weights"][name]


def test_another_target_resumes_after_the_measurement(unpacked: Path, tmp_path: Path) -> None:
    target, steps = begun("measured", unpacked, tmp_path), []
    options = {**JOBS["measured"].asked(tmp_path), "bits": 6.0}
    quantize_model(tmp_path / "source", target, **options, progress=lambda done, total, what: steps.append(what))
    assert not {*MEASURED} & {*steps}
    assert validate_exl2(target) == []
    assert 5.5 < evaluate_model(target, ids=torch.arange(3, 67)[None]).bits <= 6.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rows": 5}, "rows"),
        ({"bits": 6.0}, "bits"),
        ({"length": 33}, "length"),
        ({"head_bits": 8}, "head_bits"),
    ],
)
def test_a_job_is_not_resumed_with_other_options(
    change: dict[str, Any], named: str, unpacked: Path, tmp_path: Path
) -> None:
    target = begun("solved-one", unpacked, tmp_path)
    before = contents(target.parent / HIDDEN)
    with pytest.raises(InputError, match=f"another {named}"):
        quantize_model(tmp_path / "source", target, **{**JOBS["solved-one"].asked(tmp_path), **change})
    assert contents(target.parent / HIDDEN) == before


def test_a_job_is_not_resumed_with_another_source(unpacked: Path, tmp_path: Path) -> None:
    target = begun("solved-one", unpacked, tmp_path)
    (tmp_path / "source" / "model.safetensors").touch()
    with pytest.raises(InputError, match="another source"):
        quantize_model(tmp_path / "source", target, **JOBS["solved-one"].asked(tmp_path))


def test_a_measurement_serves_another_target(unpacked: Path, tmp_path: Path) -> None:
    asked = {**FEW, "calibration": unpacked / "text.txt", "measurement": unpacked / "measurement.json"}
    again = tmp_path / "again.json"
    quantize_model(unpacked / "source", tmp_path / "model", 4.5, **asked, save_measurement=again)
    assert validate_exl2(tmp_path / "model") == []
    assert 4.0 < evaluate_model(tmp_path / "model", ids=torch.arange(3, 67)[None]).bits <= 4.5
    assert again.read_text() == (unpacked / "measurement.json").read_text()


@pytest.mark.parametrize("name", ["exl2", "gptq"])
def test_models_that_were_made_are_read(name: str, unpacked: Path, facts: dict[str, Any]) -> None:
    folder = unpacked / "models" / name
    assert digest(folder) == facts["weights"][name]
    config = Config(folder)
    config.device = "cpu"
    model = Model(config)
    model.load()
    found = model.forward(torch.tensor([PROMPT]))[0, -1, :16].float()
    assert found.tolist() == pytest.approx(facts["logits"][name], abs=0.02)
    assert name != "exl2" or validate_exl2(folder) == []
