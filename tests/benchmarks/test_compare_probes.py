"""What `benchmarks.compare` runs, run small: every command writes a result that its reader understands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import compare
from benchmarks.comparison import model_files, probes, serve_client
from benchmarks.comparison.checkouts import Checkout, CompareError
from benchmarks.comparison.probes import Probe, Row, Setup
from exlm import LLM, Config, Model, Settings
from tests.conftest import ROOT

HERE = Checkout("base", ROOT, "")
TIMEOUT = 300.0


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(HERE, tmp_path, "cpu", 1, TIMEOUT)


@pytest.fixture
def without_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled in processes of the test."""
    monkeypatch.setenv("EXLM_CPU", "0")


def only_one(found: list[Probe]) -> Probe:
    (probe,) = found
    return probe


@pytest.mark.parametrize("json_option", [True, False])
def test_the_host_is_measured_with_and_without_json(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_option: bool
) -> None:
    probe, out = only_one(probes.probes(["host"], setup)), tmp_path / "out.json"
    checkout = HERE
    if not json_option:  # a checkout from before the option: the same benchmark under its oldest names
        checkout = Checkout("base", tmp_path / "old", "")
        (checkout.folder / "benchmarks").mkdir(parents=True)
        (checkout.folder / "benchmarks" / "host.py").write_text(
            "from typing import NamedTuple\n"
            "class Case(NamedTuple):\n    rows: int\n    target: float\n    steps: int\n"
            "CASES = (Case(1, 60e-6, 40), Case(64, 12e-6, 4))\n"
            "def measure(case, repeats): return [(case.rows * 1.0, 2.0)] * repeats\n"
        )
    command = probe.command(checkout, out)
    assert ("--json" in command) is json_option
    checkout.run([*command, *(["--repeats", "1"] if json_option else [])], TIMEOUT)
    found = probe.read(out)
    names = [f"host, decode step, batch {batch}, per row" for batch in (1, 64)]
    assert [row.name for row in found] == names
    assert {(row.better, row.bound) for row in found} == {("lower", 0.05)}
    assert all(value > 0 for value in found.values())
    if not json_option:
        assert [*found.values()] == [0.5, 32.0]


@pytest.mark.usefixtures("without_cpu_kernels")
def test_prompts_and_decoding_are_measured_by_the_command_line(tmp_path: Path) -> None:
    options = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--batch",
        "1,2",
        "--context",
        "32",
        "--cache",
        "fp16,q4",
    ]
    probe = probes._bench("cpu", "tiny", [*options, "--prompt", "64", "--tokens", "4"], (0.05, 0.02))
    out = tmp_path / "out.json"
    HERE.run(probe.command(HERE, out), TIMEOUT)
    found = probe.read(out)
    bounds = {"tiny, prompt of 64": 0.05}
    for cache in ("fp16", "q4"):
        bounds |= {f"tiny, decode, {batch} x 32, {cache} cache": 0.02 for batch in (1, 2)}
    assert {row.name: row.bound for row in found} == bounds
    assert {(row.unit, row.better) for row in found} == {("tok/s", "higher")}
    assert all(value > 0 for value in found.values())


def test_work_that_does_not_fit_is_told(tmp_path: Path) -> None:
    row = {"work": "decode", "batch": 64, "context": 8000, "cache": "fp16", "rate": None}
    (tmp_path / "out.json").write_text(json.dumps({"rows": [row]}))
    with pytest.raises(CompareError, match="7B: decode of 64 x 8000 does not fit"):
        probes.read_bench(tmp_path / "out.json", "7B", 0.05, 0.02)


def test_measurements_are_chosen_by_their_name_and_only_they_write_files(setup: Setup) -> None:
    names = {probe.name: probe for probe in probes.probes(["cpu", "host"], setup)}
    assert [*names] == ["SmolLM2-135M shape, Q4_1, CPU", "1.1B Q4_K_M, CPU", "the generator's own Python"]
    assert compare.select_probes([*names.values()], None) == [*names.values()]
    (kept,) = compare.select_probes([*names.values()], "smollm2")
    kept.prepare()
    assert list(setup.models.iterdir()) == []
    with pytest.raises(CompareError, match=r"--only 'moon' leaves nothing .* 1\.1B Q4_K_M, CPU; the"):
        compare.select_probes([*names.values()], "moon")


def test_the_rows_of_a_gpu_are_those_that_are_to_be_compared(setup: Setup) -> None:
    command = only_one(probes.probes(["gpu"], setup)).command(HERE, Path("out.json"))
    text = " ".join(command[1:])
    assert text.startswith("-m exlm bench --device cuda --shape llama-2-7b --format exl2 ")
    for option in ("--batch 1,8,32,64", "--context 512,8000", "--cache fp16,q4", "--prompt 2048"):
        assert option in text


