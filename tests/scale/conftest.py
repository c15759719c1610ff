"""A local Ray for the tests of this folder, in a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from exlm import InputError

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0


@dataclass
class Cluster:
    """A running Ray, and the environment with which a process connects to it."""

    process: subprocess.Popen[str]
    address: str
    port: int
    environment: dict[str, str]

    def deploy(self, **settings: Any) -> None:
        """Deploy a service and wait until it is ready; without one, stop serving."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(settings or None) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ready\n"

    def workers(self, title: str) -> list[int]:
        """Our processes whose title begins with `title`."""
        parents, found = {}, []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    command = (folder / "cmdline").read_bytes()
                    after = (folder / "stat").read_text().rpartition(")")[2]
                except OSError:  # it has ended meanwhile
                    continue
                parents[int(folder.name)] = int(after.split()[1])
                if command.startswith(f"ray::{title}".encode()):
                    found.append(int(folder.name))

        def ours(one: int) -> bool:
            while one > 1 and one != self.process.pid:
                one = parents.get(one, 0)
            return one == self.process.pid

        return sorted(filter(ours, found))


def wait_until(fact: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until `fact` is true."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def kill(process: int) -> None:
    """Kill a process, as a crash would."""
    os.kill(process, signal.SIGKILL)


def spare_port() -> int:
    """A free port below the range of outgoing connections, so that it stays free."""
    from exlm.serve import listen

    for port in Random().sample(range(20000, 30000), 100):
        try:
            listen("127.0.0.1", port).close()
        except InputError:
            continue
        return port
    raise AssertionError("a hundred ports were taken")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Ray cluster for all tests."""
    pytest.importorskip("ray", reason="needs exlm[scale]")
    port = spare_port()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    command = [sys.executable, "-m", "tests.scale.child", str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, "Ray did not start"
            yield Cluster(process, address, port, {**environment, "RAY_ADDRESS": address})
        finally:
            process.stdin.close()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
