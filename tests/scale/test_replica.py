"""One replica: called in this process, abandoned halfway, stuck, and with tensor parallelism."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exlm import Generator, InputError, Settings
from exlm.scale.deploy import NotReady, Replica, ReplicaRequest, ServerConfig
from exlm.serve import ModelSpec, load

JSON = [(b"content-type", b"application/json")]


@pytest.fixture
def listing(fixtures_dir: Path) -> ModelSpec:
    return ModelSpec("tiny", str(fixtures_dir / "tiny-lm"), device="cpu", cache_tokens=2048)


def with_replica(
    listing: ModelSpec, use: Callable[[Replica], Awaitable[None]], terms: ServerConfig | None = None
) -> None:
    async def run() -> None:
        replica = Replica(listing, terms or ServerConfig(), name="one")
        try:
            await use(replica)
        finally:
            await replica.close()

    asyncio.run(run())


def completion(**body: Any) -> ReplicaRequest:
    return ReplicaRequest("POST", "/v1/completions", headers=JSON, body=json.dumps(body).encode())


def test_a_replica_answers_as_the_server_and_names_itself(listing: ModelSpec) -> None:
    async def use(replica: Replica) -> None:
        messages = [
            one async for some in replica.ask(completion(prompt="The river", max_tokens=4)) for one in some
        ]
        assert messages[0]["status"] == 200
        assert (b"x-exlm-replica", b"one") in messages[0]["headers"]
        reply = json.loads(b"".join(one["body"] for one in messages[1:]))
        assert reply["usage"]["completion_tokens"] == 4
        models = [one async for some in replica.ask(ReplicaRequest("GET", "/v1/models")) for one in some]
        assert json.loads(models[1]["body"])["data"][0]["id"] == "tiny"
        await replica.check_health()

    with_replica(listing, use)


def test_an_abandoned_response_is_cancelled(listing: ModelSpec) -> None:
    async def use(replica: Replica) -> None:
        answer = replica.ask(completion(prompt="The river", max_tokens=1500, stream=True))
        await anext(answer)
        pulse = replica._engine.models["tiny"].activity
        assert pulse.pending_jobs == 1
        await answer.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            while pulse.pending_jobs:
                await asyncio.sleep(0.01)

    with_replica(listing, use)


def test_a_stuck_engine_is_not_healthy(listing: ModelSpec) -> None:
    async def use(replica: Replica) -> None:
        await replica.check_health()
        runner: Any = replica._engine.models["tiny"].generator.generator._engine.runner
        decode = runner.decode
        runner.decode = lambda *arguments: time.sleep(1.0) or decode(*arguments)
        with pytest.raises(NotReady, match=r"No token came within 0\.2 s"):
            await replica.check_health()

    with_replica(listing, use, ServerConfig(ready_seconds=0.2))


def test_a_tensor_parallel_replica_gives_the_same_text(listing: ModelSpec) -> None:
    texts = []
    for loaded in (load(listing), load(listing, tensor_parallel=2)):
        generator = Generator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
        texts.append(generator.generate("The river", max_new_tokens=12, gen_settings=Settings.greedy()))
        loaded.unload()
    assert texts[0] == texts[1]


def test_options_that_tensor_parallelism_refuses(listing: ModelSpec) -> None:
    with pytest.raises(InputError, match="takes no draft model but ngram, found '/b'"):
        load(replace(listing, draft="/b"), tensor_parallel=2)
    with pytest.raises(InputError, match="The cache type must be one of"):
        load(replace(listing, cache_type="q5"), tensor_parallel=2)
