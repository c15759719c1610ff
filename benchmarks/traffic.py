"""Simulates a cluster under load: throughput, latency, and the prefix-cache hit rate.

A discrete-event simulation with the router of `exlm.scale` itself and a model of a replica: prompts are read
at a fixed speed, a step gives every running request a token, and the cache evicts least recently used
prefixes. Machines, networks and chat templates are not modelled. `python -m benchmarks.traffic --help`;
`--check MODEL` runs the same traffic on a real cluster on this machine.
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
    """Poisson arrivals; prompts on one topic share a prefix and have a suffix of their own."""

    rate: float = 4.0
    """Requests a second."""
    requests: int = 400
    topics: int = 16
    shared: int = 600
    """Tokens of the prefix that a topic's prompts share."""
    own: int = 60
    new: int = 60
    """Mean tokens of a prompt's suffix and of an answer; both vary by half."""
    seed: int = 0


@dataclass(frozen=True)
class Speed:
    """The speed of one replica."""

    prefill: float = 5000.0
    """Prefill tokens per second."""
    step: float = 0.010
    """Seconds of a decode step with one request, and the increase for each further one."""
    row: float = 0.0005
    overhead: float = 0.005
    """Network round trip of a request, in seconds."""


@dataclass(frozen=True)
class Fleet:
    """The replicas."""

    replicas: int = 2
    batch: int = 16
    """Most requests that one replica runs at once."""
    cache: int = 32768
    """Cache size of one replica, in tokens."""
    slack: int = 8
    aware: bool = True
    """Whether routing prefers the replica that has the prompt's prefix; else the least busy one."""


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
    made: int = 0

    @property
    def prompt(self) -> int:
        """Prompt tokens."""
        return self.shared + self.own


@dataclass
class Replica:
    """The state of one replica."""

    fleet: Fleet
    speed: Speed
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    known: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Cached tokens of each topic, the most recently used last."""

    def step(self, now: float) -> float:
        """Admit waiting requests, run a decode step; returns when it ends."""
        for request in self._admitted():
            request.started = now
            request.cached = self.known.get(request.topic, 0)
            now += (request.prompt - request.cached) / self.speed.prefill
            self._remember(request)
        now += self.speed.step + self.speed.row * (len(self.running) - 1)
        for request in self.running:
            request.made += 1
            request.first = request.first or now
            request.ended = now
        self.running = [request for request in self.running if request.made < request.new]
        return now

    @property
    def load(self) -> int:
        """Requests running and waiting."""
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

    def _remember(self, request: Request) -> None:
        self.known[request.topic] = request.shared
        self.known.move_to_end(request.topic)
        room = self.fleet.cache - self._used()
        while len(self.known) > 1 and sum(self.known.values()) > max(room, 0):
            self.known.popitem(last=False)


@dataclass(frozen=True)
class Outcome:
    """The results of a simulation or of a real run."""

    throughput: float
    """Requests a second."""
    tokens: float
    """Generated tokens per second."""
    wait_median: float
    wait_p95: float
    """Time to first token, in seconds."""
    time_median: float
    time_p95: float
    """Latency of a whole request, in seconds."""
    hits: float
    """Share of prompt tokens found in the cache."""
    together: float
    """Share of requests that went to the replica which got most of their topic."""


def arrivals(traffic: Traffic) -> list[Request]:
    """Make the requests, in order of arrival."""
    draw = random.Random(traffic.seed)
    now, made = 0.0, []
    for _ in range(traffic.requests):
        now += draw.expovariate(traffic.rate)
        own, new = (max(1, round(draw.uniform(0.5, 1.5) * mean)) for mean in (traffic.own, traffic.new))
        made.append(Request(now, draw.randrange(traffic.topics), traffic.shared, own, new))
    return made


def simulate(requests: Sequence[Request], speed: Speed, fleet: Fleet) -> list[Request]:
    """Run the simulation; returns the requests with their outcomes."""
    done = [replace(request) for request in requests]
    fleet_now = [Replica(fleet, speed) for _ in range(fleet.replicas)]
    table = PrefixAffinity(fleet.slack)
    events = [(request.arrival + speed.overhead / 2, number, -1) for number, request in enumerate(done)]
    heapq.heapify(events)
    busy: set[int] = set()
    while events:
        now, number, place = heapq.heappop(events)
        if place < 0:
            place = done[number].replica = _chosen(table, done[number], fleet_now, fleet.aware)
            fleet_now[place].waiting.append(done[number])
            if place in busy:
                continue
            busy.add(place)
        elif not fleet_now[place].load:
            busy.discard(place)
            continue
        heapq.heappush(events, (fleet_now[place].step(now), len(done) + place, place))
    for request in done:
        request.ended += speed.overhead / 2
    return done


def _chosen(table: PrefixAffinity, request: Request, replicas: Sequence[Replica], aware: bool) -> int:
    blocks = (b"%d" % request.topic,) if aware else ()
    loads = {str(place): one.load for place, one in enumerate(replicas)}
    first = table.rank(blocks or (b"%f" % request.arrival,), loads)[0]
    table.record(blocks, first)
    return int(first)


def outcome(requests: Sequence[Request]) -> Outcome:
    """Summarise finished requests."""
    span = max(request.ended for request in requests) - min(request.arrival for request in requests)
    waits = sorted(request.started - request.arrival for request in requests)
    times = sorted(request.ended - request.arrival for request in requests)
    homes: dict[int, list[int]] = {}
    for request in requests:
        homes.setdefault(request.topic, []).append(request.replica)
    return Outcome(
        len(requests) / span,
        sum(request.made for request in requests) / span,
        statistics.median(waits),
        waits[int(0.95 * (len(waits) - 1))],
        statistics.median(times),
        times[int(0.95 * (len(times) - 1))],
        sum(request.cached for request in requests) / sum(request.prompt for request in requests),
        sum(max(map(home.count, {*home})) for home in homes.values()) / len(requests),
    )


def table(columns: dict[str, Outcome]) -> str:
    """Outcomes side by side."""
    units = {"throughput": "requests/s", "tokens": "tokens/s", "hits": "of 1", "together": "of 1"}
    lines = ["".join(["".ljust(26), *(name.rjust(14) for name in columns)])]
    for one in fields(Outcome):
        name = f"{one.name.replace('_', ' ')}, {units.get(one.name, 's')}"
        lines.append(
            "".join([name.ljust(26), *(f"{getattr(made, one.name):14.3f}" for made in columns.values())])
        )
    return "\n".join(lines)


def chosen(kind: type[T], given: Mapping[str, Any]) -> T:
    """Make a dataclass of the options that are its fields."""
    return kind(**{name: value for name, value in given.items() if name in kind.__dataclass_fields__})


def main() -> None:
    """Run the simulation and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for one in (*fields(Traffic), *fields(Speed), *fields(Fleet)):
        if one.name != "aware":
            parser.add_argument(f"--{one.name}", type=type(one.default), default=one.default)
    parser.add_argument(
        "--check", metavar="MODEL", help="also run a real cluster, and use its measured speed"
    )
    given = vars(parser.parse_args())
    traffic, speed, fleet = chosen(Traffic, given), chosen(Speed, given), chosen(Fleet, given)
    if given["check"]:
        from benchmarks.traffic_check import check

        print(check(given["check"], traffic, fleet))
        return
    asked = arrivals(traffic)
    print(
        table(
            {
                "prefix-aware": outcome(simulate(asked, speed, fleet)),
                "least busy": outcome(simulate(asked, speed, replace(fleet, aware=False))),
            }
        )
    )


if __name__ == "__main__":
    main()
