"""Request bodies: parsed and validated once, large ones off the event loop; every field is bounded."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from exlm.serve import APIError, ApiKeys, ChatRequest, CompletionRequest, Limits, Options, middleware
from exlm.serve.limits import FairLimiter
from exlm.serve.middleware import LARGE_BODY_BYTES, RequestMiddleware
from exlm.serve.openapi import request_types
from exlm.serve.schema import DetokenizeRequest
from tests.serve.running_server import RunningServer, preloaded, running_server

WHERE = "exlm-large-body"
LARGE_PROMPT = {"prompt": "a" * 1000, "max_tokens": 1, "user": "u", "metadata": {"a": "x" * LARGE_BODY_BYTES}}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The threads in which bodies are parsed and validated."""
    found: dict[str, list[str]] = {"parsed": [], "validated": []}

    def watched(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            found[name].append(threading.current_thread().name)
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(middleware, "from_json", watched("parsed", middleware.from_json))
    monkeypatch.setattr(middleware, "_validate", watched("validated", middleware._validate))

    def unwanted(_: Request) -> Any:
        raise AssertionError("the body was parsed a second time")

    monkeypatch.setattr(Request, "json", unwanted)
    monkeypatch.setattr(Request, "body", unwanted)
    return found


PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/tokenize", {"text": "a"}),
    ("/detokenize", {"tokens": [60]}),
    ("/v1/embeddings", {"input": "a"}),
]


@pytest.mark.parametrize(("path", "asked"), PATHS)
def test_a_body_is_parsed_once_and_validated_once(
    server: RunningServer, threads: dict[str, list[str]], path: str, asked: dict[str, Any]
) -> None:
    for blanks in (0, LARGE_BODY_BYTES):
        raw = json.dumps(asked).encode() + b" " * blanks
        status, reply, _ = server.ask("POST", path, raw)
        assert status == (501 if "embed" in path else 200), reply
    for done in threads.values():
        assert [name.startswith(WHERE) for name in done] == [False, True]


