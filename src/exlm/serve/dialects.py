"""The dialects of HTTP in which the server generates text: their routes, and what a dialect provides.

A dialect is a module such as `openai`: functions that turn its requests into a `GenerationRequest`, and
writers that turn `OutputDelta`s into its responses. Its routes are entries of `ENDPOINTS`. The application,
its OpenAPI description, batches and the ingress of a cluster take them from there; nothing else has to
change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from . import openai
from .generation import GenerationRequest, ModelInfo, OutputDelta
from .limits import Limits
from .schema import BaseRequest, ChatChunk, ChatReply, ChatRequest, CompletionReply, CompletionRequest


class ResponseWriter(Protocol):
    """The response to one request in one dialect, built delta by delta."""

    MEDIA_TYPE: ClassVar[str]
    """The content type of streams."""
    STREAM_END: ClassVar[bytes]
    """The bytes that end a complete stream."""
    KEEP_ALIVE: ClassVar[bytes]
    """Sent in a stream when there has been nothing to send for `KEEP_ALIVE_SECONDS`."""

    request: GenerationRequest

    @property
    def done(self) -> bool:
        """Whether every text has finished."""

    def start_events(self) -> list[Any]:
        """The events that begin a stream."""

    def push(self, index: int, delta: OutputDelta) -> list[Any]:
        """Add to the text `index`; returns the events for it."""

    def final_events(self) -> list[Any]:
        """The events after all texts have finished."""

    def encode(self, event: Any) -> bytes:
        """The bytes of an event."""

    def error_event(self, error: Exception) -> Any:
        """The event that ends a stream which failed."""

    def body(self) -> Any:
        """The complete response, as JSON data."""

    def timings(self) -> Mapping[str, Any]:
        """`queue_seconds`, `prompt_seconds` and `generation_seconds`, for metrics."""


@dataclass(frozen=True)
class Endpoint:
    """A route that generates text, in some dialect."""

    path: str
    name: str
    description: str
    request_type: type[BaseRequest]
    response_type: Any
    event_type: Any
    to_generation_request: Callable[[Any, ModelInfo, Limits, str], GenerationRequest]
    """From a request, the model, the server's limits and the caller's cache salt."""
    writer: Callable[[GenerationRequest, str | None, int | None], ResponseWriter]
    """From a request, a unique id and the time of creation; None lets the writer choose them."""


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        path="/v1/chat/completions",
        name="chat",
        description="Answer a conversation, at once or as a stream of events.",
        request_type=ChatRequest,
        response_type=ChatReply,
        event_type=ChatChunk,
        to_generation_request=openai.chat_generation_request,
        writer=openai.ChatWriter,
    ),
    Endpoint(
        path="/v1/completions",
        name="complete",
        description="Continue a text, or several.",
        request_type=CompletionRequest,
        response_type=CompletionReply,
        event_type=CompletionReply,
        to_generation_request=openai.completion_generation_request,
        writer=openai.CompletionWriter,
    ),
)
