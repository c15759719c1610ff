"""What operators see of a running server: Prometheus metrics, a snapshot as JSON, and a watchdog.

Metrics and snapshot contain no text of a request. The watchdog ends a process whose engine is stuck, so that
a supervisor can start another; it first logs the last scheduler events and every thread's stack. It runs in a
thread of its own, because what is stuck may be the event loop.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter as Multiset
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from exlm import Job

from .engine import HEARTBEAT_SECONDS, Engine, RequestStream, ServedModel
from .limits import FairLimiter
from .schema import StateReply

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)


class Metrics:
    """The Prometheus metrics of one server."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "exlm_http_replies", "Replies, by route and status", ["route", "status"], registry=self.registry
        )
        self.tokens = Counter(
            "exlm_tokens",
            "Tokens: of prompts, of those found in the cache, and generated; cut answers count",
            ["model", "kind"],
            registry=self.registry,
        )
        self.unfinished = Counter(
            "exlm_cut_answers", "Answers without an end: the client left, or the job failed", registry=self.registry
        )
        self.seconds = Histogram(
            "exlm_request_seconds",
            "Of finished requests: waiting, reading the prompt, generating",
            ["model", "phase"],
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_EngineGauges(engine))

    def count_response(self, route: str, status: int) -> None:
        self.responses.labels(route, str(status)).inc()

    def observe_request(self, stream: RequestStream) -> None:
        """Record a request that has ended, finished or not: its tokens, and the times of its slowest text."""
        model = stream.request.model
        for kind, count in zip(("prompt", "cached", "generated"), stream.token_counts(), strict=True):
            self.tokens.labels(model, kind).inc(count)
        if len(stream.finishes) < len(stream.request.job_arguments):
            self.unfinished.inc()
            return
        seconds = zip(*(finish.seconds for finish in stream.finishes), strict=True)
        for phase, of_texts in zip(("queue", "prompt", "generation"), seconds, strict=True):
            self.seconds.labels(model, phase).observe(max(of_texts))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """Jobs and cache pages at the moment at which the metrics are read."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily("exlm_jobs", "Jobs, running and waiting", labels=["model", "state"])
        pages = GaugeMetricFamily("exlm_cache_pages", "Pages of the cache", labels=["model", "state"])
        for name, model in self.engine.models.items():
            generator = model.generator.generator
            jobs.add_metric([name, "running"], generator.num_active_jobs)
            jobs.add_metric([name, "waiting"], generator.num_pending_jobs)
            pages.add_metric([name, "free"], generator.pages.num_free_pages)
            pages.add_metric([name, "used"], generator.max_pages - generator.pages.num_free_pages)
        return [jobs, pages]


def engine_state(engine: Engine, limiter: FairLimiter) -> StateReply:
    """A snapshot of every model's cache pages, queue and batch, and of the requests in flight."""
    return {
        "models": [_model_state(model) for model in engine.models.values()],
        "requests": {"inside": limiter.in_use, "most": limiter.limit},
    }


def _model_state(model: ServedModel) -> dict[str, Any]:
    generator = model.generator.generator
    active, pending = generator.active_jobs, generator.pending_jobs
    users = Multiset(page for job in active for sequence in job.sequences for page in {*sequence.pages})
    return {
        "name": model.info.name,
        "max_model_len": model.info.max_seq_len,
        "max_batch_size": generator.max_batch_size,
        "pages": {
            "size": generator.page_size,
            "total": generator.max_pages,
            "free": generator.pages.num_free_pages,
            "rows": [generator.pages.num_cached_tokens(page) for page in range(generator.max_pages)],
            "users": [users[page] for page in range(generator.max_pages)],
        },
        "batch": [_job_state(job) for job in active],
        "queue": [_job_state(job) for job in pending],
    }


def _job_state(job: Job) -> dict[str, Any]:
    return {
        "job": job.serial_number,
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
        "read_tokens": sum(sequence.num_computed_tokens for sequence in job.sequences),
        "new_tokens": job.new_tokens,
        "max_new_tokens": job.max_new_tokens,
        "pages": sorted({page for sequence in job.sequences for page in sequence.pages if page >= 0}),
        "queue_seconds": round(job.metrics.queue_seconds, 3),
        "seconds": round(job.metrics.queue_seconds + job.metrics.prefill_seconds + job.metrics.generate_seconds, 3),
    }


STALLED_EXIT_STATUS = 70

log = logging.getLogger(__name__)


class Watchdog:
    """Checks an engine periodically until stopped; `on_stall` is called once, with a report."""

    def __init__(self, engine: Engine, seconds: float, on_stall: Callable[[str], None]) -> None:
        """An engine that has jobs and gives no result for `seconds` is stuck."""
        self.engine, self.seconds, self.on_stall = engine, seconds, on_stall
        self._running_since = -math.inf
        """When the process was last resumed after having been stopped."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="exlm-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def stall_reason(self) -> str | None:
        """The reason to consider the engine stuck; None if it is not."""
        now = self.engine.clock()
        running = now - self._running_since
        if (stalled := min(now - self.engine.last_heartbeat, running)) > self.seconds + 2 * HEARTBEAT_SECONDS:
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