@pytest.mark.usefixtures("without_cpu_kernels")
def test_loading_is_measured_from_files_that_the_base_wrote(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    run = Checkout.run

    def tiny(self: Checkout, command: list[str], timeout: float) -> str:
        commands.append(command)
        return run(self, ["tiny" if one == "tinyllama-1.1b" else one for one in command], timeout)

    monkeypatch.setattr(Checkout, "run", tiny)
    probe, out = only_one(probes.probes(["load"], setup)), tmp_path / "out.json"
    assert commands == []
    probe.prepare()
    assert list((tmp_path / "exl2-tinyllama-1.1b").glob("*.safetensors"))
    assert len(commands) == 1
    HERE.run(probe.command(HERE, out), TIMEOUT)
    found = {row.name: value for row, value in probe.read(out).items()}
    load, first = "1.1B EXL2 files, cpu, load", "1.1B EXL2 files, cpu, process start to first token"
    assert found.keys() == {load, first}
    assert 0 < found[load] < found[first]


@pytest.mark.usefixtures("without_cpu_kernels")
def test_a_server_is_measured(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    probe, out = only_one(probes.probes(["serve"], setup)), tmp_path / "out.json"
    assert probe.command(HERE, out)[1:] == [
        *("-P", str(ROOT / "benchmarks" / "comparison" / "serve_client.py")),
        *(str(tmp_path / "chat"), "cpu", str(out)),
    ]
    assert not (tmp_path / "chat").exists()
    for _ in range(2):
        probe.prepare()
    monkeypatch.setattr(serve_client, "CASES", ((1, 2), (2, 2)))
    monkeypatch.setattr(serve_client, "WARMUP_REQUESTS", 1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    serve_client.main(str(tmp_path / "chat"), "cpu", out)
    found = probe.read(out)
    names = [f"exlm serve, streamed chats, {clients} at a time" for clients in (1, 2)]
    assert [row.name for row in found] == names
    assert all(value > 0 for value in found.values())


def test_a_server_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    with pytest.raises(SystemExit, match="ended with status 1 before it answered"):
        serve_client.main(str(tmp_path / "nothing"), "cpu", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_what_the_sampler_benchmark_writes_is_understood(setup: Setup, tmp_path: Path) -> None:
    probe, out = only_one(probes.probes(["sampler"], setup)), tmp_path / "out.json"
    few = ["--only", "greedy", "--batches", "1", "--vocabularies", "500"]
    HERE.run([*probe.command(HERE, out), *few], TIMEOUT)
    ((row, value),) = probe.read(out).items()
    assert row == Row("sampler, cpu, greedy, 1 x 500", "units", "lower", 0.05)
    assert value > 0


def test_the_chat_model_answers_to_the_limit_and_is_always_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / name / "chat" for name in "ab"]
    for folder in folders:
        model_files.main("chat", folder)
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert first == second
    llm = LLM(folders[0], device="cpu")
    answer = llm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=40, settings=Settings.greedy())
    assert (answer.finish_reason, answer.new_tokens) == ("max_new_tokens", 40)


def test_the_gguf_model_has_the_types_of_q4_k_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same writer with few layers and narrow ones; the rule for types is checked at full depth."""
    wide = {name for name, *_, wide in model_files.gguf_matrices() if wide}
    layers = {0, 1, 4, 7, 10, 13, 16, 19, 20, 21}
    kinds = ("attn_v", "ffn_down")
    assert wide == {"output.weight", *(f"blk.{n}.{kind}.weight" for n in layers for kind in kinds)}
    for name, size in {
        "HIDDEN": 512,
        "LAYERS": 3,
        "MLP": 768,
        "HEADS": 8,
        "KV_HEADS": 4,
        "VOCAB": 512,
    }.items():
        monkeypatch.setattr(model_files, name, size)
    file = tmp_path / "model.Q4_K_M.gguf"
    model_files.main(file.name, file)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    config = Config(file)
    config.device = "cpu"
    model = Model(config)
    model.load()
    forms = {matrix.role: matrix.form for matrix in model.summary().matrices}
    assert "Q6_K" in forms["head"]
    assert "Q6_K" in forms["layers.2.mlp.down"]
    assert "Q4_K" in forms["layers.0.attn.q"]
    logits = model.forward(torch.arange(300, 340)[None])
    assert bool(torch.isfinite(logits).all())
    assert 0.1 < float(logits.std()) < 10


def test_blocks_are_around_zero_and_of_the_right_size() -> None:
    gguf = pytest.importorskip("gguf")
    random = np.random.default_rng(1)
    for make, kind in ((model_files.q4_k, "Q4_K"), (model_files.q6_k, "Q6_K")):
        blocks = make(64, 1024, random)
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        assert values.shape == (64, 1024)
        assert abs(values.mean()) < 0.1 * values.std()
        assert 0.5 < values.std() * 1024**0.5 < 2


def test_scripts_stand_alone(tmp_path: Path) -> None:
    """They run in checkouts that do not have them, from any folder."""
    for script in ("model_files.py", "serve_client.py", "host_without_json.py"):
        done = subprocess.run(
            [sys.executable, "-P", str(ROOT / "benchmarks" / "comparison" / script)],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr.strip().endswith("IndexError: list index out of range")
