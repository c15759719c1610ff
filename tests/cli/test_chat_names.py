"""File names that cannot exist: the chat reports them and continues."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from exlm.cli.__main__ import app
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", ["~no-such-user/chat", "x" * 300, "a\0b", "/dev/null/chat"])
def test_an_impossible_file_name_does_not_end_the_chat(folder: Path, tmp_path: Path, name: str) -> None:
    saved = tmp_path / "saved"
    lines = ["Hi", f"/save {name}", f"/load {name}", f"/save {saved}"]
    command = ["chat", str(folder), "-q", "-t", "0", "-n", "4", "--no-history"]
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, command, input="".join(f"{x}\n" for x in lines))
    assert done.exception is None
    assert "cannot be written" in done.stderr
    assert "cannot be read" in done.stderr or "is not a saved chat" in done.stderr
    assert '"Hi"' in saved.read_text()
