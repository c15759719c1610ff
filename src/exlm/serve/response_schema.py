"""What the server answers: the types of the JSON it writes.

Typed dictionaries, because responses are built as plain dictionaries for speed (a stream writes one for every
token): `openai` and the routes return these types, mypy holds them to it, and FastAPI derives the published
description from the same classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

T = TypeVar("T")
Omittable = Annotated[T | None, Field(json_schema_extra={"default": None})]
"""A field of a stream's events that is left out where an event does not change it."""
closed = with_config(ConfigDict(extra="forbid"))
"""Describes an object as having no further fields."""


@closed
class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


@closed
class ErrorReply(TypedDict):
    """The body of every refused or failed request."""

    error: ErrorDetail


@closed
class CachedTokens(TypedDict):
    """How many tokens of the prompt the prefix cache had."""

    cached_tokens: int


@closed
class CompletionDetails(TypedDict):
    """How many draft tokens of speculative decoding were accepted and rejected."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@closed
class Usage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


@closed
class Timings(TypedDict):
    """Seconds; of the slowest text where a request has several."""

    queue_seconds: float
    prompt_seconds: float
    generation_seconds: float
    tokens_per_second: float


@closed
class TopLogprob(TypedDict):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


@closed
class TokenLogprob(TypedDict):
    """The sampled token, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


@closed
class ChatLogprobs(TypedDict):
    """Log probabilities of every token of the answer."""

    content: list[TokenLogprob]


@closed
class FunctionCall(TypedDict):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


@closed
class ToolCallReply(TypedDict):
    """A tool call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


@closed
class ChatMessage(TypedDict):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallReply] | None]


FinishReason = Literal["stop", "length", "tool_calls"]


@closed
class ChatChoice(TypedDict):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


@closed
class ChatReply(TypedDict):
    """`/v1/chat/completions`, whole."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


@closed
class FunctionDelta(TypedDict):
    """More of a function call."""

    name: NotRequired[Omittable[str]]
    arguments: str


@closed
class ToolCallDelta(TypedDict):
    """More of a tool call."""

    index: int
    id: NotRequired[Omittable[str]]
    type: NotRequired[Omittable[Literal["function"]]]
    function: FunctionDelta


@closed
class ChatDelta(TypedDict):
    """More of a message."""

    role: NotRequired[Omittable[Literal["assistant"]]]
    content: NotRequired[Omittable[str]]
    reasoning_content: NotRequired[Omittable[str]]
    tool_calls: NotRequired[Omittable[list[ToolCallDelta]]]


@closed
class ChatChunkChoice(TypedDict):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: NotRequired[Omittable[ChatLogprobs]]
    finish_reason: FinishReason | None


@closed
class ChatChunk(TypedDict):
    """`/v1/chat/completions`, one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Omittable[Usage]]
    timings: NotRequired[Omittable[Timings]]


@closed
class CompletionLogprobs(TypedDict):
    """Log probabilities of every token of the text, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


@closed
class CompletionChoice(TypedDict):
    """One continuation, or more of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


@closed
class CompletionReply(TypedDict):
    """`/v1/completions`, whole or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings | None]


@closed
class ModelCard(TypedDict):
    """A registered model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool
    max_model_len: int | None
    loras: list[str]


@closed
class ModelList(TypedDict):
    """`/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


@closed
class TokenizeReply(TypedDict):
    """`/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


@closed
class DetokenizeReply(TypedDict):
    """`/detokenize`."""

    text: str


@closed
class HealthReply(TypedDict):
    """The process is alive, or the engine ready."""

    status: Literal["alive", "ready"]


@closed
class StateReply(TypedDict):
    """`/v1/internal/state`."""

    models: list[dict[str, Any]]
    requests: dict[str, int]
