"""Start ranks by forking a process that has imported torch, which saves that time for each.

The processes are as real as those of `workers.start_workers`, which `test_programs` tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from exlm.parallel import Channel
from tests.conftest import ROOT

MESSAGE = 1 << 16


class ForkedProcess:
    """Has the methods of `Popen` for a process that is not this one's child; its exit status is unknown."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        end = time.monotonic() + timeout
        while Path(f"/proc/{self.pid}").exists():
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return 0


class ForkServer:
    """The process that forks ranks."""

    def __init__(self) -> None:
        self._connection, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.parallel.fork_server", str(server_end.fileno())],
                pass_fds=[server_end.fileno()],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
            )

    def start(self, module: str, tasks: Sequence[Mapping[str, Any]]) -> tuple[list[Channel], list[ForkedProcess]]:
        """Replaces `workers.start_workers`."""
        assert module == "exlm.model.multiprocess"
        channels, processes = [], []
        for task in tasks:
            own_end, worker_end = socket.socketpair()
            with worker_end:
                socket.send_fds(self._connection, [json.dumps(dict(task)).encode()], [worker_end.fileno()])
            channels.append(Channel(own_end))
            processes.append(ForkedProcess(int(self._connection.recv(MESSAGE))))
        return channels, processes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.wait(30)


def main(connection: socket.socket) -> None:
    """Fork a rank for each message, until the channel closes."""
    from exlm.model import multiprocess

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses are not collected
    while True:
        message, files, _, _ = socket.recv_fds(connection, MESSAGE, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            connection.close()
            os.setsid()
            with contextlib.suppress(SystemExit):
                multiprocess.main({**json.loads(message), "channel_fd": files[0]})
            os._exit(0)
        os.close(files[0])
        connection.send(str(child).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
