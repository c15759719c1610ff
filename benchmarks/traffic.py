"""Simulate a cluster under traffic: throughput, waiting times, and how much of the prompts is cached.

A discrete-event simulation with the routing of `exlm.scale` and a simple model of a replica: prefill at a
fixed rate, one token for every running request in each step, and an LRU cache. Machines, networks and chat
templates are not modelled. `python -m benchmarks.traffic --help` lists the options; `--check MODEL` sends the
same requests to a real cluster on this machine.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from exlm.scale import PrefixAffinity


@dataclass(frozen=True)
class Traffic:
    """Poisson arrivals; each request has the prefix of one of several topics and an end of its own."""

    rate: float = 4.0
    """Requests a second."""
    requests: int = 400
    topics: int = 16
    shared: int = 600
    """Tokens of a topic's prefix."""
    own: int = 60
    """Tokens of a prompt's own end, on average; they vary by half, as do those of `new`."""
    new: int = 60
    """Tokens of an answer, on average."""
    seed: int = 0


@dataclass(frozen=True)
class Speed:
    """The speed of one replica."""

    prefill: float = 5000.0
    """Prompt tokens a second."""
    step: float = 0.010
    """Seconds of a step with one running request; `row` is added for each further one."""
    row: float = 0.0005
    overhead: float = 0.005
    """Seconds of a request's round trip outside of the replica."""


@dataclass(frozen=True)
class Fleet:
    """The replicas."""

    replicas: int = 2
    batch: int = 16
    """Requests that run at a time on one replica."""
    cache: int = 32768
    """Tokens in the cache of one replica."""
    slack: int = 8
    aware: bool = True
    """Route by prefix; else to the least busy replica."""


T = TypeVar("T", Traffic, Speed, Fleet)


@dataclass
class Request:
    """One request and its outcome."""

    arrival: float
    topic: int
    shared: int
    own: int
    new: int
    replica: int = -1
    cached: int = 0
    started: float = 0.0
    first: float = 0.0
    """Time of its first token."""
    ended: float = 0.0
    generated: int = 0
    """Tokens of its answer so far."""

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.shared + self.own


@dataclass
class Replica:
    """The state of one replica."""

    fleet: Fleet
    speed: Speed
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    cached_tokens: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """By topic, the most recently used last."""

    def step(self, now: float) -> float:
        """Admit requests that fit and give every running one a token; returns when that is done."""
        for request in self._admitted():
            request.started = now
            request.cached = self.cached_tokens.get(request.topic, 0)
            now += (request.prompt - request.cached) / self.speed.prefill
            self._cache_prefix(request)
        now += self.speed.step + self.speed.row * (len(self.running) - 1)
        for request in self.running:
            request.generated += 1
            request.first = request.first or now
            request.ended = now
        self.running = [request for request in self.running if request.generated < request.new]
        return now

    @property
    def load(self) -> int:
        """Requests waiting and running."""
        return len(self.waiting) + len(self.running)

    def _admitted(self) -> Iterable[Request]:
        while self.waiting and len(self.running) < self.fleet.batch:
            need = self.waiting[0].prompt + self.waiting[0].new
            if self.running and self._used() + need > self.fleet.cache:
                return
            self.running.append(self.waiting.popleft())
            yield self.running[-1]

    def _used(self) -> int:
        return sum(request.prompt + request.new for request in self.running)

    def _cache_prefix(self, request: Request) -> None:
        self.cached_tokens[request.topic] = request.shared
        self.cached_tokens.move_to_end(request.topic)
        room = self.fleet.cache - self._used()
        while len(self.cached_tokens) > 1 and sum(self.cached_tokens.values()) > max(room, 0):
            self.cached_tokens.popitem(last=False)


@dataclass(frozen=True)
class Outcome:
    """What a simulation, or a real run, gave."""

    throughput: float
    """Requests a second."""
    tokens: float
    """New tokens a second."""
    wait_median: float
    wait_p95: float
    """Seconds until a prompt is read."""
    time_median: float
    time_p95: float
    """Seconds from a request to the end of its answer."""
    hits: float
    """Of all tokens of prompts, those found in the cache."""
    affinity: float
    """Of all requests, those that went to the replica that most of their topic went to."""


