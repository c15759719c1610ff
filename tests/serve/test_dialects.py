"""A dialect of HTTP is a module with endpoints: a toy one with its own schemas and stream format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typing_extensions import TypedDict

from exlm.serve import CompletionRequest, GenerationRequest, Limits, ModelInfo, dialects
from exlm.serve.dialects import Endpoint
from exlm.serve.errors import to_api_error
from exlm.serve.generation import OutputDelta
from exlm.serve.openai import completion_generation_request
from exlm.serve.schema import BaseRequest
from tests.serve.running_server import RunningServer, preloaded, running_server


class ToyRequest(BaseRequest):
    """A text to continue."""

    question: str


class ToyReply(TypedDict):
    """The whole continuation, or a part of it."""

    answer: str


class ToyWriter:
    """Writes lines of JSON."""

    MEDIA_TYPE: ClassVar[str] = "application/x-ndjson"
    STREAM_END: ClassVar[bytes] = b'{"end": true}\n'
    KEEP_ALIVE: ClassVar[bytes] = b"\n"

    def __init__(self, request: GenerationRequest, unique_id: str | None, created: int | None) -> None:
        self.request = request
        self.done = False
        self._texts: list[str] = []

    def start_events(self) -> list[ToyReply]:
        return []

    def push(self, index: int, delta: OutputDelta) -> list[ToyReply]:
        self._texts.append(delta.text)
        self.done = delta.finish is not None
        return [{"answer": delta.text}]

    def final_events(self) -> list[ToyReply]:
        return []

    def encode(self, event: Any) -> bytes:
        return json.dumps(event).encode() + b"\n"

    def error_event(self, error: Exception) -> Any:
        return {"failed": to_api_error(error).message}

    def body(self) -> ToyReply:
        return {"answer": "".join(self._texts)}

    def timings(self) -> dict[str, float]:
        return dict.fromkeys(("queue_seconds", "prompt_seconds", "generation_seconds"), 0.0)


def to_generation_request(request: ToyRequest, model: ModelInfo, limits: Limits, salt: str) -> GenerationRequest:
    fields = request.model_dump(exclude_unset=True)
    completion = CompletionRequest.model_validate({"prompt": fields.pop("question"), **fields})
    return completion_generation_request(completion, model, limits, salt)


TOY = Endpoint("/toy", "toy", "A toy.", ToyRequest, ToyReply, ToyReply, to_generation_request, ToyWriter)


@pytest.fixture
def server(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(dialects, "ENDPOINTS", (*dialects.ENDPOINTS, TOY))
    with running_server(preloaded(chatty)) as running:
        yield running


def test_a_dialect_has_its_own_requests_responses_and_streams(server: RunningServer) -> None:
    asked = {"question": "a", "max_tokens": 8, "temperature": 0}
    status, reply = server.post("/toy", **asked)
    assert (status, reply["answer"]) == (
        200,
        server.post("/v1/completions", prompt="a", max_tokens=8, temperature=0)[1]["choices"][0]["text"],
    )
    status, text, headers = server.ask("POST", "/toy", {**asked, "stream": True})
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    *events, last = [json.loads(line) for line in text.splitlines()]
    assert last == {"end": True}
    assert "".join(event["answer"] for event in events) == reply["answer"]
    assert server.post("/toy", prompt="a")[0] == 400


def test_a_dialect_is_in_the_description(server: RunningServer) -> None:
    description = server.ask("GET", "/openapi.json")[1]
    operation = description["paths"]["/toy"]["post"]
    content = operation["requestBody"]["content"]["application/json"]["schema"]
    assert content == {"$ref": "#/components/schemas/ToyRequest"}
    assert {"ToyRequest", "ToyReply"} <= description["components"]["schemas"].keys()
