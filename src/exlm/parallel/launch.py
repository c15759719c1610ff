"""Other ranks of one model: processes started here, or those that torchrun started beside this one."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..errors import WorkerLost
from .wire import Channel

FIRST_LINES = """
import json, sys
told = json.loads(sys.stdin.readline())
sys.path[:] = told["path"]
from importlib import import_module
import_module(told["module"]).main(told)
"""
PATIENCE = 120.0
"""Seconds in which every rank must have called."""

GREETING = 5.0
"""Seconds a caller has to say who it is."""


class RankInfo(NamedTuple):
    """This process's place among those of torchrun."""

    store: Store
    rank: int
    size: int


def start_workers(
    module: str, tasks: Sequence[Mapping[str, Any]]
) -> tuple[list[Channel], list[subprocess.Popen[bytes]]]:
    """One process for each task, running `module.main(task)`; a channel to each, whose other end is `line`.

    The module of the calling program is not imported again, and Ctrl-C does not reach the processes.
    """
    channels: list[Channel] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for task in tasks:
            here, there = socket.socketpair()
            channels.append(Channel(here))
            with there:
                told = {**task, "path": sys.path, "module": module, "line": there.fileno()}
                _start(json.dumps(told).encode() + b"\n", there.fileno(), processes)
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        for channel in channels:
            channel.close()
        raise
    return channels, processes


def _start(told: bytes, line: int, processes: list[subprocess.Popen[bytes]]) -> None:
    """One more process, which inherits its end of the line and reads what it is told."""
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST_LINES],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[line],
        start_new_session=True,
    )
    processes.append(process)
    assert process.stdin is not None
    with process.stdin as door:
        door.write(told)


def file_store(path: str, size: int) -> Store:
    """Where ranks on one machine find each other: a file, so that no port is open to others."""
    store: Store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    return store


def torchrun_rank() -> RankInfo | None:
    """This process's seat, if torchrun started it and others."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return None
    store, rank, size = next(iter(rendezvous("env://")))
    return RankInfo(PrefixStore("exlm", store), rank, size) if size > 1 else None


def accept_workers(rank_info: RankInfo) -> list[Channel]:
    """Rank 0: the channels to all others, in order of rank, once they have called."""
    host, token = _host(rank_info.store), secrets.token_hex(16)
    lines: dict[int, socket.socket] = {}
    with socket.create_server((host, 0)) as server:
        server.settimeout(PATIENCE)
        rank_info.store.set("line", json.dumps([host, server.getsockname()[1], token]))
        while len(lines) < rank_info.size - 1:
            try:
                line, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, rank_info.size)) - set(lines))
                raise WorkerLost(
                    f"Ranks {missing} did not call within {PATIENCE:g} s: does every rank load the model?"
                ) from None
            if (rank := _rank(line, token)) is None:
                line.close()  # a stranger
            else:
                lines[rank] = line
    return [Channel(lines[rank]) for rank in range(1, rank_info.size)]


def connect_to_driver(rank_info: RankInfo) -> Channel:
    """Any other rank: its channel to rank 0."""
    host, port, token = json.loads(rank_info.store.get("line"))
    line = socket.create_connection((host, port), timeout=PATIENCE)
    line.sendall(f"{token}{rank_info.rank:08}".encode())
    line.settimeout(None)
    return Channel(line)


def _rank(line: socket.socket, token: str) -> int | None:
    """Who calls, if the caller knows the token; nothing else a caller says is looked at before that."""
    line.settimeout(GREETING)
    try:
        said = line.recv(len(token) + 8, socket.MSG_WAITALL)
    except OSError:
        return None
    line.settimeout(None)
    known = hmac.compare_digest(said[: len(token)], token.encode())
    return int(said[len(token) :]) if known else None


def _host(store: Store) -> str:
    """Where all ranks found each other, which is rank 0's machine."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "localhost"))
