"""The ingress without a cluster: replicas are functions that answer, die, or die halfway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from exlm.scale import ServerConfig, prompt_blocks
from exlm.scale.ingress import MAX_ATTEMPTS, CallReplica, Ingress, ReplicaRequest, with_middleware
from exlm.serve import Limits

COMPLETIONS = "/v1/completions"
JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


class ReplicaDied(Exception):
    """A replica has died."""


def start(kind: bytes = JSON) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


def part(body: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def make_app(call_replica: CallReplica, config: ServerConfig | None = None, **options: Any) -> ASGIApp:
    return with_middleware(Ingress(call_replica, (ReplicaDied,), **options), config or ServerConfig(), None)


async def post(app: ASGIApp, path: str = COMPLETIONS, key: str = "", **body: Any) -> tuple[int, bytes]:
    """Status and body of a response, which must be complete and sent once."""
    return await post_raw(app, json.dumps(body).encode(), path, key)


async def post_raw(app: ASGIApp, raw: bytes, path: str = COMPLETIONS, key: str = "") -> tuple[int, bytes]:
    """The same for a body of these bytes."""
    headers = [(b"content-type", JSON), (b"authorization", f"Bearer {key}".encode())]
    sent: list[Message] = []
    inbox: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        return inbox.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    request = ReplicaRequest("POST", path, b"", headers, raw)
    await app(request.scope(), receive, send)
    assert [one["type"] for one in sent[:1]] == ["http.response.start"]
    assert [one["type"] for one in sent[1:]] == ["http.response.body"] * (len(sent) - 1)
    assert [bool(one.get("more_body")) for one in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:])


def dying_replica(times: int, messages: Sequence[Message] = ()) -> tuple[CallReplica, list[ReplicaRequest]]:
    """A replica that dies `times` times after sending some messages, and then answers."""
    seen: list[ReplicaRequest] = []

    async def call_replica(request: ReplicaRequest, blocks: Sequence[bytes]) -> AsyncGenerator[list[Message], None]:
        assert blocks == prompt_blocks(json.loads(request.body))  # no keys, one tenant
        seen.append(request)
        if len(seen) <= times:
            for message in messages:
                yield [message]
            raise ReplicaDied
        yield [start()]
        yield [part(b'{"a":', True), part(b"1}")]

    return call_replica, seen


@pytest.mark.parametrize("messages", [[], [start()], [start(), part(b'{"a', True)], [start(EVENTS)]])
def test_a_request_whose_replica_dies_is_retried(messages: list[Message]) -> None:
    call_replica, seen = dying_replica(MAX_ATTEMPTS - 1, messages)
    assert asyncio.run(post(make_app(call_replica), prompt="x")) == (200, b'{"a":1}')
    assert len(seen) == MAX_ATTEMPTS
    assert {one.body for one in seen} == {b'{"prompt": "x"}'}


def test_a_request_that_kills_every_replica_fails() -> None:
    call_replica, seen = dying_replica(99)
    status, body = asyncio.run(post(make_app(call_replica), prompt="x"))
    assert status == 503
    assert json.loads(body)["error"]["code"] == "replica_lost"
    assert len(seen) == MAX_ATTEMPTS


def test_a_started_stream_ends_with_an_error() -> None:
    call_replica, seen = dying_replica(1, [start(EVENTS), part(b"data: {}\n\n", True)])
    status, body = asyncio.run(post(make_app(call_replica), prompt="x", stream=True))
    first, last = body.decode().split("\n\n")[:2]
    assert (status, first) == (200, "data: {}")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert b"[DONE]" not in body
    assert len(seen) == 1


@pytest.mark.parametrize("kind", [JSON, EVENTS])
def test_a_replica_that_dies_after_its_response(kind: bytes) -> None:
    call_replica, seen = dying_replica(1, [start(kind), part(b"{}")])
    assert asyncio.run(post(make_app(call_replica), prompt="x")) == (200, b"{}")
    assert len(seen) == 1


def test_a_stream_is_forwarded_as_it_comes() -> None:
    sent: list[bytes] = []
    going = asyncio.Event()

    async def call_replica(request: ReplicaRequest, blocks: Sequence[bytes]) -> AsyncGenerator[list[Message], None]:
        yield [start(EVENTS), part(b"one", True)]
        await going.wait()  # set when the first part has been sent
        yield [part(b"two")]

    async def run() -> None:
        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))
            if sent[-1] == b"one":
                going.set()

        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        scope = ReplicaRequest("POST", COMPLETIONS, headers=[(b"content-type", JSON)]).scope()
        await asyncio.wait_for(make_app(call_replica)(scope, receive, send), 10)

    asyncio.run(run())
    assert sent == [b"", b"one", b"two"]


def waiting_replica() -> tuple[CallReplica, asyncio.Event]:
    """A replica that answers once an event is set."""
    release = asyncio.Event()

    async def call_replica(request: ReplicaRequest, blocks: Sequence[bytes]) -> AsyncGenerator[list[Message], None]:
        await release.wait()
        yield [start(), part(b"{}")]

    return call_replica, release


def test_limits_of_one_key_and_of_all() -> None:
    async def run() -> tuple[list[int], list[int], int]:
        call_replica, release = waiting_replica()
        config = ServerConfig(("one", "two"), limits=Limits(requests=100))
        app = make_app(call_replica, config, requests=5, tenant_requests=2)
        many = [asyncio.create_task(post(app, key="one", prompt="x")) for _ in range(4)]
        await asyncio.sleep(0.01)
        other = [asyncio.create_task(post(app, key="two", prompt="x")) for _ in range(2)]
        await asyncio.sleep(0.01)
        models = asyncio.create_task(post(app, "/tokenize", key="two", text="x"))
        release.set()
        replies = [[(await task)[0] for task in tasks] for tasks in (many, other)]
        return replies[0], replies[1], (await models)[0]

    first, second, third = asyncio.run(run())
    assert sorted(first) == [200, 200, 429, 429]
    assert second == [200, 200]
    assert third == 200


def test_keys_are_required_and_models_cannot_be_changed() -> None:
    call_replica, seen = dying_replica(0)
    app = make_app(call_replica, ServerConfig(("key",), ("admin",)))
    assert asyncio.run(post(app, prompt="x"))[0] == 401
    assert asyncio.run(post(app, "/v1/admin/models/load", key="admin", model="x"))[0] == 501
    assert seen == []


@pytest.mark.parametrize("raw", [b"no json", b"\xff", b'{"prompt": "x"'])
def test_a_prompt_that_is_not_json_reaches_no_replica(raw: bytes) -> None:
    call_replica, seen = dying_replica(0)
    status, body = asyncio.run(post_raw(make_app(call_replica), raw))
    assert status == 400
    assert json.loads(body)["error"]["code"] == "invalid_json"
    assert seen == []


def test_prompts_of_two_keys_share_no_blocks() -> None:
    blocks: list[Sequence[bytes]] = []

    async def call_replica(request: ReplicaRequest, prompt: Sequence[bytes]) -> AsyncGenerator[list[Message], None]:
        blocks.append(prompt)
        yield [start(), part(b"{}")]

    app = make_app(call_replica, ServerConfig(("one", "two")))
    for key in ("one", "two", "one"):
        asyncio.run(post(app, key=key, prompt="x"))
    assert blocks[0] == blocks[2] != blocks[1]
