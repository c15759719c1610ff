"""Start the workers of a model, or connect to those that torchrun started beside this process."""

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
from .comm import Channel

BOOTSTRAP = """
import json, sys
task = json.loads(sys.stdin.readline())
sys.path[:] = task["path"]
from importlib import import_module
import_module(task["module"]).main(task)
"""
CONNECT_TIMEOUT = 120.0
"""Seconds in which every worker must have connected to rank 0."""

HANDSHAKE_TIMEOUT = 5.0
"""Seconds that a connection has to send the token and its rank."""


class RankInfo(NamedTuple):
    """This process's place among those of torchrun."""

    store: Store
    rank: int
    size: int


def start_workers(
    module: str, tasks: Sequence[Mapping[str, Any]]
) -> tuple[list[Channel], list[subprocess.Popen[bytes]]]:
    """One process for each task, running `module.main(task)`, and a channel to it (its end: `channel_fd`).

    The program's `__main__` is not imported again, and Ctrl-C does not reach the processes.
    """
    channels: list[Channel] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for task in tasks:
            here, there = socket.socketpair()
            channels.append(Channel(here))
            with there:
                message = {**task, "path": sys.path, "module": module, "channel_fd": there.fileno()}
                _start(json.dumps(message).encode() + b"\n", there.fileno(), processes)
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        for channel in channels:
            channel.close()
        raise
    return channels, processes


def _start(task: bytes, channel_fd: int, processes: list[subprocess.Popen[bytes]]) -> None:
    """Start a process that inherits its end of the channel and reads its task from stdin."""
    process = subprocess.Popen(
        [sys.executable, "-c", BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[channel_fd],
        start_new_session=True,
    )
    processes.append(process)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(task)


def file_store(path: str, size: int) -> Store:
    """The rendezvous of ranks on one machine: a file, so that no port is open to others."""
    store: Store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    return store


def torchrun_rank() -> RankInfo | None:
    """This process's rank, if torchrun started it and others."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return None
    store, rank, size = next(iter(rendezvous("env://")))
    return RankInfo(PrefixStore("exlm", store), rank, size) if size > 1 else None


def accept_workers(rank_info: RankInfo) -> list[Channel]:
    """On rank 0: channels to all other ranks, in order, once they have connected."""
    host, token = _host(rank_info.store), secrets.token_hex(16)
    connections: dict[int, socket.socket] = {}
    with socket.create_server((host, 0)) as server:
        server.settimeout(CONNECT_TIMEOUT)
        rank_info.store.set("driver_address", json.dumps([host, server.getsockname()[1], token]))
        while len(connections) < rank_info.size - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, rank_info.size)) - set(connections))
                raise WorkerLost(
                    f"Ranks {missing} did not connect within {CONNECT_TIMEOUT:g} s: does every rank load the "
                    "model?"
                ) from None
            if (rank := _handshake(connection, token)) is None:
                connection.close()  # not one of our ranks
            else:
                connections[rank] = connection
    return [Channel(connections[rank]) for rank in range(1, rank_info.size)]


def connect_to_driver(rank_info: RankInfo) -> Channel:
    """On any other rank: its channel to rank 0."""
    host, port, token = json.loads(rank_info.store.get("driver_address"))
    connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
    connection.sendall(f"{token}{rank_info.rank:08}".encode())
    connection.settimeout(None)
    return Channel(connection)


def _handshake(connection: socket.socket, token: str) -> int | None:
    """The rank of a connection that sent the token, else None; nothing is parsed before that check."""
    connection.settimeout(HANDSHAKE_TIMEOUT)
    try:
        greeting = connection.recv(len(token) + 8, socket.MSG_WAITALL)
    except OSError:
        return None
    connection.settimeout(None)
    authentic = hmac.compare_digest(greeting[: len(token)], token.encode())
    return int(greeting[len(token) :]) if authentic else None


def _host(store: Store) -> str:
    """The host of the rendezvous store, which is rank 0's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "localhost"))
