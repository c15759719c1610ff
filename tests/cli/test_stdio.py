"""Commands whose standard streams are closed at the start, or whose input is not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

pytestmark = pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("model"))


def run_in_shell(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell that closes a stream."""
    words = [sys.executable, "-m", "exlm.cli", *map(str, arguments)]
    return subprocess.run(
        ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *words], capture_output=True, text=True, timeout=120
    )


def test_a_chat_ends_if_stdin_is_closed(folder: Path) -> None:
    done = run_in_shell("<&-", "chat", folder, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_prompt_is_empty_if_stdin_is_closed(folder: Path) -> None:
    done = run_in_shell("<&-", "generate", folder, "-", "-n", "4", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_in_shell("</dev/null", "generate", folder, "-", "-n", "4", "-q").stdout


@pytest.mark.parametrize("command", [("generate", "Hi", "-n", "4", "-q"), ("info",)])
def test_a_closed_stdout_is_an_error(folder: Path, command: tuple[str, ...]) -> None:
    done = run_in_shell(">&-", command[0], folder, *command[1:])
    assert done.returncode == 1
    assert done.stderr.startswith("OSError: [Errno 9] standard output is closed")
    assert done.stderr.count("\n") == 1


def test_statistics_follow_the_text_where_both_streams_go_to_one_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    text = run_in_shell("", "generate", folder, "Hi", "-n", "4", "-q").stdout
    both = run_in_shell("2>&1", "generate", folder, "Hi", "-n", "4").stdout
    assert text + "4 tokens at " in both


def test_a_closed_stderr_changes_nothing(folder: Path) -> None:
    done = run_in_shell("<&- 2>&-", "generate", folder, "Hi", "-n", "4")
    assert done.returncode == 0
    assert done.stdout == run_in_shell("", "generate", folder, "Hi", "-n", "4", "-q").stdout


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_not_utf8_is_reported_and_the_chat_continues(folder: Path, errors: str) -> None:
    def run(stdin: bytes, *arguments: str) -> tuple[int, str, str]:
        words = [sys.executable, "-m", "exlm.cli", arguments[0], str(folder), *arguments[1:], "-q", "-n", "4"]
        environment = {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
        done = subprocess.run(words, input=stdin, capture_output=True, env=environment, timeout=120)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    status, _, stderr = run(b"caf\xe9", "generate", "-")
    assert (status, stderr.count("\n")) == (1, 1)
    assert stderr.startswith("InputError: This is not UTF-8 text: what comes after 'caf' is no character")
    options = ("-t", "0", "--no-history")
    status, answer, stderr = run(b"Hi\ncaf\xe9\n/system caf\xe9\n", "chat", *options)
    assert (status, stderr.count("iconv")) == (0, 2)
    assert answer == run(b"Hi\n", "chat", *options)[1]