def arrivals(traffic: Traffic) -> list[Request]:
    """Requests by their arrival."""
    draw = random.Random(traffic.seed)
    now, requests = 0.0, []
    for _ in range(traffic.requests):
        now += draw.expovariate(traffic.rate)
        own, new = (max(1, round(draw.uniform(0.5, 1.5) * mean)) for mean in (traffic.own, traffic.new))
        requests.append(Request(now, draw.randrange(traffic.topics), traffic.shared, own, new))
    return requests


def simulate(requests: Sequence[Request], speed: Speed, fleet: Fleet) -> list[Request]:
    """The requests with the outcome of each."""
    done = [replace(request) for request in requests]
    replicas = [Replica(fleet, speed) for _ in range(fleet.replicas)]
    table = PrefixAffinity(fleet.slack)
    events = [(request.arrival + speed.overhead / 2, number, -1) for number, request in enumerate(done)]
    heapq.heapify(events)
    busy: set[int] = set()
    while events:
        now, number, place = heapq.heappop(events)
        if place < 0:
            place = done[number].replica = _route(table, done[number], replicas, fleet.aware)
            replicas[place].waiting.append(done[number])
            if place in busy:
                continue
            busy.add(place)
        elif not replicas[place].load:
            busy.discard(place)
            continue
        heapq.heappush(events, (replicas[place].step(now), len(done) + place, place))
    for request in done:
        request.ended += speed.overhead / 2
    return done


def _route(table: PrefixAffinity, request: Request, replicas: Sequence[Replica], aware: bool) -> int:
    blocks = (b"%d" % request.topic,) if aware else ()
    loads = {str(place): one.load for place, one in enumerate(replicas)}
    first = table.rank(blocks or (b"%f" % request.arrival,), loads)[0]
    table.record(blocks, first)
    return int(first)


def summarize(requests: Sequence[Request]) -> Outcome:
    """The throughput, times and cache hits of completed requests."""
    span = max(request.ended for request in requests) - min(request.arrival for request in requests)
    waits = sorted(request.started - request.arrival for request in requests)
    times = sorted(request.ended - request.arrival for request in requests)
    replicas: dict[int, list[int]] = {}
    for request in requests:
        replicas.setdefault(request.topic, []).append(request.replica)
    return Outcome(
        len(requests) / span,
        sum(request.generated for request in requests) / span,
        statistics.median(waits),
        waits[int(0.95 * (len(waits) - 1))],
        statistics.median(times),
        times[int(0.95 * (len(times) - 1))],
        sum(request.cached for request in requests) / sum(request.prompt for request in requests),
        sum(max(map(of_topic.count, {*of_topic})) for of_topic in replicas.values()) / len(requests),
    )


def outcome_table(columns: dict[str, Outcome]) -> str:
    """Outcomes side by side."""
    units = {"throughput": "requests/s", "tokens": "tokens/s", "hits": "of 1", "affinity": "of 1"}
    lines = ["".join(["".ljust(26), *(name.rjust(14) for name in columns)])]
    for one in fields(Outcome):
        name = f"{one.name.replace('_', ' ')}, {units.get(one.name, 's')}"
        lines.append("".join([name.ljust(26), *(f"{getattr(run, one.name):14.3f}" for run in columns.values())]))
    return "\n".join(lines)


def options_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """Those of the options that are fields of a kind."""
    return kind(**{name: value for name, value in given.items() if name in kind.__dataclass_fields__})


def main() -> None:
    """Simulate what the options say, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one in (*fields(Traffic), *fields(Speed), *fields(Fleet)):
        if one.name != "aware":
            parser.add_argument(f"--{one.name}", type=type(one.default), default=one.default)
    parser.add_argument("--check", metavar="MODEL", help="measure a real cluster too, and use its speed")
    given = vars(parser.parse_args())
    traffic, speed, fleet = options_of(Traffic, given), options_of(Speed, given), options_of(Fleet, given)
    if given["check"]:
        from benchmarks.traffic_check import check

        print(check(given["check"], traffic, fleet))
        return
    requests = arrivals(traffic)
    print(
        outcome_table(
            {
                "prefix-aware": summarize(simulate(requests, speed, fleet)),
                "least busy": summarize(simulate(requests, speed, replace(fleet, aware=False))),
            }
        )
    )


if __name__ == "__main__":
    main()
