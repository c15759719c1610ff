"""Whole jobs on a tiny model: targets, formats, reports, bad input, and twenty kills."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import string
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exlm import (
    CheckpointError,
    Config,
    InputError,
    Model,
    Quality,
    evaluate_model,
    quantize_model,
    validate_exl2,
)
from exlm.checkpoint import SafetensorsFolder
from exlm.config import read_json
from exlm.quantize import pipeline
from exlm.quantize.allocation import quantized_matrices
from exlm.quantize.step_store import StepStore, store_dir
from tests import tiny
from tests.quantize.job_options import SMALL, TINY_SHAPE


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough text for a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("Nine ships left the harbour; seven came back before the storm. " * 40)
    return path


@pytest.fixture(scope="module")
def uninterrupted(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model made without interruption, and its measurement beside it."""
    target = tmp_path_factory.mktemp("uninterrupted") / "model"
    kept = target.with_name("measured.json")
    quantize_model(source, target, 5.0, calibration=text, save_measurement=kept, **SMALL)
    return target


@pytest.fixture(scope="module")
def measured(uninterrupted: Path) -> Path:
    """A measurement, for tests that are not about measuring."""
    return uninterrupted.with_name("measured.json")


def logits(path: Path) -> torch.Tensor:
    model = Model(Config(path))
    model.load()
    return model.forward(torch.arange(3, 60)[None])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def weights(folder: Path) -> int:
    return sum(m.in_features * m.out_features for m in quantized_matrices(Config(folder).spec))


def test_an_exl2_model_is_valid_and_close_to_its_source(source: Path, uninterrupted: Path) -> None:
    assert validate_exl2(uninterrupted) == []
    config = read_json(uninterrupted / "config.json")["quantization_config"]
    assert config["quant_method"] == "exl2"
    assert config["bits"] == 5.0
    assert config["head_bits"] == 6
    found = evaluate_model(uninterrupted, source, ids=torch.arange(3, 131).view(2, 64))
    assert 4.5 < found.bits <= 5.0
    exact, rounded = logits(source), logits(uninterrupted)
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.4
    assert not store_dir(uninterrupted).exists()


def test_built_in_and_sampled_text_suffice(source: Path, tmp_path: Path) -> None:
    quality = quantize_model(source, tmp_path / "out", 6.0, rows=3, length=64, size=None)
    assert quality is not None
    assert quality.kl is not None
    assert 0 < quality.kl < 0.1
    table = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert table["quality"]["perplexity"] == quality.perplexity
    assert len(table["quality"]["layer_errors"]) == len(table["quality"]["layer_bits"]) == 2
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("KL divergence", "top-1 agreement", "bits a weight", "tokens/s"):
        assert words in card


def test_the_card_names_a_source_from_the_hub(text: Path, measured: Path, tmp_path: Path) -> None:
    commit = "0a1b2c3d" * 5
    source = tiny.make_chat_folder(tmp_path / "models--acme--tiny-1" / "snapshots" / commit, **TINY_SHAPE)
    options = {**SMALL, "report": True, "calibration": text, "measurement": measured}
    quality = quantize_model(source, tmp_path / "out", 5.0, **options)
    assert quality is not None
    assert quality.against == f"acme/tiny-1@{commit}"
    assert f"- source: acme/tiny-1@{commit}\n" in (tmp_path / "out" / "README.md").read_text()


def test_more_bits_diverge_less(source: Path, text: Path, measured: Path, tmp_path: Path) -> None:
    found = []
    for bits in (4.0, 7.5):
        quantize_model(source, tmp_path / f"{bits}", bits, calibration=text, measurement=measured, **SMALL)
        found.append(evaluate_model(tmp_path / f"{bits}", source, ids=torch.arange(3, 131).view(2, 64)).kl)
    assert found[0] is not None
    assert found[1] is not None
    assert found[1] < 0.1 * found[0]


def test_size_and_max_kld_are_targets(source: Path, text: Path, measured: Path, tmp_path: Path) -> None:
    options = {"calibration": text, "measurement": measured, **SMALL}
    quantize_model(source, tmp_path / "a", size="100kB", **options)
    assert 98_000 < SafetensorsFolder(tmp_path / "a").total_bytes <= 100_000
    quantize_model(source, tmp_path / "b", max_kld=0.01, **options)
    quantize_model(source, tmp_path / "c", max_kld=0.0001, **options)
    loose, tight = (evaluate_model(tmp_path / name, ids=torch.arange(3, 67)[None]).bits for name in "bc")
    assert loose < tight


