"""Evaluation against plain forward passes, and of a model against itself."""

from __future__ import annotations

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from typer.testing import CliRunner

from exlm import Config, InputError, MissingExtra, Model, evaluate_model, write_report
from exlm.cli.__main__ import app
from exlm.model.model_runner import PagedModelRunner
from exlm.quantize import evaluate
from exlm.quantize.evaluate import markdown, plot
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("judged"), hidden_size=64, intermediate_size=96)


def test_perplexity_is_that_of_a_forward_pass(folder: Path) -> None:
    ids = torch.randint(3, 259, (2, 50))
    model = Model(Config(folder))
    model.load()
    logits = model.forward(ids)[:, :-1]
    wanted = math.exp(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    assert evaluate_model(folder, ids=ids).perplexity == pytest.approx(wanted, rel=1e-4)


def test_a_model_does_not_diverge_from_itself(folder: Path) -> None:
    found = evaluate_model(folder, folder, ids=torch.randint(3, 259, (2, 50)))
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.top1 == 1
    assert found.layer_errors == (0, 0)
    assert found.perplexity == found.against_perplexity
    assert "KL divergence" in markdown(found, {}, plotted=False)


@pytest.mark.parametrize(("bits", "perplexity"), [("2.5", 49.50), ("4.0", 47.02), ("6.0", 46.90)])
def test_perplexity_of_the_reference_models_matches_the_reference(
    fixtures_dir: Path, bits: str, perplexity: float
) -> None:
    held = load_file(fixtures_dir / "reference" / "heldout_ids.safetensors")
    ids = next(iter(held.values())).flatten()[:4096].view(8, 512).long()
    found = evaluate_model(fixtures_dir / f"tiny-lm-exl2-{bits}bpw", ids=ids)
    assert found.perplexity == pytest.approx(perplexity, abs=0.01)
    assert found.bits <= float(bits)


def test_exlm_eval_prints_and_writes_the_report(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The river rose, and the bridge held. " * 80)
    options = {
        "--against": folder,
        "--text": text,
        "--rows": 2,
        "--length": 64,
        "--report": tmp_path / "report",
    }
    arguments = [str(word) for pair in options.items() for word in pair]
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["eval", str(folder), *arguments, "--no-speed", "-q"])
    assert done.exit_code == 0, done.output
    for words in ("perplexity", "top-1 agreement", "100.00%"):
        assert words in done.stdout
    table = json.loads((tmp_path / "report" / "quality.json").read_text())
    assert table["quality"]["top1"] == 1
    assert (tmp_path / "report" / "quality.md").read_text().startswith("# ")


def test_an_unwritable_report_folder_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["eval", "/nowhere/model", "--report", str(tmp_path / "file" / "report")])
    assert isinstance(done.exception, InputError)
    assert "--report" in str(done.exception)


def test_rows_and_length_need_a_text() -> None:
    for option in ("--rows", "--length"):
        done = CliRunner().invoke(app, ["eval", "/nowhere/model", option, "4"])
        assert isinstance(done.exception, InputError)
        assert "go with --text" in str(done.exception)


