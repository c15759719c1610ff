"""Rank 0's hold on the other ranks: orders go out, and if one is lost, all are let go."""

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
from .group import Group, GroupBroken
from .wire import Channel, Message

T = TypeVar("T")

PARTING = 3.0
"""Seconds a process has to end by itself before it is ended."""

RELOAD = "Load the model again."


class RankDriver:
    """The followers of one model, by rank from 1 on. One order at a time, whichever thread gives it."""

    def __init__(
        self, channels: Sequence[Channel], processes: Sequence[subprocess.Popen[bytes]] = ()
    ) -> None:
        self.channels = channels
        self.processes = processes  # those that were started here
        self.lost_reason: str | None = None
        self._groups: list[Group] = []
        self._lock = threading.RLock()
        self._own = os.getpid()
        self._end = weakref.finalize(self, _end, channels, processes, self._groups, self._own)

    def send_all(self, message: Message) -> None:
        """Give an order to everyone."""
        with self._lock:
            self._check()
            for rank in range(1, len(self.channels) + 1):
                self.send(rank, message)

    def send(self, rank: int, message: Message) -> None:
        """Give an order to one rank."""
        with self._lock:
            self._check()
            try:
                self.channels[rank - 1].send(message)
            except OSError as error:
                raise self.fail(f"rank {rank} is gone ({error})") from error

    def receive_all(self) -> list[Message]:
        """Wait for one answer of each; a rank that failed has its error raised here."""
        self._check()
        out: list[Message] = []
        for rank, channel in enumerate(self.channels, 1):
            try:
                message = channel.receive()
            except (OSError, EOFError) as error:
                raise self.fail(f"rank {rank} is gone ({error})") from error
            if message.action == "failed":
                raise self.fail(f"rank {rank} failed: {message.values['why']}")
            out.append(message)
        return out

    def run_on_all_ranks(self, message: Message, act: Callable[[], T]) -> T:
        """Give an order and do this rank's part of it; if that is interrupted, the ranks are out of step."""
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
        """Open the group, once every rank is ready for it."""
        try:
            group = make()
        except GroupBroken as error:
            raise self.fail(f"the ranks did not find each other ({error})") from error
        self._groups.append(group)
        if group.nccl:
            threading.Thread(target=_watch, args=(self.channels, group), daemon=True).start()
        return group

    def fail(self, reason: str) -> ExlmError:
        """Let everybody go; the error to raise."""
        self.lost_reason = self.lost_reason or reason
        for process in self.processes:  # they may wait for a step that this rank will never take
            process.kill()
        self._end()
        return WorkerLost(f"The model's processes are out of step: {self.lost_reason}. {RELOAD}")

    def close(self) -> None:
        """Send everybody home."""
        with self._lock:
            self.lost_reason = self.lost_reason or "it was unloaded"
            self._end()

    def _check(self) -> None:
        if self._own != os.getpid():
            raise WorkerLost(
                f"The model's processes follow process {self._own}, of which this one is a fork: load the "
                "model here."
            )
        if self.lost_reason is not None:
            raise WorkerLost(f"The model's other processes are gone: {self.lost_reason}. {RELOAD}")

    def _reason(self, error: GroupBroken) -> str:
        """What a follower says of its own accord, else what the transport says."""
        for rank, channel in enumerate(self.channels, 1):
            with contextlib.suppress(OSError, EOFError, ValueError):
                ready, _, _ = select.select([channel.connection], [], [], 0.2)
                if ready:
                    order = channel.receive()
                    return f"rank {rank} failed: {order.values.get('why', order.action)}"
        for rank, process in enumerate(self.processes, 1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"rank {rank} ended with status {process.wait(0.5)}"
        return str(error)


def _end(
    channels: Sequence[Channel],
    processes: Sequence[subprocess.Popen[bytes]],
    groups: Sequence[Group],
    own: int,
) -> None:
    """Close every line, which ends a follower; end those that do not listen."""
    if own != os.getpid():  # a fork, which has nobody to send home
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
            process.wait(PARTING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(channels: Sequence[Channel], group: Group) -> None:
    """Wait until a line ends, then free rank 0 from steps that the lost rank will never take."""
    with contextlib.suppress(OSError, ValueError):
        while True:
            ready, _, _ = select.select([channel.connection for channel in channels], [], [])
            if ready:
                break
    group.abort()
