"""Numbers for Prometheus: what was asked, what came out, how long it took, how full the engine is."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine import Engine
from .openai import ResponseBuilder

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)


class Metrics:
    """The numbers of one server."""

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
        """A reply went out."""
        self.responses.labels(route, str(status)).inc()

    def count_tokens(self, model: str, spent: tuple[int, int, int]) -> None:
        """What an answer took, finished or not: tokens of its prompts, of those found, and generated."""
        for kind, count in zip(("prompt", "cached", "generated"), spent, strict=True):
            self.tokens.labels(model, kind).inc(count)

    def observe_request(self, answer: ResponseBuilder) -> None:
        """An answer is finished, or never will be."""
        if not answer.done:
            self.cut.inc()
            return
        model, timings = answer.order.model, answer.timings()
        for phase in ("queue", "prompt", "generation"):
            self.seconds.labels(model, phase).observe(timings[f"{phase}_seconds"])

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """What the engine holds at the moment of asking."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily("exlm_jobs", "Jobs, running and waiting", labels=["model", "state"])
        pages = GaugeMetricFamily("exlm_cache_pages", "Pages of the cache", labels=["model", "state"])
        for name, hosted in self.engine.models.items():
            inner = hosted.generator.generator
            jobs.add_metric([name, "running"], inner.num_active_jobs)
            jobs.add_metric([name, "waiting"], inner.num_pending_jobs)
            pages.add_metric([name, "free"], inner.pages.num_free_pages)
            pages.add_metric([name, "used"], inner.max_pages - inner.pages.num_free_pages)
        return [jobs, pages]
