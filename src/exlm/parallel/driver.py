"""Rank 0's control of the workers: it sends messages to them, and stops all if one is lost."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import ExlmError, WorkerLost
from .comm import Channel, Group, GroupBroken, Message

T = TypeVar("T")

STOP_TIMEOUT = 3.0
"""Seconds that a worker has to exit before it is killed."""

RELOAD = "Load the model again."


class RankDriver:
    """The workers of one model, ranks 1 and up. A lock lets one thread at a time send a message."""

    def __init__(
        self, channels: Sequence[Channel], processes: Sequence[subprocess.Popen[bytes]] = ()
    ) -> None:
        self.channels = channels
        self.processes = processes  # the workers that this process started
        self.lost_reason: str | None = None
        self._groups: list[Group] = []
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stop = weakref.finalize(self, _stop_workers, channels, processes, self._groups, self._pid)

    def send_all(self, message: Message) -> None:
        """Send a message to every worker."""
        with self._lock:
            self._check()
            for rank in range(1, len(self.channels) + 1):
                self.send(rank, message)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to one worker."""
        with self._lock:
            self._check()
            try:
                self.channels[rank - 1].send(message)
            except OSError as error:
                raise self.fail(f"rank {rank} is gone ({error})") from error

    def receive_all(self) -> list[Message]:
        """Wait for a message from each worker; raise the error of one that failed."""
        self._check()
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
                raise self.fail(self._reason(error)) from error
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
        return WorkerLost(f"The model's processes are out of step: {self.lost_reason}. {RELOAD}")

    def close(self) -> None:
        """Stop all workers."""
        with self._lock:
            self.lost_reason = self.lost_reason or "it was unloaded"
            self._stop()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise WorkerLost(
                f"The model's processes belong to process {self._pid}, of which this one is a fork: load the "
                "model here."
            )
        if self.lost_reason is not None:
            raise WorkerLost(f"The model's other processes are gone: {self.lost_reason}. {RELOAD}")

    def _reason(self, error: GroupBroken) -> str:
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
    channels: Sequence[Channel],
    processes: Sequence[subprocess.Popen[bytes]],
    groups: Sequence[Group],
    pid: int,
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
