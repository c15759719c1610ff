"""What a job refuses before any work, and unusual models that it accepts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from exlm import CheckpointError, Config, ConfigError, InputError, Model, Unsupported, quantize_model
from exlm.checkpoint import SafetensorsFolder
from exlm.cli.__main__ import app
from exlm.config import read_json
from exlm.quantize import api
from exlm.quantize.step_store import store_dir
from tests import tiny
from tests.quantize.job_options import SMALL, TINY_SHAPE


@pytest.fixture(scope="module")
def measured(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    quantize_model(source, folder / "model", 5.0, save_measurement=folder / "m.json", **SMALL)
    return folder / "m.json"


def test_unreachable_targets_are_refused_before_any_work(source: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    record = lambda done, total, what: steps.append(what)  # noqa: E731
    with pytest.raises(InputError, match=r"^2 bits a weight cannot be reached: the smallest .* is 2\.\d+"):
        quantize_model(source, tmp_path / "out", 2.0, **SMALL, progress=record)
    with pytest.raises(InputError, match=r"^A size of 1,000 bytes cannot be reached") as refused:
        quantize_model(source, tmp_path / "out", size=1000, **SMALL, progress=record)
    assert not steps
    assert not list(tmp_path.iterdir())
    found = re.search(r"model can be is ([\d,]+),", str(refused.value))
    assert found is not None
    least = int(found[1].replace(",", ""))
    with pytest.raises(InputError, match="cannot be reached"):
        quantize_model(source, tmp_path / "out", size=least - 1, **SMALL)
    quantize_model(source, tmp_path / "out", size=least, **SMALL)
    stored = SafetensorsFolder(tmp_path / "out").total_bytes
    assert least - 8 < stored <= least


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--group-size", "64"), "--group-size goes with --method gptq"),
        (("--method", "gptq", "--head-bits", "4"), "--head-bits goes with --method exl2"),
        (("--method", "gptq", "--measurement", "m.json"), "Measurements go with method exl2"),
        (("--method", "gptq", "--save-measurement", "m.json"), "Measurements go with method exl2"),
    ],
)
def test_options_of_the_other_method_are_refused(
    source: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    done = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out"), "-q", *options])
    assert isinstance(done.exception, InputError)
    assert words in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_measurement_that_cannot_be_saved_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^/dev/full: the measurement could not be written"):
        quantize_model(source, tmp_path / "out", 5.0, save_measurement="/dev/full", **SMALL)
    steps: list[str] = []
    record = lambda done, total, what: steps.append(what)  # noqa: E731
    quantize_model(source, tmp_path / "out", 5.0, save_measurement=tmp_path / "m.json", **SMALL, progress=record)
    assert "measuring layer 0" not in steps  # resumed
    assert read_json(tmp_path / "m.json")["exlm_measurement"] == 2


def test_the_measurement_of_exllamav2_cannot_be_saved(fixtures_dir: Path, tmp_path: Path) -> None:
    old, new = fixtures_dir / "reference" / "measurement.json", tmp_path / "m.json"
    with pytest.raises(InputError, match=r"save_measurement: .* is exllamav2's"):
        quantize_model(
            fixtures_dir / "tiny-lm",
            tmp_path / "out",
            5.0,
            measurement=old,
            save_measurement=new,
            **SMALL,
        )
    assert not list(tmp_path.iterdir())


def test_rows_longer_than_the_model_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"A length of 513 tokens is more than .* can read: take at most 512"):
        quantize_model(source, tmp_path / "out", 5.0, rows=6, length=513)
    done = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out"), "-q", "--length", "4096"])
    assert "take at most 512" in str(done.exception)
    assert not list(tmp_path.iterdir())
    short = tiny.make_chat_folder(tmp_path / "short", max_position_embeddings=48, **TINY_SHAPE)
    quantize_model(short, tmp_path / "out", 5.0, rows=6, report=False)  # the default length fits the model
    config = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert config["calibration"]["length"] == 48


def test_nan_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "nan", **TINY_SHAPE)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="NaN or infinity as it samples text to calibrate with"):
        quantize_model(folder, tmp_path / "out", 5.0, **SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["exl2", "gptq"])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.embed_tokens.weight", float("nan"), "of the source holds NaN or infinity"),
        ("model.norm.weight", float("inf"), "of the source holds NaN or infinity"),
        ("model.norm.weight", 1e6, "holds numbers that float16 cannot"),
    ],
)
def test_unquantised_tensors_are_checked_first(
    tmp_path: Path, method: Any, name: str, value: float, words: str
) -> None:
    folder = tiny.make_chat_folder(tmp_path / "odd", **TINY_SHAPE)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][..., -1] = value
    save_file(tensors, folder / "model.safetensors")
    steps: list[str] = []
    record = lambda done, total, what: steps.append(what)  # noqa: E731
    with pytest.raises(InputError, match=rf"{re.escape(name)} {words}"):
        quantize_model(folder, tmp_path / "out", method=method, **SMALL, progress=record)
    assert not steps


def test_a_model_of_zeros_is_quantised(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "zeros", **TINY_SHAPE)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.zero_() for name, tensor in tensors.items()}, folder / "model.safetensors")
    quantize_model(folder, tmp_path / "out", 5.0, **SMALL)


@pytest.mark.parametrize("method", ["exl2", "gptq"])
def test_a_layer_of_zeros_is_quantised(tmp_path: Path, method: Any) -> None:
    """V and O are zero: O's inputs are zero on every token, and its Hessian is singular."""
    folder = tiny.make_chat_folder(tmp_path / "off", **TINY_SHAPE)
    tensors = load_file(folder / "model.safetensors")
    for part in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{part}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    quantize_model(folder, tmp_path / "out", method=method, **SMALL)
    model = Model(Config(tmp_path / "out"))
    model.load()
    assert bool(model.forward(torch.tensor([[3, 4, 5]])).isfinite().all())


