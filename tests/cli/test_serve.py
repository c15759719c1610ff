"""`exlm serve`: options that are refused, starting and stopping."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from exlm import InputError, MissingExtra
from exlm.cli.__main__ import app
from exlm.cli.model_options import ModelOptions
from exlm.cli.serve import _parse_settings
from tests import tiny
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lora", "loud"], "--lora takes NAME=FOLDER"),
        (["--set", "temprature=1"], "no sampler setting"),
        (["--set", "temperature=warm"], "not a number"),
        (["--api-key", "@/no/such/file"], "cannot be read"),
        (["--api-key", ""], "printable"),
        (["--api-key", "@{blank}"], "There is no key in"),
        (["--admin-key", "@{blank}"], "There is no key in"),
        (["--api-key", "@{odd}"], "cannot be read"),
        (["--set", "temperature=-1"], "temperature: Input should be"),
        (["--set", 'top_k="many"'], "top_k: Input should be"),
        (["--set", "min_p=NaN"], "min_p: Input should be"),
        (["--also", "a=x", "--also", "a=y"], "twice"),
        (["--reports", "{odd}/reports"], "cannot be created as a folder"),
        (["--also", "model=elsewhere"], "Two models are called"),
        (["--host", "256.1.1.1"], "Cannot listen"),
        (["--replicas", "3"], "--replicas: only with --ray"),
        (["--gpus", "2", "--tenant-requests", "4"], "--gpus, --tenant-requests: only with --ray"),
    ],
)
def test_invalid_options_are_refused_before_loading(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    blank, odd = tmp_path / "blank", tmp_path / "odd"
    blank.write_text(" \n\n")
    odd.write_bytes(b"\xff\xfe")
    arguments = [one.replace("{blank}", str(blank)).replace("{odd}", str(odd)) for one in arguments]
    done = CliRunner().invoke(app, ["serve", "/nowhere/model", "--port", "0", *arguments])
    assert isinstance(done.exception, InputError)
    assert complaint in str(done.exception)


def test_set_parses_values_like_requests() -> None:
    assert _parse_settings(["top_k=-1", "min_p=null", "temperature=0.5"]) == {"top_k": 0, "temperature": 0.5}


def test_replicas_need_ray() -> None:
    done = CliRunner().invoke(app, ["batch", "in.jsonl", "out.jsonl", "--replicas", "3"])
    assert isinstance(done.exception, InputError)
    assert "only with --ray" in str(done.exception)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--port", ("-1", "65536")),
        ("--max-seq-len", ("0", "-3")),
        ("--cache-tokens", ("0", "-1")),
        ("--max-batch-size", ("0", "-1")),
        ("--max-requests", ("0", "-1")),
        ("--max-tokens", ("0",)),
        ("--max-body", ("0",)),
        ("--drain-seconds", ("-1", "nan", "inf")),
        ("--stall-seconds", ("-1", "nan")),
    ],
)
def test_invalid_numbers(option: str, values: tuple[str, ...]) -> None:
    for value in values:
        done = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["serve", "/nowhere/model", option, value])
        assert done.exit_code == 2, done.output
        assert option in done.stderr


@pytest.mark.parametrize("command", [["serve", "/nowhere/model"], ["batch", "in.jsonl", "out.jsonl"]])
def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "fastapi":
            raise ImportError("No module named 'fastapi'")
        return original(name, *arguments, **options)

    removed = ("fastapi", "exlm.serve", "exlm.batch")
    for name in [name for name in sys.modules if name.startswith(removed)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, MissingExtra)
    assert "exlm[server]" in str(done.exception)


def test_serve_and_batch_share_the_model_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = {
        name: {one.name: (one.opts, one.help, one.default) for one in commands[name].params}
        for name in ("serve", "batch")
    }
    for field in dataclasses.fields(ModelOptions):
        assert shown["serve"][field.name] == shown["batch"][field.name]
    assert "model_options" not in shown["serve"]
    chosen = ModelOptions(name=None, lora=["a=b"], max_seq_len=9, cache_type="q4", device="cpu", draft="ngram")
    main = chosen.main_model("/models/one.gguf")
    assert (main.name, main.path, dict(main.loras)) == ("one", "/models/one.gguf", {"a": "b"})
    assert (main.max_seq_len, main.cache_type, main.device) == (9, "q4", "cpu")
    other = chosen.additional_model("two", "/models/two")
    assert (other.max_seq_len, other.draft, dict(other.loras)) == (9, None, {})
    assert chosen.main_model(None).name == "default"
    assert chosen.main_model(None).cpu_activation_bits == 16
    eight = dataclasses.replace(chosen, cpu_activation_bits=8)
    assert eight.additional_model("two", "/models/two").cpu_activation_bits == 8


def test_serve_starts_and_stops(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "tiny")
    (tmp_path / "keys").write_text("one\ntwo\n")
    command = [sys.executable, "-m", "exlm.cli", "serve", str(folder), "--port", "0", "-q"]
    command += ["--api-key", f"@{tmp_path / 'keys'}", "--device", "cpu", "--set", "temperature=0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            announcement = process.stderr.readline()
            assert announcement.startswith("tiny at http://127.0.0.1:")
            url = announcement.split()[-1]
            assert process.stderr.readline().endswith(f"{url}/v1\n")
            request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": "Bearer two"})
            with urllib.request.urlopen(request, timeout=20) as reply:
                assert json.load(reply)["data"][0]["id"] == "tiny"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