def test_the_plot_is_written_if_matplotlib_is_installed(folder: Path, tmp_path: Path) -> None:
    quality = evaluate_model(folder, folder, ids=torch.arange(3, 53)[None])
    if find_spec("matplotlib") is None:
        with pytest.raises(MissingExtra, match=r"pip install 'exlm\[bench\]'"):
            plot(quality, tmp_path / "x.png")
        write_report(tmp_path, quality, {"method": "none"})
        assert not (tmp_path / "quality.png").exists()
        assert "quality.png" not in (tmp_path / "quality.md").read_text()
        pytest.skip("matplotlib is not installed: what is drawn was not looked at")
    write_report(tmp_path, quality, {"method": "none"})
    header = (tmp_path / "quality.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert [int.from_bytes(header[a : a + 4]) for a in (16, 20)] == [960, 480]
    assert "](quality.png)" in (tmp_path / "quality.md").read_text()


def test_missing_or_short_text_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("Short.")
    (tmp_path / "x.pdf").write_text("Long." * 1000)
    found = {"none.txt": "no such file", "x.pdf": "files that end in", "x.txt": "at least 2,048 tokens is"}
    for name, words in found.items():
        with pytest.raises(InputError, match=words) as error:
            evaluate_model(folder, text=tmp_path / name)
        assert "calibrat" not in str(error.value).lower()
        assert name in str(error.value)


def test_rows_longer_than_a_model_are_refused(folder: Path, tmp_path: Path) -> None:
    short = tiny.make_chat_folder(tmp_path / "short", hidden_size=64, intermediate_size=96, max_position_embeddings=64)
    text = tmp_path / "text.txt"
    text.write_text("The river rose, and the bridge held. " * 80)
    words = r"A row of {} tokens is longer than .*{} can read: take a length of at most {}"
    with pytest.raises(InputError, match=words.format(65, "short", 64)):
        evaluate_model(short, text=text, length=65)
    with pytest.raises(InputError, match=words.format(65, "short", 64)):
        evaluate_model(folder, short, text=text, length=65)
    with pytest.raises(InputError, match=words.format(513, "", 512)):
        evaluate_model(folder, ids=torch.ones(1, 513, dtype=torch.long))
    done = CliRunner().invoke(app, ["eval", str(short), "--text", str(text), "--length", "9999", "-q"])
    assert "at most 64" in str(done.exception)
    assert evaluate_model(short, text=text, rows=3).tokens == 3 * 64  # the default length fits the model


@pytest.mark.parametrize(
    "ids",
    [[[1, 2]], torch.rand(2, 8), torch.full((2, 8), 259), torch.full((2, 8), -1), torch.ones(0, 8).int()],
)
def test_invalid_ids_are_refused(folder: Path, ids: Any) -> None:
    with pytest.raises(InputError, match="ids must be"):
        evaluate_model(folder, ids=ids)
    assert evaluate_model(folder, ids=torch.ones(2, 8).int()).tokens == 16


def test_models_that_cannot_be_timed_are_still_evaluated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short = tiny.make_chat_folder(tmp_path / "short", hidden_size=64, intermediate_size=96, max_position_embeddings=20)
    assert evaluate_model(short, device="cpu", speed=True).speed is not None
    short = tiny.make_chat_folder(tmp_path / "shorter", hidden_size=64, intermediate_size=96, max_position_embeddings=9)
    found = evaluate_model(short, device="cpu", speed=True)
    assert (found.tokens, found.speed) == (16 * 9, None)
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 500000 kB\nMemAvailable: 90000 kB\n")
    monkeypatch.setattr("exlm.model.devices.MEMINFO", memory)
    found = evaluate_model(folder, ids=torch.ones(2, 8).int(), device="cpu", speed=True)
    assert found.perplexity > 1
    assert found.speed is None
    assert [one.rpartition(": ")[2] for one in caplog.messages] == [
        "it is too short.",
        "it is too large to load here.",
    ]


def test_the_warm_up_is_not_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, now, calls = PagedModelRunner.decode, [0.0], [0]

    def slow(*args: Any) -> Any:
        calls[0] += 1
        now[0] += 100 if calls[0] <= 2 else 0.5  # a GPU compiles, then records
        return decode(*args)

    monkeypatch.setattr(PagedModelRunner, "decode", slow)
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: now[0])
    timed = evaluate.measure_speed(folder, "cpu")
    assert timed is not None
    assert timed["generation"] == 2
    assert timed["prompt"] * 0.5 == pytest.approx(256)


def test_the_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    small = tiny.make(tmp_path / "small", vocab_size=40)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, small / name)
    text = tmp_path / "text.txt"
    text.write_text("The river rose, and the bridge held. " * 80)
    for options in ({}, {"text": text}):
        with pytest.raises(InputError, match=r"small: the tokenizer gives id \d+, and the model knows 40"):
            evaluate_model(small, **options)  # type: ignore[arg-type]


def test_models_that_cannot_be_compared_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny.make(tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(InputError, match=r"2 layers and .*other has 1 and .*: they cannot be compared"):
        evaluate_model(folder, other, ids=torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(InputError, match="at least two"):
        evaluate_model(folder, ids=torch.zeros(1, 1, dtype=torch.long))
