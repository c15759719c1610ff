"""What the server answers, as schemas: they are its published description, and tests hold replies to them.

Replies are built as plain dictionaries in `answer` and elsewhere; nothing is computed here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """Says all it has to say."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Reply):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Every refusal."""

    error: ErrorDetail


class CachedTokens(Reply):
    """How much of the prompt the cache had."""

    cached_tokens: int


class CompletionDetails(Reply):
    """What became of guessed tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Reply):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class Timings(Reply):
    """Seconds, of the slowest of a request's texts."""

    queue_seconds: float
    prompt_seconds: float
    generation_seconds: float
    tokens_per_second: float


class TopLogprob(Reply):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was taken, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Of every token of the answer."""

    content: list[TokenLogprob]


class FunctionCall(Reply):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(Reply):
    """A call the model wants made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Reply):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Reply):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatReply(Reply):
    """`/v1/chat/completions`, whole."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class FunctionDelta(Reply):
    """More of a function call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Reply):
    """More of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Reply):
    """More of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Reply):
    """More of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None


class ChatChunk(Reply):
    """`/v1/chat/completions`, one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class CompletionLogprobs(Reply):
    """Of every token of the text, side by side."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Reply):
    """One continuation, or more of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionReply(Reply):
    """`/v1/completions`, whole or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class ModelCard(Reply):
    """A registered model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool
    max_model_len: int | None
    loras: list[str]


class ModelList(Reply):
    """`/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(Reply):
    """`/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(Reply):
    """`/detokenize`."""

    text: str


class HealthReply(Reply):
    """Alive, or ready."""

    status: Literal["alive", "ready"]


class StateReply(Reply):
    """`/v1/internal/state`."""

    models: list[dict[str, Any]]
    requests: dict[str, int]