def test_a_missed_max_kld_is_retried_once(
    source: Path,
    text: Path,
    measured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first model is reported to diverge four times too much; the second is good enough, or not."""
    options = {"calibration": text, "measurement": measured, "max_kld": 0.01, **SMALL}
    evaluate, factors = pipeline.evaluate_model, [4.0]

    def evaluate_with_factor(model: Path, against: Path, **options: Any) -> Quality:
        kl = 0.01 * factors[min(len(seen), len(factors) - 1)]
        seen.append(replace(evaluate(model, against, ids=torch.arange(3, 67)[None]), kl=kl))
        return seen[-1]

    monkeypatch.setattr(pipeline, "evaluate_model", evaluate_with_factor)
    for second, words in ((1.0, ()), (2.0, ("a divergence of 0.02 was found, at most 0.01",))):
        factors[1:], seen = [second], []
        found = quantize_model(source, tmp_path / f"{second}", **options)
        assert len(seen) == 2
        assert found is not None
        assert found.kl == seen[1].kl
        assert seen[1].bits > seen[0].bits + 0.5
        assert evaluate_model(tmp_path / f"{second}", ids=torch.arange(3, 67)[None]).bits == seen[1].bits
        warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warned) == len(words)
        assert all(word in text for word, text in zip(words, warned, strict=True))
    assert not list(tmp_path.glob(".*"))


def test_a_kill_during_the_retry_gives_the_same_bytes(
    source: Path, text: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"calibration": text, "measurement": measured, "max_kld": 0.01, **SMALL}
    evaluate = pipeline.evaluate_model
    monkeypatch.setattr(
        pipeline,
        "evaluate_model",
        lambda model, against, **_: replace(evaluate(model, ids=torch.arange(3, 67)[None]), kl=0.03),
    )
    quantize_model(source, tmp_path / "a" / "model", **options)
    delete, save_json = StepStore.delete, StepStore.save_json

    def kill_after_delete(job: StepStore, *names: str) -> None:
        delete(job, names[0])
        if names[0] == "layer.head":
            raise KeyboardInterrupt

    def kill_after_save(job: StepStore, name: str, value: Any) -> None:
        save_json(job, name, value)
        if name == "layer.1" and job.load_json("aim"):
            raise KeyboardInterrupt

    for name, killed in {"delete": kill_after_delete, "save_json": kill_after_save}.items():
        with monkeypatch.context() as patch:
            patch.setattr(StepStore, name, killed)
            with pytest.raises(KeyboardInterrupt):
                quantize_model(source, tmp_path / name / "model", **options)
        assert not (tmp_path / name / "model").exists()
        quantize_model(source, tmp_path / name / "model", **options)
        assert contents(tmp_path / name / "model") == contents(tmp_path / "a" / "model")


@pytest.mark.parametrize("group", [32, 128])
def test_a_gptq_model_is_close_to_its_source(source: Path, tmp_path: Path, group: int) -> None:
    text = tmp_path / "text.txt"  # of all letters: the ids below are no text
    text.write_text("".join(random.Random(1).choices(string.printable, k=2600)), encoding="utf-8")
    quantize_model(source, tmp_path / "g", method="gptq", group_size=group, calibration=text, **SMALL)
    config = read_json(tmp_path / "g" / "config.json")["quantization_config"]
    assert config == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": True,
        "sym": False,
        "checkpoint_format": "gptq",
    }
    exact, rounded = logits(source), logits(tmp_path / "g")
    assert float((exact - rounded).norm() / exact.norm()) < 0.25


def test_a_tied_head_is_quantised(text: Path, tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "tied", tie_word_embeddings=True, **TINY_SHAPE)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    quantize_model(folder, tmp_path / "out", 6.0, calibration=text, **SMALL)
    assert validate_exl2(tmp_path / "out") == []
    exact, rounded = logits(folder), logits(tmp_path / "out")
    assert float((exact - rounded).norm() / exact.norm()) < 0.4


def test_a_failed_job_leaves_no_model(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(source)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("exlm.quantize.step_store.save_file", full)
        with pytest.raises(CheckpointError, match="Make room"):
            quantize_model(source, tmp_path / "out", 5.0, calibration=text, **SMALL)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(CheckpointError, match=r"the disk has \d+ MiB free"):
            quantize_model(source, tmp_path / "out", 5.0, calibration=text, **SMALL)
    assert not (tmp_path / "out").exists()
    assert contents(source) == before


def test_bad_options_are_refused(source: Path, text: Path, measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    few = tmp_path / "few.txt"
    few.write_text("too short")
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"text": "fine"}\nnot json\n')
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"bits": 1.5}, "between 2 and 8.5"),
        ({"bits": 9}, "between 2 and 8.5"),
        ({"bits": 4, "size": "1GB"}, "one of bits"),
        ({"size": "much"}, "not a size"),
        ({"size": "20kB", "measurement": measured}, "20,000 bytes cannot be reached: the smallest .* is "),
        ({"bits": 2.0, "measurement": measured}, "cannot be reached"),
        ({"max_kld": 1e-12, "calibration": text, "measurement": measured}, "cannot be reached"),
        ({"head_bits": 7}, "head_bits"),
        ({"calibration": few}, "at least 2,048 tokens"),
        ({"calibration": tmp_path / "none.txt"}, "no such file"),
        ({"calibration": lines}, "line 2"),
        ({"method": "gptq", "bits": 3}, "4 bits"),
        ({"method": "gptq", "group_size": 48}, "group_size"),
        ({"method": "awq"}, "exl2 or gptq"),
        ({"shard_bytes": 0}, "shard_bytes must be positive"),
        ({"save_measurement": tmp_path / "none" / "m.json"}, "save_measurement: .* that does not exist"),
        ({"save_measurement": tmp_path}, "save_measurement: .* is a folder"),
    ]
    for wish, words in wrong:
        with pytest.raises(InputError, match=words):
            quantize_model(source, out, restart=True, **{**SMALL, **wish})
        assert not out.exists()
    with pytest.raises(InputError, match="read from"):
        quantize_model(source, source, 5.0, **SMALL)


def test_overflow_names_the_layer(text: Path, tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "nan", **TINY_SHAPE)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e38
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"layers\.1"):
        quantize_model(folder, tmp_path / "out", 5.0, calibration=text, **SMALL)
    assert not (tmp_path / "out").exists()


def test_a_job_is_not_resumed_with_other_options(source: Path, text: Path, measured: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"

    class Stop(Exception):
        pass

    def stop(done: int, total: int, what: str) -> None:
        if what.startswith("quantising layer"):
            raise Stop

    with pytest.raises(Stop):
        quantize_model(source, target, 5.0, calibration=text, measurement=measured, **SMALL, progress=stop)
    with pytest.raises(InputError, match="another bits"):
        quantize_model(source, target, 6.0, calibration=text, measurement=measured, **SMALL)
    quantize_model(source, target, 6.0, calibration=text, measurement=measured, **SMALL, restart=True)
    assert validate_exl2(target) == []


def test_another_target_resumes_after_the_measurement(source: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    steps: list[str] = []
    with pytest.raises(InputError, match="cannot be reached"):
        quantize_model(source, target, max_kld=1e-12, calibration=text, **SMALL)
    record = lambda done, total, what: steps.append(what)  # noqa: E731
    quantize_model(source, target, 6.0, calibration=text, **SMALL, progress=record)
    assert validate_exl2(target) == []
    assert "measuring layer 1" not in steps
    assert "quantising layer 1" in steps


def fork(call: Callable[[], object]) -> int:
    """Start a call in a child process; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            call()
        finally:
            os._exit(0)
    return child


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_twenty_kills_give_the_same_bytes(source: Path, text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    target = tmp_path / uninterrupted.name
    random.seed(11)

    def call() -> object:
        return quantize_model(source, target, 5.0, calibration=text, **SMALL)

    started = time.perf_counter()
    quantize_model(source, tmp_path / "timed", 5.0, calibration=text, **SMALL)
    duration = time.perf_counter() - started
    for _ in range(20):
        child = fork(call)
        time.sleep(random.uniform(0.02, 0.4) * duration)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if target.exists():
            break
        assert not list(tmp_path.glob(f"{uninterrupted.name}/*"))
    if not target.exists():
        call()
    assert contents(target) == contents(uninterrupted)


def test_kills_around_every_write_give_the_same_bytes(
    source: Path, text: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / uninterrupted.name
    saves = 0
    save = StepStore.save

    class Killed(BaseException):
        pass

    def save_or_kill(self: StepStore, name: str, tensors: Any) -> None:
        nonlocal saves
        saves += 1
        random_number = random.random()
        if random_number < 0.25:
            (self.folder / f"{name}.safetensors.partial").write_bytes(b"half")
            raise Killed
        save(self, name, tensors)
        if random_number > 0.75:
            raise Killed

    monkeypatch.setattr(StepStore, "save", save_or_kill)
    random.seed(5)
    for _ in range(200):
        try:
            quantize_model(source, target, 5.0, calibration=text, **SMALL)
            break
        except Killed:
            assert not target.exists()
    assert contents(target) == contents(uninterrupted)
    assert saves > 15
