"""What the server answers, as schemas: they are its published description, and tests hold replies to them.

Replies are built as plain dictionaries in `answer` and elsewhere; nothing is computed here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """Says all it has to say."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ResponseModel):
    """Every refusal."""

    error: ErrorDetail


class CachedTokens(ResponseModel):
    """How much of the prompt the cache had."""

    cached_tokens: int


class CompletionDetails(ResponseModel):
    """What became of guessed tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(ResponseModel):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class Timings(ResponseModel):
    """Seconds, of the slowest of a request's texts."""

    queue_seconds: float
    prompt_seconds: float
    generation_seconds: float
    tokens_per_second: float


class TopLogprob(ResponseModel):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was taken, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Of every token of the answer."""

    content: list[TokenLogprob]


class FunctionCall(ResponseModel):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(ResponseModel):
    """A call the model wants made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(ResponseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(ResponseModel):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatReply(ResponseModel):
    """`/v1/chat/completions`, whole."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class FunctionDelta(ResponseModel):
    """More of a function call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """More of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(ResponseModel):
    """More of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None


class ChatChunk(ResponseModel):
    """`/v1/chat/completions`, one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class CompletionLogprobs(ResponseModel):
    """Of every token of the text, side by side."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One continuation, or more of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionReply(ResponseModel):
    """`/v1/completions`, whole or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class ModelCard(ResponseModel):
    """A registered model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool
    max_model_len: int | None
    loras: list[str]


class ModelList(ResponseModel):
    """`/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(ResponseModel):
    """`/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(ResponseModel):
    """`/detokenize`."""

    text: str


class HealthReply(ResponseModel):
    """Alive, or ready."""

    status: Literal["alive", "ready"]


class StateReply(ResponseModel):
    """`/v1/internal/state`."""

    models: list[dict[str, Any]]
    requests: dict[str, int]
