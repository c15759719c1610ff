"""What the engine gives back for a request, and what a dialect must have to pass it on.

The engine turns each of a job's results into an `OutputDelta`. A dialect of HTTP (`openai` is one) is a
module with an `Endpoint` for each of its routes: the request schema, a function that makes a
`GenerationRequest` of such a request, and a `ResponseWriter` that turns deltas into the response, whole or as
the events of a stream. Nothing here knows HTTP or the engine, so batch files are answered by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from .generation import GenerationRequest, ModelInfo
from .limits import Limits
from .schema import BaseRequest

FINISH_REASONS: Mapping[str, Literal["stop", "length"]] = {
    "stop_token": "stop",
    "stop_string": "stop",
    "end_filter": "stop",
    "max_new_tokens": "length",
}
"""`eos_reason` of a job's last result, and the OpenAI API's word for it."""
MIN_LOGPROB = -9999.0
"""Written instead of minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class SampledToken:
    """A token, its log probability, and the most likely tokens with theirs."""

    text: str
    logprob: float
    top_logprobs: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class FinishInfo:
    """Why a text ended, and its token counts and times."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    seconds: tuple[float, float, float]
    """In the queue, in prefill, in generation."""


@dataclass(frozen=True)
class OutputDelta:
    """What one result of a job adds to its text; `finish` stands in the last one."""

    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    finish: FinishInfo | None = None


class ResponseWriter(Protocol):
    """The response to one request in a dialect's words, built delta by delta."""

    MEDIA_TYPE: ClassVar[str]
    """The content type of streams."""
    STREAM_END: ClassVar[bytes]
    """Ends a stream that is complete."""
    KEEP_ALIVE: ClassVar[bytes]
    """Sent in a stream when there has been nothing to send for `KEEP_ALIVE_SECONDS`."""

    request: GenerationRequest

    @property
    def done(self) -> bool:
        """Whether every text has finished."""

    def start_events(self) -> list[Any]:
        """The events that begin a stream."""

    def push(self, index: int, delta: OutputDelta) -> list[Any]:
        """Add to the text `index`; returns the events that say so."""

    def final_events(self) -> list[Any]:
        """The events after all texts have finished."""

    def encode(self, event: Any) -> bytes:
        """An event as it is sent."""

    def error_event(self, error: Exception) -> Any:
        """The event that ends a stream which failed."""

    def body(self) -> Any:
        """The whole response, as JSON data."""

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


def output_delta(result: Mapping[str, Any], request: GenerationRequest) -> OutputDelta | None:
    """What a job's result adds to its text; None if nothing. Raises the error of a failed job."""
    if result["stage"] != "streaming":
        return None
    if "error" in result:
        raise result["error"]
    tokens: tuple[SampledToken, ...] = ()
    if request.top_logprobs is not None and "logits" in result:
        tokens = _sampled_tokens(result, request)
    finish = None
    if result["eos"]:
        finish = FinishInfo(
            reason=FINISH_REASONS[result["eos_reason"]],
            prompt_tokens=result["prompt_tokens"],
            cached_tokens=result["cached_tokens"],
            new_tokens=result["new_tokens"],
            accepted_draft_tokens=result.get("accepted_draft_tokens", 0),
            rejected_draft_tokens=result.get("rejected_draft_tokens", 0),
            seconds=(result["time_enqueued"], result["time_prefill"], result["time_generate"]),
        )
    text = result.get("text", "")
    return OutputDelta(text, tokens, finish) if text or tokens or finish else None


def _sampled_tokens(result: Mapping[str, Any], request: GenerationRequest) -> tuple[SampledToken, ...]:
    """The model's own log probabilities, before any sampler setting."""
    pieces = request.tokenizer.get_id_to_piece_list(include_special_tokens=True)
    logprobs = torch.log_softmax(result["logits"][0].float(), dim=-1)
    best = torch.topk(logprobs, min(request.top_logprobs or 0, logprobs.shape[-1]), dim=-1)

    def text(token_id: int) -> str:
        return pieces[token_id] if token_id < len(pieces) else ""

    out = []
    for row, token_id in enumerate(result["token_ids"][0].tolist()):
        best_row = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        top = tuple((text(one), max(logprob, MIN_LOGPROB)) for one, logprob in best_row)
        out.append(SampledToken(text(token_id), max(float(logprobs[row, token_id]), MIN_LOGPROB), top))
    return tuple(out)
