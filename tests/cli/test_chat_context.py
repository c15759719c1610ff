"""The context length of `exlm chat`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from exlm import CacheFP16
from exlm.cli.__main__ import app
from exlm.cli.model_session import ModelSession
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("model"))


def chat_stderr(folder: Path, context: int, *lines: str) -> str:
    """What is written to standard error."""
    command = ["chat", str(folder), "-q", "-t", "0", "-n", "4", "--context", str(context)]
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, command, input="".join(f"{x}\n" for x in lines))
    assert done.exit_code == 0, done.output
    return done.stderr


def test_the_cache_is_fp16(folder: Path) -> None:
    session = ModelSession.open(str(folder), max_seq_len=None, device="cpu", dtype=None, quiet=True)
    session.load(1, 99)
    assert session.generator is not None
    assert isinstance(session.generator.cache, CacheFP16)


def test_the_context_is_not_rounded_to_pages(folder: Path) -> None:
    assert "and the context has 100: say less" in chat_stderr(folder, 100, "x" * 150)
    assert chat_stderr(folder, 100, "x" * 50) == ""


def test_a_context_longer_than_the_models_is_reported(folder: Path) -> None:
    assert "--context 600 is more than this model has: 512 tokens" in chat_stderr(folder, 600)
    assert chat_stderr(folder, 512) == ""
