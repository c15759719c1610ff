"""Five hundred concurrent streams, a third of them abandoned, and tenants that share a server."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from exlm.serve import ApiKeys, Limits, Options
from tests.serve.running_server import RunningServer, preloaded, running_server

CLIENTS = 500
TOKENS = 12


def resident() -> int:
    """Resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def stream(port: int, number: int, leaves_after: int | None) -> str:
    """One client: returns the text it got, or "" if it disconnected after `leave_after` bytes."""
    body = json.dumps(
        {
            "prompt": f"client {number}: ",
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await writer.drain()
        if leaves_after is not None:
            await reader.read(leaves_after)
            return ""
        told = (await reader.read(-1)).decode()
    finally:
        writer.close()
    assert told.startswith("HTTP/1.1 200"), told[:300]
    assert "data: [DONE]" in told
    lines = [line for line in told.splitlines() if line.startswith('data: {"')]
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)


def crowd(server: RunningServer, count: int, seed: int) -> list[str]:
    """Many concurrent clients, of which a third disconnect at random points."""
    random = Random(seed)
    plans = [random.choice([0, 1, 200, 900]) if random.random() < 1 / 3 else None for _ in range(count)]

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(stream(server.port, i, plan) for i, plan in enumerate(plans)))

    texts = asyncio.run(all_of_them())
    assert all(text for text, plan in zip(texts, plans, strict=True) if plan is None)
    return texts


@pytest.fixture
def roomy(chatty: Path) -> Iterator[RunningServer]:
    options = Options(limits=Limits(requests=CLIENTS + 100))
    with running_server(preloaded(chatty, cache_tokens=64 * 256), options) as running:
        yield running


def settled(server: RunningServer) -> bool:
    hosted = server.engine.models["tiny"]
    return not (
        hosted.activity.pending_jobs or hosted.generator.jobs or hosted.generator.generator.num_remaining_jobs()
    )


def test_five_hundred_streams_with_a_third_abandoned(roomy: RunningServer) -> None:
    crowd(roomy, 100, seed=1)
    roomy.wait(lambda: settled(roomy))
    gc.collect()
    before, tasks = resident(), len(asyncio.all_tasks(roomy.loop))
    texts = crowd(roomy, CLIENTS, seed=2)
    roomy.wait(lambda: settled(roomy))
    roomy.wait(lambda: roomy.ask("GET", "/v1/internal/state")[1]["requests"]["inside"] == 0)
    gc.collect()
    assert resident() - before < 64 << 20
    assert len(asyncio.all_tasks(roomy.loop)) <= tasks + 4
    (model,) = roomy.ask("GET", "/v1/internal/state")[1]["models"]
    assert model["pages"]["free"] == model["pages"]["total"]
    finished = next(i for i, text in enumerate(texts) if text)
    prompt = f"client {finished}: "
    status, reply = roomy.post("/v1/completions", prompt=prompt, max_tokens=TOKENS, min_tokens=TOKENS, temperature=0)
    assert status == 200
    assert reply["choices"][0]["text"] == texts[finished]  # the same alone as with others


PROMPTS = ["once upon a time ", "once upon a time there was ", "x", "the same prompt for all of us " * 12]


def requests(tenant: int, count: int) -> list[dict[str, Any]]:
    """The requests of a tenant: the same prompts for all tenants, with different settings."""
    random = Random(tenant)
    return [
        {
            "prompt": random.choice(PROMPTS),
            "max_tokens": random.randint(1, 12),
            "temperature": random.choice([0.0, 0.7, 1.5]),
            "seed": random.randint(0, 99),
            "n": random.choice([1, 1, 2]),
            "top_k": random.choice([0, 5]),
            "dry_multiplier": random.choice([0.0, 0.8]),
            **({"banned_strings": ["e"]} if random.random() < 0.2 else {}),
        }
        for _ in range(count)
    ]


def asked(server: RunningServer, key: str, bodies: list[dict[str, Any]]) -> Any:
    out = []
    for body in bodies:
        status, reply = server.post("/v1/completions", key, **body)
        assert status == 200, reply
        out.append([choice["text"] for choice in reply["choices"]])
    return out


def test_tenants_get_the_same_answers_alone_and_together(chatty: Path) -> None:
    keys = ["sk-one", "sk-two"]
    bodies = [requests(tenant, 16) for tenant in range(2)]

    def fresh() -> Any:
        return running_server(preloaded(chatty), Options(api_keys=ApiKeys(keys)))

    alone = []
    for key, own in zip(keys, bodies, strict=True):
        with fresh() as server:
            alone.append(asked(server, key, own))

    async def together(server: RunningServer) -> list[Any]:
        work = [
            asyncio.to_thread(asked, server, key, own[start::2])
            for key, own in zip(keys, bodies, strict=True)
            for start in range(2)
        ]
        return await asyncio.gather(*work)

    with fresh() as server:
        found = asyncio.run(together(server))
    for tenant in range(2):
        assert found[2 * tenant] == alone[tenant][0::2]
        assert found[2 * tenant + 1] == alone[tenant][1::2]


def test_a_tenant_cannot_detect_another_ones_prompts(chatty: Path) -> None:
    body = {"prompt": "a secret that takes more than one page " * 8, "max_tokens": 1}
    with running_server(preloaded(chatty), Options(api_keys=ApiKeys(["one", "two"]))) as server:

        def cached(key: str) -> int:
            usage = server.post("/v1/completions", key, **body)[1]["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached("one") == 0
        assert cached("two") == 0
        assert cached("one") > 256
        assert cached("two") > 256
