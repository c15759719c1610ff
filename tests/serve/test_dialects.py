"""A dialect of HTTP is a module with endpoints: a toy one with its own schemas and stream format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NotRequired

import pytest
from typing_extensions import TypedDict

from exlm.serve import APIError, CompletionRequest, GenerationRequest, dialects
from exlm.serve.errors import to_api_error
from exlm.serve.generation import FinishInfo, OutputDelta
from exlm.serve.responses import Endpoint
from exlm.serve.schema import StrictModel
from tests.serve.running_server import RunningServer, preloaded, running_server


class ToyRequest(StrictModel):
    """A text to continue."""

    question: str
    length: int
    heat: float
    until: str | None = None
    stream: bool = False


class ToyReply(TypedDict):
    """The whole continuation, or a part of it."""

    answer: str
    ended_by: NotRequired[str | None]


class ToyWriter:
    """Writes lines of JSON."""

    MEDIA_TYPE: ClassVar[str] = "application/x-ndjson"
    STREAM_END: ClassVar[bytes] = b'{"end": true}\n'
    KEEP_ALIVE: ClassVar[bytes] = b"\n"

    def __init__(self, request: GenerationRequest, unique_id: str | None, created: int | None) -> None:
        self.request = request
        self.finish: FinishInfo | None = None
        self._texts: list[str] = []

    @property
    def done(self) -> bool:
        return self.finish is not None

    def start_events(self) -> list[ToyReply]:
        return []

    def push(self, index: int, delta: OutputDelta) -> list[ToyReply]:
        self._texts.append(delta.text)
        self.finish = delta.finish
        return [{"answer": delta.text}]

    def final_events(self) -> list[ToyReply]:
        return []

    @staticmethod
    def encode(event: Any) -> bytes:
        return json.dumps(event).encode() + b"\n"

    @staticmethod
    def error_event(error: Exception) -> Any:
        return {"failed": to_api_error(error).message}

    def body(self) -> ToyReply:
        assert self.finish is not None
        return {"answer": "".join(self._texts), "ended_by": self.finish.stop_string}


def to_openai(request: ToyRequest) -> CompletionRequest:
    return CompletionRequest(
        prompt=request.question,
        max_tokens=request.length,
        temperature=request.heat,
        stop=request.until,
        stream=request.stream,
    )


def error_body(error: APIError) -> dict[str, str]:
    return {"failed": error.message}


TOY = Endpoint("/toy", "toy", "A toy.", ToyRequest, ToyReply, ToyReply, to_openai, ToyWriter, error_body)


@pytest.fixture
def server(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(dialects, "ENDPOINTS", (*dialects.ENDPOINTS, TOY))
    with running_server(preloaded(chatty)) as running:
        yield running


def test_a_dialect_has_its_own_requests_responses_and_streams(server: RunningServer) -> None:
    asked = {"question": "a", "length": 8, "heat": 0}
    status, reply = server.post("/toy", **asked)
    assert (status, reply["answer"]) == (
        200,
        server.post("/v1/completions", prompt="a", max_tokens=8, temperature=0)[1]["choices"][0]["text"],
    )
    status, text, headers = server.ask("POST", "/toy", {**asked, "stream": True})
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    *events, last = [json.loads(line) for line in text.splitlines()]
    assert last == {"end": True}
    assert reply["ended_by"] is None
    stop = reply["answer"][2:4]
    assert server.post("/toy", **asked, until=stop)[1]["ended_by"] == stop
    assert "".join(event["answer"] for event in events) == reply["answer"]


def test_a_dialect_has_its_own_errors(server: RunningServer) -> None:
    unknown = {"failed": "Unknown or unsupported: 'prompt'."}
    assert server.post("/toy", prompt="a") == (400, unknown)
    status, reply = server.post("/toy", question="a", length=0, heat=0)
    assert (status, [*reply]) == (422, ["failed"])  # refused by OpenAI's form
    assert server.ask("POST", "/toy", b"{", **{"Content-Type": "text/plain"})[:2] == (
        415,
        {"failed": "Send JSON, with `Content-Type: application/json`."},
    )
    assert "error" in server.post("/v1/completions", question="a")[1]


def test_a_dialect_is_in_the_description(server: RunningServer) -> None:
    description = server.ask("GET", "/openapi.json")[1]
    operation = description["paths"]["/toy"]["post"]
    content = operation["requestBody"]["content"]["application/json"]["schema"]
    assert content == {"$ref": "#/components/schemas/ToyRequest"}
    assert {"ToyRequest", "ToyReply"} <= description["components"]["schemas"].keys()
    assert "application/x-ndjson" in operation["responses"]["200"]["content"]
