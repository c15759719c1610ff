"""The OpenAPI description: responses match it, and no request near it breaks the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from hypothesis import strategies as st
from pydantic import TypeAdapter
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from exlm import Settings
from exlm.serve import Limits, Options
from exlm.serve.generation import SETTINGS
from exlm.serve.schema import BaseRequest, ChatChunk, CompletionReply
from tests.serve.running_server import RunningServer, preloaded, running_server

BOUNDS = Limits(answer=4, tokens=8, choices=2)
HELLO = [{"role": "user", "content": "hi"}]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(chatty: Path) -> Iterator[RunningServer]:
    with running_server(preloaded(chatty), Options(limits=BOUNDS)) as running:
        yield running


@pytest.fixture(scope="module")
def described(server: RunningServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/admin/models/load"),
    ("POST", "/v1/admin/models/unload"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/internal/state"),
]


def test_the_docs_page_loads_nothing_from_other_servers(server: RunningServer) -> None:
    status, page, headers = server.ask("GET", "/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "://" not in page
    assert "<script" not in page
    for method, path in OPERATIONS:
        assert f"<code>{method} {path}</code>" in page
    assert set(re.findall(r'href="#(\w+)"', page)) <= set(re.findall(r'id="(\w+)"', page))
    assert all(f"<code>{name}</code>" in page for name in BaseRequest.model_fields)
    assert server.ask("GET", "/redoc")[0] == 404


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_breaks_the_server(described: Any, method: str, path: str) -> None:
    operation = described[path][method]
    refused = path == "/v1/embeddings"  # with 501, as documented
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        if mode is GenerationMode.NEGATIVE and method == "GET":
            continue

        @hypothesis.settings(
            max_examples=30 if method == "POST" else 3,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
        )
        @hypothesis.given(operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            response = case.call()
            case.validate_response(response, checks=CHECKS[1:] if refused else CHECKS)

        check()


def test_every_operation_is_fuzzed(described: Any) -> None:
    every = {(one.ok().method.upper(), one.ok().path) for one in described.get_all_operations()}
    assert every == {*OPERATIONS}


def test_every_sampler_setting_is_in_the_schema() -> None:
    assert {*SETTINGS} <= BaseRequest.model_fields.keys()
    assert {field.name for field in fields(Settings)} == {
        *SETTINGS, "mirostat_mu", "token_bias", "post_sampling_hooks", "ngram_trie", "ngram_index",
        "ngram_history", "filters", "filter_prefer_eos",
    }  # fmt: skip


def said(name: str) -> st.SearchStrategy[Any]:
    """Values of a sampler setting that the schema allows, often extreme ones."""
    (kind, *_) = BaseRequest.model_json_schema()["properties"][name]["anyOf"]
    low, high = kind.get("minimum", kind.get("exclusiveMinimum", 0)), kind.get("maximum", 1)
    match kind["type"]:
        case "boolean":
            return st.booleans()
        case "array":
            return st.lists(st.integers(0, 300), max_size=4)
        case "integer":
            return st.sampled_from([low, low + 1, high]) | st.integers(low, high)
        case _:
            return st.sampled_from([float(low), float(high)]) | st.floats(low, high)


@hypothesis.settings(max_examples=80, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.fixed_dictionaries({}, optional={name: said(name) for name in SETTINGS}))
def test_any_settings_are_served_or_refused(server: RunningServer, settings: dict[str, Any]) -> None:
    if "cfg_scale" in settings:
        settings["negative_prompt"] = "b"
    status, reply = server.post("/v1/completions", prompt="a", max_tokens=4, **settings)
    assert status in (200, 422), (settings, reply)


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/chat/completions", {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": "a", "logprobs": 2}),
    ("/v1/completions", {"prompt": [[60, 61], [62]], "echo": True}),
    ("/tokenize", {"text": "hi"}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [60, 61]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_replies_match_the_schema(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    description = server.ask("GET", "/openapi.json")[1]
    content = description["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
    status, reply = server.post(path, **body)
    assert status == 200, reply
    jsonschema.validate(reply, {**content["schema"], "components": description["components"]})


@pytest.mark.parametrize(("path", "body"), REQUESTS[:4])
def test_events_match_the_schema(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    kind = TypeAdapter[Any](ChatChunk if "chat" in path else CompletionReply)
    events = server.events(path, **body, stream_options={"include_usage": True})
    for told in events:
        kind.validate_python(told)
    assert events[-1]["usage"]["completion_tokens"] > 0
    assert events[-1]["timings"]["generation_seconds"] >= 0


@pytest.mark.parametrize(("path", "body"), REQUESTS[:4])
def test_streams_match_the_description(described: Any, path: str, body: dict[str, Any]) -> None:
    operation = described[path]["POST"]
    for wrong in (False, True):
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        case = operation.Case(body=asked, media_type="application/json")
        reply = case.call()
        assert reply.headers["content-type"][0].startswith("text/event-stream")
        if wrong:
            reply.content = reply.content.replace(b'"created":', b'"creatid":')
            with pytest.raises(FailureGroup, match="creat"):
                case.validate_response(reply, checks=CHECKS)
        else:
            case.validate_response(reply, checks=CHECKS)


@pytest.mark.parametrize(("path", "body"), REQUESTS[:4])
def test_a_stream_adds_up_to_the_whole(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    asked = {**body, "temperature": 0, "seed": 5}
    whole = server.post(path, **asked)[1]["choices"]
    texts, tokens = [""] * len(whole), [0] * len(whole)
    for told in server.events(path, **asked):
        for choice in told["choices"]:
            at = choice["index"]
            texts[at] += choice.get("text", "") + choice.get("delta", {}).get("content", "")
            listed = choice.get("logprobs") or {}
            tokens[at] += len(listed.get("content", listed.get("tokens", [])))
    assert texts == [choice.get("text", choice.get("message", {}).get("content")) for choice in whole]
    assert tokens == [
        len((choice["logprobs"] or {}).get("content", (choice["logprobs"] or {}).get("tokens", []))) for choice in whole
    ]
