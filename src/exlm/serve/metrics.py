"""What the server reports about itself: Prometheus metrics, and a snapshot of the engine as JSON.

Neither contains any text of a request.
"""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from exlm import Job

from .engine import Engine, LoadedModel
from .limits import ConcurrencyLimiter
from .response_schema import StateReply
from .responses import ResponseWriter

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)


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
        self.cut = Counter(
            "exlm_cut_answers",
            "Answers without an end: the client left, or the job failed",
            registry=self.registry,
        )
        self.seconds = Histogram(
            "exlm_request_seconds",
            "Of finished requests: waiting, reading the prompt, generating",
            ["model", "phase"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(_EngineGauges(engine))

    def count_response(self, route: str, status: int) -> None:
        """Count a response."""
        self.responses.labels(route, str(status)).inc()

    def observe_request(self, writer: ResponseWriter, token_counts: tuple[int, int, int]) -> None:
        """Record a request that has ended, finished or not: tokens of its prompts, cached, and generated."""
        model = writer.request.model
        for kind, count in zip(("prompt", "cached", "generated"), token_counts, strict=True):
            self.tokens.labels(model, kind).inc(count)
        if not writer.done:
            self.cut.inc()
            return
        timings = writer.timings()
        for phase in ("queue", "prompt", "generation"):
            self.seconds.labels(model, phase).observe(timings[f"{phase}_seconds"])

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """What the engine holds at the moment of asking."""

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


def engine_state(engine: Engine, limiter: ConcurrencyLimiter) -> StateReply:
    """A snapshot of every model's cache pages, queue and batch, and of the requests in flight."""
    return {
        "models": [_model_state(model) for model in engine.models.values()],
        "requests": {"inside": limiter.in_flight, "most": limiter.limit},
    }


def _model_state(model: LoadedModel) -> dict[str, Any]:
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
            "rows": [generator.pages.num_valid_rows(page) for page in range(generator.max_pages)],
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
        "seconds": round(
            job.metrics.queue_seconds + job.metrics.prefill_seconds + job.metrics.generate_seconds, 3
        ),
    }
