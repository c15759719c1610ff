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
def spec(fixtures_dir: Path) -> ModelSpec:
    return ModelSpec("tiny", str(fixtures_dir / "tiny-lm"), device="cpu", cache_tokens=2048)


def with_replica(
    spec: ModelSpec, use: Callable[[Replica], Awaitable[None]], config: ServerConfig | None = None
) -> None:
    async def run() -> None:
        replica = Replica(spec, config or ServerConfig(), name="one")
        try:
            await use(replica)
        finally:
            await replica.close()

    asyncio.run(run())


def completion(**body: Any) -> ReplicaRequest:
    return ReplicaRequest("POST", "/v1/completions", headers=JSON, body=json.dumps(body).encode())


def test_a_replica_answers_as_the_server_and_names_itself(spec: ModelSpec) -> None:
    async def use(replica: Replica) -> None:
        response = [
            message
            async for messages in replica.handle(completion(prompt="The river", max_tokens=4))
            for message in messages
        ]
        assert response[0]["status"] == 200
        assert (b"x-exlm-replica", b"one") in response[0]["headers"]
        reply = json.loads(b"".join(message["body"] for message in response[1:]))
        assert reply["usage"]["completion_tokens"] == 4
        models = [
            message async for messages in replica.handle(ReplicaRequest("GET", "/v1/models")) for message in messages
        ]
        assert json.loads(models[1]["body"])["data"][0]["id"] == "tiny"
        await replica.check_health()

    with_replica(spec, use)


def test_an_abandoned_response_is_cancelled(spec: ModelSpec) -> None:
    async def use(replica: Replica) -> None:
        answer = replica.handle(completion(prompt="The river", max_tokens=1500, stream=True))
        await anext(answer)
        activity = replica._engine.models["tiny"].activity
        assert activity.pending_jobs == 1
        await answer.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            while activity.pending_jobs:
                await asyncio.sleep(0.01)

    with_replica(spec, use)


def test_a_stuck_engine_is_not_healthy(spec: ModelSpec) -> None:
    async def use(replica: Replica) -> None:
        await replica.check_health()
        runner: Any = replica._engine.models["tiny"].generator.generator._engine.runner
        decode = runner.decode
        runner.decode = lambda *arguments: time.sleep(1.0) or decode(*arguments)
        with pytest.raises(NotReady, match=r"No token came within 0\.2 s"):
            await replica.check_health()

    with_replica(spec, use, ServerConfig(ready_seconds=0.2))


def test_a_tensor_parallel_replica_gives_the_same_text(spec: ModelSpec) -> None:
    texts = []
    for loaded in (load(spec), load(spec, tensor_parallel=2)):
        generator = Generator(loaded.model, loaded.cache, loaded.tokenizer, **loaded.options)
        texts.append(generator.generate("The river", max_new_tokens=12, gen_settings=Settings.greedy()))
        loaded.unload()
    assert texts[0] == texts[1]


def test_options_that_tensor_parallelism_refuses(spec: ModelSpec) -> None:
    with pytest.raises(InputError, match="takes no draft model but ngram, found '/b'"):
        load(replace(spec, draft="/b"), tensor_parallel=2)
    with pytest.raises(InputError, match="The cache type must be one of"):
        load(replace(spec, cache_type="q5"), tensor_parallel=2)
