"""What a dialect provides, `Endpoint`s and a `ResponseWriter`, and the JSON and server-sent events it writes.

A dialect is an HTTP API in which the server generates text. It is a module such as `openai`: schemas of its
requests, a function that converts them to OpenAI's form, and a writer that turns `OutputDelta`s into its responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from starlette.responses import Response

from .errors import APIError
from .generation import GenerationRequest, OutputDelta
from .schema import OpenAIRequest, StrictModel

EVENT_STREAM = "text/event-stream"


def sse_event(data: Any) -> bytes:
    return b"data: " + json_bytes(data) + b"\n\n"


def json_bytes(data: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates, which models can produce, become `?`."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JsonResponse(Response):
    """A response of compact JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


class ResponseWriter(Protocol):
    """The response to one request in one dialect, built delta by delta."""

    MEDIA_TYPE: ClassVar[str]
    """The content type of streams."""
    STREAM_END: ClassVar[bytes]
    """The bytes that end a complete stream."""
    KEEP_ALIVE: ClassVar[bytes]
    """Sent in a stream when there has been nothing to send for a while."""

    request: GenerationRequest

    def __init__(self, request: GenerationRequest, unique_id: str | None, created: int | None) -> None:
        """A random id and the current time are used where they are None."""

    @property
    def done(self) -> bool:
        """Whether every text has finished."""

    def start_events(self) -> list[Any]:
        """The events that begin a stream."""

    def push(self, index: int, delta: OutputDelta) -> list[Any]:
        """Add to the text `index`; returns the events for it."""

    def final_events(self) -> list[Any]:
        """The events after all texts have finished."""

    def body(self) -> Any:
        """The complete response, as JSON data."""

    @staticmethod
    def error_event(error: Exception) -> Any:
        """The event that ends a stream which failed."""

    @staticmethod
    def encode(event: Any) -> bytes:
        """The bytes of an event."""


@dataclass(frozen=True)
class Endpoint:
    """A route that generates text, in some dialect."""

    path: str
    name: str
    description: str
    request_type: type[StrictModel]
    response_type: Any
    event_type: Any
    to_openai: Callable[[Any], OpenAIRequest]
    """Converts a request to OpenAI's form. A ValidationError that it raises is the client's error."""
    writer: type[ResponseWriter]
    error_body: Callable[[APIError], Any] = attrgetter("body")
    """The JSON data of a response that refuses a request; OpenAI's unless given."""
