"""Compares the simulation of `traffic` with a small real run: `python -m benchmarks.traffic --check MODEL`.

A cluster on this machine serves the model and its speed is measured; then it gets the same requests as the
simulation, at the same times. Both results are printed without a verdict.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from exlm.scale import ClusterConfig, Service, cluster, deploy, import_ray
from exlm.serve import ModelSpec, listen

from .traffic import Fleet, Request, Speed, Traffic, arrivals, outcome, simulate, table

WORDS = ["river", "town", "stone", "winter", "garden", "letter", "morning", "bridge", "island", "forest"]
NAME = "check"


@dataclass(frozen=True)
class Asked:
    """The response to a real request, with its times."""

    reply: dict[str, Any]
    replica: str
    seconds: float

    @property
    def timings(self) -> dict[str, float]:
        """The replica's own timings."""
        found: dict[str, float] = self.reply["timings"]
        return found

    @property
    def read(self) -> tuple[int, int]:
        """(prompt tokens, those found in the cache)"""
        usage = self.reply["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def check(model: str, traffic: Traffic, fleet: Fleet) -> str:
    """Serve a model, measure it, run the traffic really and simulated; returns the report."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    listing = ModelSpec(NAME, model, cache_tokens=fleet.cache, max_batch_size=fleet.batch, device="cpu")
    shape = ClusterConfig(fleet.replicas, fleet.replicas, cpus=0.5, slack=fleet.slack, ongoing=10_000)
    with cluster():
        deploy(Service(listing, cluster=shape), port=port)
        try:
            ask = asker(port)
            speed = measured(ask, traffic, fleet)
            real = performed(ask, traffic)
        finally:
            import_ray("serve").shutdown()
    told = f"measured: {speed.prefill:.0f} tokens/s of prompts, {speed.step * 1e3:.1f} ms a step and "
    told += f"{speed.row * 1e3:.2f} ms a row, {speed.overhead * 1e3:.1f} ms on the way"
    asked = [replace(one, cached=0, made=0, started=0.0, first=0.0, ended=0.0) for one in real]
    return f"{told}\n{table({'simulated': outcome(simulate(asked, speed, fleet)), 'real': outcome(real)})}"


def asker(port: int) -> Callable[[str, int], Asked]:
    """A function that sends a prompt and waits for so many tokens."""

    def ask(prompt: str, new: int) -> Asked:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0}
        start = time.perf_counter()
        line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = line.getresponse()
        reply = json.loads(answer.read())
        seconds = time.perf_counter() - start
        line.close()
        if answer.status != 200:
            raise SystemExit(f"The cluster refused a request: {reply}")
        return Asked(reply, answer.headers["x-exlm-replica"], seconds)

    return ask


def text(kind: str, number: int, tokens: int) -> str:
    """A text of about so many tokens that shares no prefix with others."""
    return " ".join([kind, str(number), *(WORDS[(number + place * place) % 10] for place in range(tokens))])


def measured(ask: Callable[[str, int], Asked], traffic: Traffic, fleet: Fleet) -> Speed:
    """Measure a replica's speed while all are busy, with one request each and with several."""

    def crowd(each: int, kind: str) -> list[Asked]:
        count = each * fleet.replicas
        with ThreadPoolExecutor(count) as pool:
            prompts = [text(kind, number, traffic.shared) for number in range(count)]
            return list(pool.map(ask, prompts, [traffic.new] * count))

    crowd(1, "warm")
    few, several = [*crowd(1, "one"), *crowd(1, "two"), *crowd(1, "three")], crowd(4, "four")
    reads = [(one.read[0] - one.read[1]) / one.timings["prompt_seconds"] for one in few]
    step, crowded = (
        statistics.median(
            one.timings["generation_seconds"] / one.reply["usage"]["completion_tokens"] for one in some
        )
        for some in (few, several)
    )
    ways = [
        one.seconds - sum(one.timings[f"{phase}_seconds"] for phase in ("queue", "prompt", "generation"))
        for one in few
    ]
    return Speed(statistics.median(reads), step, max(0.0, (crowded - step) / 3), max(0.0, min(ways)))


def performed(ask: Callable[[str, int], Asked], traffic: Traffic) -> list[Request]:
    """Send the requests of some traffic at their times; returns them with real lengths and outcomes."""
    begin = time.perf_counter()
    names: dict[str, int] = {}

    def one(number: int, request: Request) -> Request:
        time.sleep(max(0.0, begin + request.arrival - time.perf_counter()))
        arrival = time.perf_counter() - begin
        start = text("topic", request.topic, request.shared)
        got = ask(f"{start} {text('own', number, request.own)}", request.new)
        ended = arrival + got.seconds
        return replace(
            request,
            arrival=arrival,
            own=got.read[0] - request.shared,
            new=got.reply["usage"]["completion_tokens"],
            replica=names.setdefault(got.replica, len(names)),
            cached=got.read[1],
            started=ended - got.timings["prompt_seconds"] - got.timings["generation_seconds"],
            ended=ended,
            made=got.reply["usage"]["completion_tokens"],
        )

    shared = ask(text("topic", -1, traffic.shared), 1).read[0]
    words = arrivals(traffic)
    with ThreadPoolExecutor(len(words)) as pool:
        done = list(pool.map(one, range(len(words)), words))
    return [replace(request, shared=shared, own=request.prompt - shared) for request in done]
