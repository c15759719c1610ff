"""Notices an engine that is stuck, writes down what happened last, and ends the process.

It runs in a thread of its own, because whatever is stuck may be the event loop. A process that can no longer
answer is of use to nobody; whoever started it starts another.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from .engine import TICK_SECONDS, Engine

STALLED_EXIT_STATUS = 70
"""The exit status of a process that was stuck."""

log = logging.getLogger(__name__)


class Watchdog:
    """Looks at an engine from time to time until stopped; `bark` is called once, with a report."""

    def __init__(self, engine: Engine, seconds: float, on_stall: Callable[[str], None]) -> None:
        """An engine that has work and does nothing for so many `seconds` is stuck."""
        self.engine, self.seconds, self.on_stall = engine, seconds, on_stall
        self._running_since = -math.inf
        """Since when the process runs, if it was ever stopped."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="exlm-watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()
        self._thread.join(timeout=5)

    def stall_reason(self) -> str | None:
        """What is stuck; None if nothing is."""
        now = self.engine.clock()
        awake = now - self._running_since
        if (silent := min(now - self.engine.last_tick, awake)) > self.seconds + 2 * TICK_SECONDS:
            return f"the event loop has not moved for {silent:.1f} s"
        for name, hosted in list(self.engine.models.items()):
            if (silent := min(hosted.activity.stalled_seconds, awake)) > self.seconds:
                return f"{name} has {hosted.activity.pending_jobs} jobs and gave no result for {silent:.1f} s"
        return None

    def _watch(self) -> None:
        looked = self.engine.clock()
        while not self._stop.wait(min(1.0, self.seconds / 4)):
            before, looked = looked, self.engine.clock()
            # This thread stood still too: by Ctrl-Z, or its machine did.
            if looked - before > self.seconds / 2:
                self._running_since = looked
            if (complaint := self.stall_reason()) is not None:
                self.on_stall(stall_report(self.engine, complaint))
                return


def stall_report(engine: Engine, complaint: str) -> str:
    """The last events of every model's scheduler, and where each thread is."""
    lines = [f"The server is stuck: {complaint}."]
    for name, hosted in list(engine.models.items()):
        inner = hosted.generator.generator
        lines.append(
            f"{name}: {len(inner.active_jobs)} jobs run, {len(inner.pending_jobs)} wait, "
            f"{inner.pages.num_free_pages} of {inner.max_pages} pages are free. Last events:"
        )
        lines += [f"  {_clock_time(moment)} {what}" for moment, what in list(hosted.activity.events)]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [f"  {line.rstrip()}" for line in traceback.format_stack(frame)[-12:]]
    return "\n".join(lines)


def exit_on_stall(folder: Path | None = None) -> Callable[[str], None]:
    """A bark that logs the report, writes it to a file if there is a folder for it, and ends the process."""

    def bite(text: str) -> None:
        log.critical("%s", text)
        if folder is not None:
            try:
                (folder / f"exlm-stuck-{os.getpid()}.txt").write_text(text, encoding="utf-8")
            except OSError as error:
                log.critical("The report could not be written: %s", error)
        logging.shutdown()
        os._exit(STALLED_EXIT_STATUS)  # a stuck thread would keep every gentler way waiting

    return bite


def _clock_time(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"
