"""Every example runs, on small models, and shows what it promises."""

from __future__ import annotations

import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.path_substitutions import path_substitutions

EXAMPLES = ROOT / "examples"
MODEL = "/path/to/model"
SHORT = ["--max-new-tokens", "8"]

RUNS: list[tuple[str, list[str], str]] = [
    ("minimal.py", [MODEL, *SHORT], r"^Once upon a time"),
    ("chat.py", [MODEL, *SHORT], r"\AAn empty line ends it\.\n> (.*\n)+> (.*\n)+> \Z"),
    (
        "streaming.py",
        [MODEL, *SHORT, "--seed", "1"],
        r"^8 tokens at [\d.]+ a second, ended by max_new_tokens$",
    ),
    ("streaming.py", [MODEL, *SHORT, "--seed", "1", "--until", " "], r"\A(?:(?! a second)[^\0])*\Z"),
    (
        "batched.py",
        [MODEL, *SHORT, "--jobs", "6"],
        r"^5\. Paris is known for(.*\n)+\d+ tokens; [1-9]\d* tokens",
    ),
    ("json_schema.py", [MODEL], r"\Aname: (.*\n)+place: (.*\n)+year: \d+\n\Z"),
    ("speculative.py", [MODEL, *SHORT, "--draft", "/path/to/draft"], r"^alone: 8 tokens in 8 passes"),
    ("lora.py", [MODEL, "/path/to/lora", "/path/to/other_lora", *SHORT], r"^no adapter:\nThe history"),
    ("asyncio_clients.py", [MODEL, *SHORT], r"^Bob: In the year 1900"),
    ("old_script.py", [MODEL, "--max_new_tokens", "8"], r"^Once upon a time(.*\n)+---\nThe history"),
]


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {name for name, _, _ in RUNS}


@pytest.fixture(scope="module")
def replaced(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return path_substitutions(fixtures_dir, tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize(("name", "arguments", "shown"), RUNS, ids=[name for name, _, _ in RUNS])
def test_an_example_runs(
    name: str,
    arguments: list[str],
    shown: str,
    replaced: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(replaced.get(argument, argument)) for argument in arguments]
    monkeypatch.setattr(sys, "argv", [name, *given])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAnd then?\n\n"))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(shown, out, re.MULTILINE), out


def test_adapters_change_the_text(
    replaced: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(replaced[name]) for name in (MODEL, "/path/to/lora", "/path/to/other_lora")]
    monkeypatch.setattr(sys, "argv", ["lora.py", *paths, *SHORT])
    runpy.run_path(str(EXAMPLES / "lora.py"), run_name="__main__")
    texts = [part.partition(":\n")[2] for part in capsys.readouterr().out.split("\n\n") if part]
    assert len(set(texts)) == 3
