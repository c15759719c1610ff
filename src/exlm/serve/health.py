"""Liveness of the engine: what it did last, and a watchdog that ends a process whose engine is stuck.

The watchdog runs in a thread of its own, because what is stuck may be the event loop. It logs the last
scheduler events and every thread's stack, then ends the process, so that a supervisor can start another.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine

MAX_EVENTS = 256
TICK_SECONDS = 0.5
"""How often the event loop records that it is running."""
STALLED_EXIT_STATUS = 70

log = logging.getLogger(__name__)


class Activity:
    """When one engine last did something, how many jobs it has, and its latest events."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self.clock = clock
        self.pending_jobs = 0
        """Jobs queued that have not ended."""
        self.tokens = 0
        """Results with a token, since the start."""
        self.events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self._last = clock()

    @property
    def stalled_seconds(self) -> float:
        """For how long the engine has had jobs and done nothing."""
        return self.clock() - self._last if self.pending_jobs else 0.0

    def job_queued(self, event: str) -> None:
        """Count a new job."""
        if not self.pending_jobs:
            self._last = self.clock()
        self.pending_jobs += 1
        self.record(event)

    def job_ended(self, event: str) -> None:
        """A job has finished, failed or been cancelled."""
        self.pending_jobs -= 1
        self._last = self.clock()
        self.record(event)

    def on_result(self, result: Mapping[str, Any]) -> None:
        """Note a job's result."""
        self._last = self.clock()
        if result["stage"] == "streaming":
            self.tokens += 1
        elif result["stage"] == "prefill":
            self.record(f"job {result['serial']} read {result['curr_progress']} of {result['max_progress']}")
        else:
            self.record(f"job {result['serial']} started")

    def record(self, event: str) -> None:
        """Keep an event for a report."""
        self.events.append((time.time(), event))


class Watchdog:
    """Checks an engine periodically until stopped; `on_stall` is called once, with a report."""

    def __init__(self, engine: Engine, seconds: float, on_stall: Callable[[str], None]) -> None:
        """An engine that has jobs and does nothing for `seconds` is stuck."""
        self.engine, self.seconds, self.on_stall = engine, seconds, on_stall
        self._running_since = -math.inf
        """When the process was last resumed after having been stopped."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="exlm-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def stall_reason(self) -> str | None:
        """What is stuck; None if nothing is."""
        now = self.engine.clock()
        running = now - self._running_since
        if (stalled := min(now - self.engine.last_tick, running)) > self.seconds + 2 * TICK_SECONDS:
            return f"the event loop has not moved for {stalled:.1f} s"
        for name, model in list(self.engine.models.items()):
            if (stalled := min(model.activity.stalled_seconds, running)) > self.seconds:
                return f"{name} has {model.activity.pending_jobs} jobs and gave no result for {stalled:.1f} s"
        return None

    def _watch(self) -> None:
        checked = self.engine.clock()
        while not self._stop.wait(min(1.0, self.seconds / 4)):
            before, checked = checked, self.engine.clock()
            # This thread stood still too, so the whole process did: Ctrl-Z, or a paused machine.
            if checked - before > self.seconds / 2:
                self._running_since = checked
            if (reason := self.stall_reason()) is not None:
                self.on_stall(stall_report(self.engine, reason))
                return


def stall_report(engine: Engine, reason: str) -> str:
    """The last events of every model's scheduler, and the stack of each thread."""
    lines = [f"The server is stuck: {reason}."]
    for name, model in list(engine.models.items()):
        generator = model.generator.generator
        lines.append(
            f"{name}: {len(generator.active_jobs)} jobs run, {len(generator.pending_jobs)} wait, "
            f"{generator.pages.num_free_pages} of {generator.max_pages} pages are free. Last events:"
        )
        lines += [f"  {_clock_time(moment)} {event}" for moment, event in list(model.activity.events)]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [f"  {line.rstrip()}" for line in traceback.format_stack(frame)[-12:]]
    return "\n".join(lines)


def exit_on_stall(folder: Path | None = None) -> Callable[[str], None]:
    """A stall handler that logs the report, writes it to `folder` if given, and ends the process."""

    def exit_with_report(text: str) -> None:
        log.critical("%s", text)
        if folder is not None:
            try:
                (folder / f"exlm-stuck-{os.getpid()}.txt").write_text(text, encoding="utf-8")
            except OSError as error:
                log.critical("The report could not be written: %s", error)
        logging.shutdown()
        os._exit(STALLED_EXIT_STATUS)  # a stuck thread would block any orderly exit

    return exit_with_report


def _clock_time(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"
