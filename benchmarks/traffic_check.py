"""The simulation of `traffic` beside a small real run: `python -m benchmarks.traffic --check MODEL`.

A cluster on this machine serves the model, its speed is measured, and then it gets the requests that the
simulation gets, at the same moments. It only measures; what the figures should be is not decided here.
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

from .traffic import Fleet, Request, Speed, Traffic, arrivals, outcome_table, simulate, summarize

WORDS = ["river", "town", "stone", "winter", "garden", "letter", "morning", "bridge", "island", "forest"]
NAME = "check"


@dataclass(frozen=True)
class Reply:
    """The response to a real request, and its time."""

    reply: dict[str, Any]
    replica: str
    seconds: float

    @property
    def timings(self) -> dict[str, float]:
        """The timings that the replica reports."""
        found: dict[str, float] = self.reply["timings"]
        return found

    @property
    def read(self) -> tuple[int, int]:
        """Tokens of the prompt, in all and from the cache."""
        usage = self.reply["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def check(model: str, traffic: Traffic, fleet: Fleet) -> str:
    """Serve a model, measure its speed, run the traffic for real and simulated; returns a table."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    spec = ModelSpec(NAME, model, cache_tokens=fleet.cache, max_batch_size=fleet.batch, device="cpu")
    config = ClusterConfig(fleet.replicas, fleet.replicas, cpus=0.5, slack=fleet.slack, ongoing=10_000)
    with cluster():
        deploy(Service(spec, cluster=config), port=port)
        try:
            ask = client(port)
            speed = measure_speed(ask, traffic, fleet)
            real = run_traffic(ask, traffic)
        finally:
            import_ray("serve").shutdown()
    speeds = f"measured: {speed.prefill:.0f} tokens/s of prompts, {speed.step * 1e3:.1f} ms a step and "
    speeds += f"{speed.row * 1e3:.2f} ms a row, {speed.overhead * 1e3:.1f} ms on the way"
    requests = [replace(one, cached=0, generated=0, started=0.0, first=0.0, ended=0.0) for one in real]
    outcomes = {"simulated": summarize(simulate(requests, speed, fleet)), "real": summarize(real)}
    return f"{speeds}\n{outcome_table(outcomes)}"


def client(port: int) -> Callable[[str, int], Reply]:
    """A function that sends a prompt and waits for its completion."""

    def ask(prompt: str, new: int) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0}
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = json.loads(response.read())
        seconds = time.perf_counter() - start
        connection.close()
        if response.status != 200:
            raise SystemExit(f"The cluster refused a request: {reply}")
        return Reply(reply, response.headers["x-exlm-replica"], seconds)

    return ask


def text(kind: str, number: int, tokens: int) -> str:
    """Words with a start that no other text shares; about one for each token."""
    return " ".join([kind, str(number), *(WORDS[(number + place * place) % 10] for place in range(tokens))])


def measure_speed(ask: Callable[[str, int], Reply], traffic: Traffic, fleet: Fleet) -> Speed:
    """A replica's speed while all of them work: with one request each, and with several."""

    def run_concurrently(each: int, kind: str) -> list[Reply]:
        count = each * fleet.replicas
        with ThreadPoolExecutor(count) as pool:
            prompts = [text(kind, number, traffic.shared) for number in range(count)]
            return list(pool.map(ask, prompts, [traffic.new] * count))

    run_concurrently(1, "warm")
    single, several = (
        [*run_concurrently(1, "one"), *run_concurrently(1, "two"), *run_concurrently(1, "three")],
        run_concurrently(4, "four"),
    )
    reads = [(one.read[0] - one.read[1]) / one.timings["prompt_seconds"] for one in single]
    step, crowded = (
        statistics.median(
            one.timings["generation_seconds"] / one.reply["usage"]["completion_tokens"] for one in replies
        )
        for replies in (single, several)
    )
    overheads = [
        one.seconds - sum(one.timings[f"{phase}_seconds"] for phase in ("queue", "prompt", "generation"))
        for one in single
    ]
    return Speed(statistics.median(reads), step, max(0.0, (crowded - step) / 3), max(0.0, min(overheads)))


def run_traffic(ask: Callable[[str, int], Reply], traffic: Traffic) -> list[Request]:
    """Send the requests of some traffic at their times; returns them with their outcomes and true lengths."""
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
            generated=got.reply["usage"]["completion_tokens"],
        )

    shared = ask(text("topic", -1, traffic.shared), 1).read[0]
    words = arrivals(traffic)
    with ThreadPoolExecutor(len(words)) as pool:
        done = list(pool.map(one, range(len(words)), words))
    return [replace(request, shared=shared, own=request.prompt - shared) for request in done]
