"""Two replicas of a tiny model on a local Ray, as clients see them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.scale.conftest import PATIENCE, Cluster, kill, wait_until
from tests.serve import test_openai as suite
from tests.serve.running_server import RunningServer

pytestmark = pytest.mark.xdist_group("ray")

REPLICA = "ServeReplica:exlm:Replica"
MODEL = "tiny"


def settings(fixtures: Path) -> dict[str, Any]:
    return {
        "model": str(fixtures / "tiny-lm"),
        "name": MODEL,
        "device": "cpu",
        "cache_tokens": 16384,
        "max_batch_size": 16,
        "replicas": 2,
        "cpus": 0.5,
        "ongoing": 16,
    }


@pytest.fixture(scope="module")
def url(cluster: Cluster, fixtures_dir: Path) -> Iterator[str]:
    """The service, with two replicas."""
    cluster.deploy(**settings(fixtures_dir))
    yield f"http://127.0.0.1:{cluster.port}/v1"
    cluster.deploy()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def running(cluster: Cluster, url: str) -> RunningServer:
    """The service as a `RunningServer`, for the tests of a single server that need no engine."""
    return RunningServer(cluster.port, engine=None, loop=None)  # type: ignore[arg-type]


def complete(client: openai.OpenAI, prompt: str, tokens: int = 8) -> tuple[str, str, int, int]:
    """Text, replica, and tokens of the prompt that were cached and in all."""
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0)
    reply = raw.parse()
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    cached = reply.usage.prompt_tokens_details.cached_tokens or 0
    return reply.choices[0].text, raw.headers["x-exlm-replica"], cached, reply.usage.prompt_tokens


globals().update({name: check for name, check in vars(suite).items() if name.startswith("test_")})
"""Every test of the official client that a single server must pass, with two replicas."""


def test_prompts_with_a_common_prefix_go_to_one_replica(client: openai.OpenAI) -> None:
    homes: list[Counter[str]] = []
    cached = shared = 0
    for topic in range(6):
        start = f"Chapter {topic}: " + f"the history of the river {topic} and its towns, " * 12
        first = complete(client, start)[3] - 1  # less the last token, which is always prefilled again
        homes.append(Counter())
        for turn in range(10):
            _, replica, found, _ = complete(client, f"{start} {turn}")
            homes[-1][replica] += 1
            cached, shared = cached + found, shared + first
    assert sum(max(home.values()) for home in homes) >= 0.9 * sum(sum(home.values()) for home in homes)
    assert cached >= 0.9 * shared


class Load:
    """Clients that send one request after the other, and keep the failures."""

    def __init__(self, client: openai.OpenAI, clients: int = 6) -> None:
        self.client = client
        self.wrong: list[str] = []
        self.right = 0
        self.replicas: set[str] = set()
        self._want = {f"Tale {one}: once there was": "" for one in range(clients)}
        for prompt in self._want:
            self._want[prompt] = complete(client, prompt, 24)[0]
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)

    def __enter__(self) -> Load:
        self._running = [self._pool.submit(self._send_requests, prompt) for prompt in self._want]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for one in self._running:
            one.result(PATIENCE)
        self._pool.shutdown()

    def more(self, count: int) -> None:
        """Wait for this many more answers."""
        start = self.right
        wait_until(lambda: self.right >= start + count or bool(self.wrong))

    def _send_requests(self, prompt: str) -> None:
        while not self._stop.is_set():
            try:
                text, replica, *_ = complete(self.client, prompt, 24)
            except openai.APIError as error:
                self.wrong.append(repr(error))
                continue
            if text != self._want[prompt]:
                self.wrong.append(f"{prompt!r}: {text!r}")
            self.replicas.add(replica)
            self.right += 1


class Stream:
    """A long streamed answer: how much of it came, and how it ended."""

    def __init__(self, client: openai.OpenAI, number: int) -> None:
        self.events, self.end, self.replica = 0, "", ""
        self._client, self._prompt = client, f"{number}. A long story about the sea: "
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            raw = self._client.completions.with_raw_response.create(
                model=MODEL, prompt=self._prompt, max_tokens=1000, temperature=0, stream=True
            )
            self.replica = raw.headers["x-exlm-replica"]
            for event in raw.parse():
                self.events += 1
                self.end = event.choices[0].finish_reason or ""
        except openai.APIError as error:
            self.end = str(error.code)


def test_a_killed_replica_loses_no_request_and_is_replaced(cluster: Cluster, client: openai.OpenAI) -> None:
    before = cluster.workers(REPLICA)
    assert len(before) == 2
    with Load(client) as load:
        streams: list[Stream] = []
        # one stream on each replica, so that one of them loses its replica
        while len({stream.replica for stream in streams}) < 2:
            assert len(streams) < 12
            streams.append(Stream(client, len(streams)))
            wait_until(lambda: streams[-1].events > 0)
        kill(before[0])
        load.more(60)
        for stream in streams:
            stream.thread.join(PATIENCE)
    assert load.wrong == []
    ends = Counter(stream.end for stream in streams)
    assert ends.keys() <= {"length", "stop", "replica_lost"}, ends
    assert ends["replica_lost"] > 0, "no stream was on the replica that was killed"
    assert ends["length"] + ends["stop"] > 0
    wait_until(lambda: len(cluster.workers(REPLICA)) == 2 and before[0] not in cluster.workers(REPLICA))
    turns = iter(range(10_000))
    lately: deque[str] = deque(maxlen=20)

    def both() -> bool:
        lately.append(complete(client, f"{next(turns)} is a number")[1])
        return len({*lately}) == 2

    wait_until(both)


def test_an_update_drops_no_request(cluster: Cluster, client: openai.OpenAI, fixtures_dir: Path) -> None:
    old = cluster.workers(REPLICA)
    with Load(client, 4) as load:
        load.more(8)
        cluster.deploy(**settings(fixtures_dir), answer=64)
        wait_until(lambda: not {*old} & {*cluster.workers(REPLICA)})
        load.more(8)
    assert load.wrong == []
    assert len(cluster.workers(REPLICA)) == 2
