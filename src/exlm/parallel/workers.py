"""The worker processes of a model: start them, or find those that torchrun started, control and stop them.

`start_workers` and `accept_workers` give rank 0 a channel to each worker; `RankDriver` sends messages over
the channels and stops all workers if one is lost.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..errors import ExlmError, WorkerLost
from .comm import Channel, Group, GroupBroken, Message

T = TypeVar("T")

WORKER_PROGRAM = """
import json, sys
task = json.loads(sys.stdin.readline())
sys.path[:] = task["path"]
from importlib import import_module
import_module(task["module"]).main(task)
"""
"""What a started process runs: the `main` of the module that its task names."""

CONNECT_TIMEOUT = 120.0
"""Seconds in which every worker must have connected to rank 0."""

HANDSHAKE_TIMEOUT = 5.0
"""Seconds that a connection has to send the token and its rank."""

STOP_TIMEOUT = 3.0
"""Seconds that a worker has to exit before it is killed."""

RELOAD_REMEDY = "Load the model again."


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
            own_end, worker_end = socket.socketpair()
            channels.append(Channel(own_end))
            with worker_end:
                message = {**task, "path": sys.path, "module": module, "channel_fd": worker_end.fileno()}
                _start_worker(json.dumps(message).encode() + b"\n", worker_end.fileno(), processes)
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        for channel in channels:
            channel.close()
        raise
    return channels, processes


def _start_worker(task: bytes, channel_fd: int, processes: list[subprocess.Popen[bytes]]) -> None:
    """Start a process that inherits its end of the channel and reads its task from stdin."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER_PROGRAM],
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
    host, token = _store_host(rank_info.store), secrets.token_hex(16)
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
                    f"Ranks {missing} did not connect within {CONNECT_TIMEOUT:g} s: does every rank load the model?"
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


def _store_host(store: Store) -> str:
    """The host of the rendezvous store, which is rank 0's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "localhost"))


class RankDriver:
    """The workers of one model, ranks 1 and up. A lock lets one thread at a time send a message."""

    def __init__(self, channels: Sequence[Channel], processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.channels = channels
        self.processes = processes  # the workers that this process started
        self.lost_reason: str | None = None
        self._groups: list[Group] = []
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stop = weakref.finalize(self, _stop_workers, channels, processes, self._groups, self._pid)

    def send_all(self, message: Message) -> None:
        with self._lock:
            self._check_running()
            for rank in range(1, len(self.channels) + 1):
                self.send(rank, message)

    def send(self, rank: int, message: Message) -> None:
        with self._lock:
            self._check_running()
            try:
                self.channels[rank - 1].send(message)
            except OSError as error:
                raise self.fail(f"rank {rank} is gone ({error})") from error

    def receive_all(self) -> list[Message]:
        """Wait for a message from each worker; raise the error of one that failed."""
        self._check_running()
        out: list[Message] = []
        for rank, channel in enumerate(self.channels, 1):
            try:
                message = channel.receive()
            except (OSError, EOFError) as error:
                raise self.fail(f"rank {rank} is gone ({error})") from error
            if message.action == "failed":
                raise self.fail(f"rank {rank} failed: {message.values['error']}")
            out.append(message)
        return out

    def run_on_all_ranks(self, message: Message, act: Callable[[], T]) -> T:
        """Send a message to the workers and run `act` here; if `act` fails, the ranks are out of step."""
        with self._lock:
            self.send_all(message)
            try:
                return act()
            except GroupBroken as error:
                raise self.fail(self._failure_reason(error)) from error
            except BaseException as error:
                self.fail(f"a step was interrupted on rank 0 by {type(error).__name__}")
                raise

    def open_group(self, make: Callable[[], Group]) -> Group:
        """Open the process group, once every rank is ready for it."""
        try:
            group = make()
        except GroupBroken as error:
            raise self.fail(f"the ranks did not find each other ({error})") from error
        self._groups.append(group)
        if group.nccl:
            threading.Thread(target=_abort_on_disconnect, args=(self.channels, group), daemon=True).start()
        return group

    def fail(self, reason: str) -> ExlmError:
        """Kill the workers; returns the error to raise."""
        self.lost_reason = self.lost_reason or reason
        for process in self.processes:  # they may wait in a collective that this rank will never join
            process.kill()
        self._stop()
        return WorkerLost(f"The model's processes are out of step: {self.lost_reason}. {RELOAD_REMEDY}")

    def close(self) -> None:
        with self._lock:
            self.lost_reason = self.lost_reason or "it was unloaded"
            self._stop()

    def _check_running(self) -> None:
        if self._pid != os.getpid():
            raise WorkerLost(
                f"The model's processes belong to process {self._pid}, of which this one is a fork: load the "
                "model here."
            )
        if self.lost_reason is not None:
            raise WorkerLost(f"The model's other processes are gone: {self.lost_reason}. {RELOAD_REMEDY}")

    def _failure_reason(self, error: GroupBroken) -> str:
        """The message of a worker that failed or ended, else the transport's error."""
        for rank, channel in enumerate(self.channels, 1):
            with contextlib.suppress(OSError, EOFError, ValueError):
                ready, _, _ = select.select([channel.connection], [], [], 0.2)
                if ready:
                    message = channel.receive()
                    return f"rank {rank} failed: {message.values.get('error', message.action)}"
        for rank, process in enumerate(self.processes, 1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"rank {rank} ended with status {process.wait(0.5)}"
        return str(error)


def _stop_workers(
    channels: Sequence[Channel], processes: Sequence[subprocess.Popen[bytes]], groups: Sequence[Group], pid: int
) -> None:
    """Close every channel, which ends a worker; kill those that do not exit."""
    if pid != os.getpid():  # a fork: the workers belong to its parent
        for channel in channels:
            channel.close()
        return
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.send(Message("stop"))
        channel.close()
    for group in groups:
        group.close()
    for process in processes:
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _abort_on_disconnect(channels: Sequence[Channel], group: Group) -> None:
    """Wait until a channel closes, then abort collectives that the lost rank will never join."""
    with contextlib.suppress(OSError, ValueError):
        while True:
            ready, _, _ = select.select([channel.connection for channel in channels], [], [])
            if ready:
                break
    group.abort()
