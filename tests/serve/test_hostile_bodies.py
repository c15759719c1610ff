"""A minute of hostile bodies against a server process: it stays responsive, and small."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import tiny
from tests.conftest import ROOT
from tests.serve.hostile_bodies import BODIES

SECONDS = 60.0
LATENCY = 0.25
GROWTH = 200 << 20

POLLER = """
import http.client, sys, time

ports = [int(port) for port in sys.argv[1:]]
lines = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for port in ports]
while True:
    for port, line in zip(ports, lines):
        began = time.perf_counter()
        line.request("GET", "/health/live")
        line.getresponse().read()
        print(port, time.perf_counter() - began, flush=True)
    time.sleep(0.01)
"""
"""Measures the latency of /health/live of several servers."""

IDLE = """
import http.server

class Alive(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *arguments):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Alive)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A server that does nothing else: its latency is the machine's own."""


@contextmanager
def process(*command: str, errors: bool = False) -> Iterator[tuple[int, Iterator[str]]]:
    """Run a process for the length of the block; yields its id and its output lines."""
    with subprocess.Popen(
        [sys.executable, *command],
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        stdout=None if errors else subprocess.PIPE,
        stderr=subprocess.PIPE if errors else None,
        text=True,
    ) as running:
        try:
            lines = running.stderr if errors else running.stdout
            assert lines is not None
            yield running.pid, lines
        finally:
            running.kill()


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


class Server(NamedTuple):
    """A server process."""

    pid: int
    port: int
    memory: int
    """Its resident memory after a few ordinary requests."""


class Peak:
    """The peak memory of a process during the block."""

    def __init__(self, pid: int) -> None:
        self.pid, self.found = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.found = max(self.found, resident(self.pid))


def asked(port: int, path: str, body: bytes) -> int:
    """The status of the response to a request."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as line:
        line.request("POST", path, body, {"Content-Type": "application/json"})
        reply = line.getresponse()
        reply.read()
        return reply.status


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny.make_chat_folder(tmp_path_factory.mktemp("served"), max_position_embeddings=2048)
    command = ["-m", "exlm.cli", "serve", str(folder), "--port", "0", "--device", "cpu", "-q"]
    with process(*command, errors=True) as (pid, lines):
        port = int(next(lines).rpartition(":")[2])
        for path, body in (
            ("/v1/completions", b'{"prompt":"a","max_tokens":2}'),
            ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2}'),
        ):
            assert asked(port, path, body) == 200
        reading = threading.Thread(target=lambda: [*lines], daemon=True)
        reading.start()
        yield Server(pid, port, resident(pid))
    reading.join()


def test_each_body_gets_its_status(served: Server) -> None:
    found = {name: asked(served.port, one.path, one.make()) for name, one in BODIES.items()}
    assert found == {name: one.status for name, one in BODIES.items()}


def test_the_server_stays_responsive_and_small_for_a_minute(served: Server) -> None:
    pid, port, before = served
    latencies: dict[int, list[tuple[float, str]]] = {port: []}
    now = "nothing"
    with process("-c", IDLE) as (_, told):
        idle = int(next(told))
        latencies[idle] = []
        with process("-c", POLLER, str(port), str(idle)) as (_, lines), Peak(pid) as peak:

            def listen() -> None:
                for line in lines:
                    answering, seconds = line.split()
                    latencies[int(answering)].append((float(seconds), now))

            listening = threading.Thread(target=listen)
            listening.start()
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                for now, one in BODIES.items():
                    assert asked(port, one.path, one.make()) == one.status, now
        listening.join()
    worst, during = max(latencies[port])
    delay = max(latencies[idle])[0]
    grown = peak.found - before
    measured = (
        f"/health/live took {worst * 1e3:.0f} ms at worst, during {during!r}, of {len(latencies[port])} "
        f"times; an idle server took {delay * 1e3:.0f} ms; memory grew by {grown / 2**20:.0f} MB"
    )
    print(measured)
    assert len(latencies[port]) > 100, measured
    assert worst < LATENCY + delay, measured
    assert grown < GROWTH, measured
