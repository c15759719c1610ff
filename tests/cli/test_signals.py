"""Ctrl-C and hang-ups, however a command was started: from a terminal, in a script's background, with nohup.

A shell without job control has SIGINT ignored in what it starts with `&`, and nohup has SIGHUP ignored. Tests
may be started so themselves: each says what its child inherits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from exlm.cli import restore_sigint
from tests import tiny
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
INHERITED = pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN])


def signal_setter(disposition: signal.Handlers, *more: signal.Signals) -> Callable[[], None]:
    """A preexec_fn that sets how the child handles SIGINT and `more`, as a shell would leave them."""

    def set_signals() -> None:
        for number in (signal.SIGINT, *more):
            signal.signal(number, disposition)

    return set_signals


def run(code: str, inherited: signal.Handlers) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    preexec_fn = signal_setter(inherited)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, preexec_fn=preexec_fn)


@INHERITED
def test_ctrl_c_during_imports_prints_no_traceback(inherited: signal.Handlers) -> None:
    code = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.argv = ["exlm", "info"]
from exlm.cli import main
main()
"""
    done = run(code, inherited)
    assert (done.returncode, done.stderr) == (130, "")


@INHERITED
def test_ctrl_c_during_an_import_that_replaces_the_exception(inherited: signal.Handlers) -> None:
    """numpy's import raises another error; torch's may even continue."""
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("half of it")
sys.meta_path.insert(0, Finder())
sys.argv = ["exlm", "info"]
from exlm.cli import main
main()
"""
    done = run(code, inherited)
    assert (done.returncode, done.stderr) == (130, "")


@INHERITED
@pytest.mark.parametrize("entry", ["exlm.cli", "exlm.cli.__main__"])
def test_ctrl_c_ends_a_running_command(entry: str, inherited: signal.Handlers) -> None:
    """The installed command uses the first entry point, `python -m exlm.cli` the second."""
    code = f"""
import signal, sys
from exlm.cli.__main__ import app
@app.command()
def wait() -> None:
    signal.raise_signal(signal.SIGINT)
    print("SIGINT was ignored")
sys.argv = ["exlm", "wait"]
from {entry} import main
main()
"""
    done = run(code, inherited)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_signal_handler_of_the_calling_program_is_kept() -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGINT, own)
    try:
        restore_sigint()
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        restore_sigint()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("tiny"))


def serve_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "exlm.cli", "serve", str(folder), "--port", "0", "-q", "--device", "cpu"]


def ask(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as reply:
        return int(reply.status)


def test_a_server_started_with_ignored_signals_handles_sigint_only(folder: Path) -> None:
    preexec_fn = signal_setter(signal.SIG_IGN, signal.SIGHUP)
    with subprocess.Popen(
        serve_command(folder), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, preexec_fn=preexec_fn
    ) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[-1]
            process.send_signal(signal.SIGHUP)
            assert ask(url) == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_server_in_the_background_of_a_script_with_nohup(folder: Path, tmp_path: Path) -> None:
    script = 'nohup "$@" >/dev/null 2>"$LOG" & echo $!; wait $!; echo ended $?'
    log = tmp_path / "log"
    log.touch()
    with subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *serve_command(folder)],
        env={**ENVIRONMENT, "LOG": str(log)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=signal_setter(signal.SIG_DFL, signal.SIGHUP),
    ) as shell:
        assert shell.stdout is not None
        server = int(shell.stdout.readline())
        try:
            deadline = time.monotonic() + 60
            while "http://" not in log.read_text():
                assert shell.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            url = next(word for word in log.read_text().split() if word.startswith("http://"))
            os.kill(server, signal.SIGHUP)
            assert ask(url) == 200
            os.kill(server, signal.SIGINT)
            assert shell.stdout.readline() == "ended 0\n"
        finally:
            with suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