def test_a_large_prompt_is_encoded_off_the_event_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.engine.models["tiny"].info.tokenizer
    encode, names = tokenizer.encode, []

    def watched(*arguments: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        return encode(*arguments, **options)

    monkeypatch.setattr(tokenizer, "encode", watched)
    assert server.post("/v1/completions", **LARGE_PROMPT)[0] == 200
    assert server.post("/tokenize", text="a" * LARGE_BODY_BYTES)[0] == 200
    assert [name.startswith(WHERE) for name in names] == [True, True]


@pytest.fixture
def narrow(chatty: Path) -> Iterator[RunningServer]:
    bounds = Limits(body=100_000, bodies=0, body_seconds=20.0)
    with running_server(preloaded(chatty), Options(limits=bounds)) as running:
        yield running


def test_memory_for_bodies_is_bounded(narrow: RunningServer) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 90000\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(4):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", narrow.port), timeout=20))
            line.sendall(head + b" " * 89_000)
        line = stack.enter_context(socket.create_connection(("127.0.0.1", narrow.port), timeout=20))
        line.sendall(head + b" " * 89_000)
        told = line.recv(65536)
        assert told.startswith(b"HTTP/1.1 429 "), told
        assert b"retry-after" in told.lower()
        assert narrow.post("/tokenize", text="a")[0] == 200
    narrow.wait(lambda: narrow.post("/tokenize", text="a" * 90_000)[0] == 200)


def memory_for_bodies(limits: Limits, *keys: str) -> FairLimiter:
    async def unused(*_: Any) -> None:
        raise AssertionError

    return RequestMiddleware(unused, ApiKeys(keys), limits).memory


def test_released_memory_can_be_acquired_again() -> None:
    memory = memory_for_bodies(Limits(body=100, bodies=50))
    assert memory.limit == 400  # four bodies of the largest size must fit
    memory.acquire(count=260)
    with pytest.raises(APIError) as found:
        memory.acquire(count=141)
    assert (found.value.status, memory.in_use) == (429, 260)
    memory.release(count=260)
    memory.acquire(count=400)


def test_one_caller_cannot_take_all_memory_for_bodies() -> None:
    memory = memory_for_bodies(Limits(body=100), "one", "two", "three")
    half = memory.limit // 2
    memory.acquire("one", half)
    with pytest.raises(APIError):
        memory.acquire("one")
    memory.acquire("two", half // 2)
    with pytest.raises(APIError):
        memory.acquire("two")
    memory.acquire("three", 100)
    memory.release("one", half)
    memory.acquire("two", half // 2)


def test_memory_is_released_however_a_request_ends(narrow: RunningServer) -> None:
    for path, sent, status in (
        ("/v1/completions", b'{"prompt":"a","max_tokens":1}', 200),
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b'{"prompt":1}', 422),
        ("/no/such/route", b'{"prompt":"a"}', 404),
        ("/v1/completions", b'{"prompt":"' + b"a" * 99_000 + b'"}', 400),
    ):
        for _ in range(4):
            assert narrow.ask("POST", path, sent)[0] == status
    filling = b'{"text":"' + b"a" * 99_000 + b'"}'
    assert [narrow.ask("POST", "/tokenize", filling)[0] for _ in range(4)] == [200] * 4


def unbounded_places(schema: Any, place: str = "") -> Iterator[str]:
    """The places where a schema has unbounded lists or objects."""
    if isinstance(schema, list):
        for inner in schema:
            yield from unbounded_places(inner, place)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "array" and "maxItems" not in schema:
        yield place
    if schema.get("type") == "object" and schema.get("additionalProperties") and "maxProperties" not in schema:
        yield place
    for name, inner in schema.items():
        yield from unbounded_places(inner, f"{place}.{name}")


@pytest.mark.parametrize("kind", request_types())
def test_every_list_and_object_of_a_request_is_bounded(kind: type[BaseModel]) -> None:
    assert [*unbounded_places(kind.model_json_schema())] == []


def errors(kind: type[BaseModel], **fields: Any) -> list[Any]:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(fields)
    return list(found.value.errors())


USER = {"role": "user", "content": "a"}
WRONG: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (ChatRequest, {"messages": [{"role": "x"}] * 5000}, "union_tag_invalid"),
    (ChatRequest, {"messages": [USER] * 10_001}, "too_long"),
    (ChatRequest, {"messages": [{**USER, "content": [{"type": "x"}] * 1000}]}, "literal_error"),
    (ChatRequest, {"messages": [{**USER, "content": [{}] * 1025}]}, "too_long"),
    (ChatRequest, {"messages": [{**USER, **{f"x{i}": 1 for i in range(9999)}}]}, "extra_forbidden"),
    (ChatRequest, {"messages": [USER], "tools": [{"type": "x"}] * 128}, "literal_error"),
    (ChatRequest, {"messages": [USER], "metadata": {f"x{i}": 1 for i in range(5000)}}, "too_long"),
    (CompletionRequest, {"prompt": [-1] * 100_000}, "greater_than_equal"),
    (CompletionRequest, {"prompt": [[-1] * 100_000]}, "greater_than_equal"),
    (CompletionRequest, {"prompt": [[-1]] * 1000}, "greater_than_equal"),
    (CompletionRequest, {"prompt": [None] * 1000}, "string_type"),
    (CompletionRequest, {"prompt": "a", "stop": ["" for _ in range(64)]}, "string_too_short"),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(5000)}}, "too_long"),
    (CompletionRequest, {"prompt": "a", "lora": {str(i): "x" for i in range(5000)}}, "too_long"),
    (CompletionRequest, {"prompt": "a", **{f"x{i}": 1 for i in range(9999)}}, "extra_forbidden"),
    (DetokenizeRequest, {"tokens": ["x"] * 100_000}, "int_type"),
]


@pytest.mark.parametrize(("kind", "fields", "expected"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_the_number_of_validation_errors_is_bounded(
    kind: type[BaseModel], fields: dict[str, Any], expected: str
) -> None:
    found = errors(kind, **fields)
    assert expected in [one["type"] for one in found]
    assert len(found) <= 21


def test_strings_are_not_token_ids() -> None:
    assert CompletionRequest(prompt=["12", "13"]).prompt == ["12", "13"]
    assert errors(CompletionRequest, prompt=["12"] * 2000)
    assert errors(CompletionRequest, prompt=[True])


def test_unknown_fields_do_not_hide_errors_of_known_ones() -> None:
    found = errors(CompletionRequest, **{f"x{i}": 1 for i in range(100)}, n="many", suffix="a", best_of=None)
    assert {one["loc"][0] for one in found} == {"n", "prompt", *(f"x{i}" for i in range(20))}


def test_an_application_ends_its_thread(chatty: Path) -> None:
    def working() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith(WHERE)}

    before = working()
    with running_server(preloaded(chatty)) as running:
        assert running.post("/v1/completions", **LARGE_PROMPT)[0] == 200
        assert working() > before
    running.wait(lambda: working() <= before)