def change(table: dict[str, Any], *path: str, value: object) -> None:
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value


Q = "layers.0.attn.q"
OLD = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("matrices",), None, "a table of sensitivities in `matrices`"),
        (("matrices",), [1], "a table of sensitivities in `matrices`"),
        (("matrices", Q, "sizes"), {}, "is malformed"),
        (("matrices", Q, "sizes"), {"3": {}}, "is malformed"),
        (("matrices", Q, "sizes"), {"3": {"64": 1.0}, "4": 2.0}, "is malformed"),
        (("matrices", Q, "harms"), {"3": [1.0, 1.0]}, r"is malformed .*widths \[3\]"),
        (("matrices", Q, "harms", "3"), [1.0, float("nan")], "not a finite number"),
        (("matrices", Q, "harms", "3"), [1.0, 10**400], "is malformed"),
        (("matrices", Q, "sizes", "3", "64"), 10**400, "is malformed"),
        (("measurement",), {OLD: 3}, "layer 0 of this model has no self_attn"),
        (("measurement",), {OLD: {"a": 3}}, "layer 0 of this model has no self_attn"),
        (("measurement",), {"model.layers.0.parallel_decoder": 3}, "layer 0 of this model has no self_attn"),
    ],
)
def test_malformed_measurements_are_refused(
    source: Path, measured: Path, tmp_path: Path, path: tuple[str, ...], value: object, words: str
) -> None:
    table = json.loads(measured.read_text())
    change(table, *path, value=value)
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(table))
    with pytest.raises(InputError, match=rf"wrong\.json: .*{words}"):
        quantize_model(source, tmp_path / "out", 5.0, measurement=wrong, **SMALL)


def test_shapes_that_the_format_cannot_store_are_refused(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "odd", hidden_size=64, intermediate_size=72)
    with pytest.raises(Unsupported, match=r"layers\.0\.mlp\.down has 72 inputs"):
        quantize_model(folder, tmp_path / "out", 5.0, **SMALL)
    (folder / "config.json").write_text(json.dumps({**read_json(folder / "config.json"), "architectures": ["No"]}))
    with pytest.raises(ConfigError):
        quantize_model(folder, tmp_path / "out", 5.0, **SMALL)


def test_a_refused_job_leaves_no_files(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        quantize_model(source, tmp_path / "out", 5.0, calibration=tmp_path / "none.txt", **SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changed", ["config.json", "calibration text"])
def test_a_job_is_not_resumed_when_its_inputs_have_changed(measured: Path, tmp_path: Path, changed: str) -> None:
    source, read, target = (
        tiny.make_chat_folder(tmp_path / "source", **TINY_SHAPE),
        tmp_path / "own.txt",
        tmp_path / "out",
    )
    read.write_text("Nine ships left the harbour; seven came back before the storm. " * 40)
    options = {"calibration": read, "measurement": measured, **SMALL}

    def stop(done: int, total: int, what: str) -> None:
        if what.startswith("quantising layer"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, target, 5.0, **options, progress=stop)
    file = source / "config.json" if changed == "config.json" else read
    before = file.read_text()
    file.write_text(before.replace("1e-05", "1e-06").replace("Nine", "Five"))
    with pytest.raises(InputError, match=f"an unfinished job with another {changed}"):
        quantize_model(source, target, 5.0, **options)
    file.write_text(before)
    steps: list[str] = []
    record = lambda done, total, what: steps.append(what)  # noqa: E731
    quantize_model(source, target, 5.0, **options, progress=record)
    assert "quantising layer 0" not in steps


def test_a_resumed_job_needs_no_disk_space_for_written_steps(
    source: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, options = tmp_path / "out", {"measurement": measured, **SMALL}
    asked: list[int] = []
    check = api.check_disk_space
    monkeypatch.setattr(api, "check_disk_space", lambda folder, needed, what: asked.append(needed))

    def stop(done: int, total: int, what: str) -> None:
        if what.startswith("quantising layer"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, target, 5.0, **options, progress=stop)
    assert sum(path.stat().st_size for path in store_dir(target).iterdir()) > 2**17
    monkeypatch.setattr(api, "check_disk_space", check)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=asked[0] - 2**17))
    with pytest.raises(CheckpointError, match=r"the job takes about .* MiB, and the disk has"):
        quantize_model(source, tmp_path / "other", 5.0, **options)
    quantize_model(source, target, 5.0, **options)
    assert (target / "config.json").is_file()
