"""From results to replies: whole answers and the events of a stream, in the OpenAI API's words.

Both come from the same place: an `Answer` is told piece by piece what each text became. It knows no HTTP and
no engine, so that a batch file is answered by the same code.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .generation import GenerationRequest
from .output_parser import ContentDelta, ReasoningDelta, ResponseEvent
from .tool_formats import MISTRAL
from .tool_parsers import ToolCallArgsDelta, ToolCallStart

FINISH_REASONS = {
    "stop_token": "stop",
    "stop_string": "stop",
    "end_filter": "stop",
    "max_new_tokens": "length",
}
MIN_LOGPROB = -9999.0
"""What the API calls the logarithm of nothing."""


@dataclass(frozen=True)
class SampledToken:
    """A token, its logarithmic probability, and the likeliest ones with theirs."""

    text: str
    logprob: float
    top_logprobs: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class FinishInfo:
    """How a text ended, and what it took."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    seconds: tuple[float, float, float]
    """Waiting, reading the prompt, generating."""


@dataclass(frozen=True)
class OutputDelta:
    """What one result adds to a text."""

    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    finish: FinishInfo | None = None


def output_delta(result: Mapping[str, Any], order: GenerationRequest) -> OutputDelta | None:
    """What a result adds; None for one that is not about text. The error of a job that failed is raised."""
    if result["stage"] != "streaming":
        return None
    if "error" in result:
        raise result["error"]
    tokens: tuple[SampledToken, ...] = ()
    if order.top_logprobs is not None and "logits" in result:
        tokens = _sampled_tokens(result, order)
    end = None
    if result["eos"]:
        end = FinishInfo(
            reason=FINISH_REASONS[result["eos_reason"]],
            prompt_tokens=result["prompt_tokens"],
            cached_tokens=result["cached_tokens"],
            new_tokens=result["new_tokens"],
            accepted_draft_tokens=result.get("accepted_draft_tokens", 0),
            rejected_draft_tokens=result.get("rejected_draft_tokens", 0),
            seconds=(result["time_enqueued"], result["time_prefill"], result["time_generate"]),
        )
    text = result.get("text", "")
    return OutputDelta(text, tokens, end) if text or tokens or end else None


class ResponseBuilder:
    """The reply to one request."""

    def __init__(
        self, order: GenerationRequest, response_id: str | None = None, created: int | None = None
    ) -> None:
        """`identity` and `created` are made up unless given."""
        prefix = "chatcmpl-" if order.kind == "chat" else "cmpl-"
        self.order = order
        self.id = response_id or prefix + uuid.uuid4().hex
        self.created = int(time.time()) if created is None else created
        kind = _ChatChoiceBuilder if order.kind == "chat" else _CompletionChoiceBuilder
        self._choices: list[_ChatChoiceBuilder | _CompletionChoiceBuilder] = [
            kind(place, order) for place in range(len(order.job_arguments))
        ]

    @property
    def done(self) -> bool:
        """Whether every text has ended."""
        return all(choice.finish is not None for choice in self._choices)

    def start_events(self) -> list[dict[str, Any]]:
        """The events a stream begins with."""
        return [self._event(choice.start()) for choice in self._choices if choice.start()]

    def push(self, index: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Add to a text; the events that tell of it."""
        return [self._event(told) for told in self._choices[index].push(delta)]

    def final_events(self) -> list[dict[str, Any]]:
        """The events a stream ends with."""
        if not self.order.include_usage:
            return []
        return [{**self._event(None), "usage": self.usage(), "timings": self.timings()}]

    def body(self) -> dict[str, Any]:
        """The whole reply."""
        return {
            "id": self.id,
            "object": "chat.completion" if self.order.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.order.model,
            "choices": [choice.body() for choice in self._choices],
            "usage": self.usage(),
            "timings": self.timings(),
        }

    def usage(self) -> dict[str, Any]:
        """Tokens; a prompt that has several answers counts once."""
        ends = [choice.finish for choice in self._choices if choice.finish is not None]
        firsts = ends[:: self.order.n]
        prompt, new = sum(end.prompt_tokens for end in firsts), sum(end.new_tokens for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(end.accepted_draft_tokens for end in ends),
                "rejected_prediction_tokens": sum(end.rejected_draft_tokens for end in ends),
            },
        }

    def timings(self) -> dict[str, float]:
        """Seconds."""
        ends = [choice.finish for choice in self._choices if choice.finish is not None]
        queue, prompt, generation = (max((end.seconds[i] for end in ends), default=0.0) for i in range(3))
        speed = sum(end.new_tokens for end in ends) / max(generation, 1e-9)
        return {
            "queue_seconds": round(queue, 6),
            "prompt_seconds": round(prompt, 6),
            "generation_seconds": round(generation, 6),
            "tokens_per_second": round(speed, 3),
        }

    def _event(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.order.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.order.model,
            "choices": [] if choice is None else [choice],
        }


class _CompletionChoiceBuilder:
    """One continuation."""

    def __init__(self, place: int, order: GenerationRequest) -> None:
        self.index, self.order = place, order
        self.finish: FinishInfo | None = None
        self._texts = [order.echo[place]] if order.echo else [""]
        self._tokens: list[tuple[SampledToken, int]] = []  # and where in the text each begins
        self._length = len(self._texts[0])

    def start(self) -> dict[str, Any] | None:
        return self._choice(self._texts[0], [], None) if self._texts[0] else None

    def push(self, delta: OutputDelta) -> list[dict[str, Any]]:
        tokens = self._with_offsets(delta)
        self._texts.append(delta.text)
        self._tokens += tokens
        self._length += len(delta.text)
        self.finish = delta.finish
        return [self._choice(delta.text, tokens, delta.finish.reason if delta.finish else None)]

    def body(self) -> dict[str, Any]:
        return self._choice("".join(self._texts), self._tokens, self.finish.reason if self.finish else None)

    def _with_offsets(self, piece: OutputDelta) -> list[tuple[SampledToken, int]]:
        """Tokens and their places, within what a piece adds: they may stand for more than it shows.

        Such are a healed token, one that is hidden, and the parts of a character.
        """
        out, place, end = [], self._length, self._length + len(piece.text)
        for token in piece.tokens:
            out.append((token, min(place, end)))
            place += len(token.text)
        return out

    def _choice(
        self, text: str, tokens: list[tuple[SampledToken, int]], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self.order.top_logprobs is not None:
            logprobs = {
                "tokens": [token.text for token, _ in tokens],
                "token_logprobs": [token.logprob for token, _ in tokens],
                "top_logprobs": [_top_logprobs_with_sampled(token) for token, _ in tokens],
                "text_offset": [place for _, place in tokens],
            }
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class _ChatChoiceBuilder:
    """One answer of a chat."""

    def __init__(self, place: int, order: GenerationRequest) -> None:
        self.index, self.order = place, order
        self.finish: FinishInfo | None = None
        self._parser = order.parser()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []
        self._tokens: list[SampledToken] = []
        self._unsent_tokens: list[SampledToken] = []

    def start(self) -> dict[str, Any] | None:
        return self._chunk_choice({"role": "assistant", "content": ""}, None)

    def push(self, delta: OutputDelta) -> list[dict[str, Any]]:
        parts = self._parser.feed(delta.text)
        if delta.finish is not None:
            parts += self._parser.end()
        self._tokens += delta.tokens
        self._unsent_tokens += delta.tokens
        told = [self._chunk_choice(self._apply(part), None) for part in parts]
        self.finish = delta.finish
        if self.finish is not None:
            told.append(self._chunk_choice({}, self._finish_reason()))
        return told

    def body(self) -> dict[str, Any]:
        said, thought = "".join(self._content), "".join(self._reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said if said or not self._tool_calls else None,
        }
        if thought:
            message["reasoning_content"] = thought
        if self._tool_calls:
            message["tool_calls"] = self._tool_calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": _chat_logprobs(self._tokens) if self.order.top_logprobs is not None else None,
            "finish_reason": self._finish_reason(),
        }

    def _finish_reason(self) -> str:
        assert self.finish is not None
        return "tool_calls" if self._tool_calls and self.finish.reason == "stop" else self.finish.reason

    def _apply(self, event: ResponseEvent) -> dict[str, Any]:
        """Take a part into the message; what a stream says of it."""
        match event:
            case ContentDelta(text):
                self._content.append(text)
                return {"content": text}
            case ReasoningDelta(text):
                self._reasoning.append(text)
                return {"reasoning_content": text}
            case ToolCallStart(index, name):
                call = {
                    "id": self._new_call_id(),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
                self._tool_calls.append(call)
                return {"tool_calls": [{"index": index, **call, "function": {"name": name, "arguments": ""}}]}
            case ToolCallArgsDelta(index, text):
                self._tool_calls[index]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _new_call_id(self) -> str:
        """A new name for a call; Mistral's templates insist on nine letters."""
        style = self.order.chat.tool_format if self.order.chat else None
        return uuid.uuid4().hex[:9] if style == MISTRAL else f"call_{uuid.uuid4().hex[:24]}"

    def _chunk_choice(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        told: dict[str, Any] = {"index": self.index, "delta": delta, "finish_reason": reason}
        if self.order.top_logprobs is not None and self._unsent_tokens:
            told["logprobs"] = _chat_logprobs(self._unsent_tokens)
            self._unsent_tokens = []
        return told


def _top_logprobs_with_sampled(token: SampledToken) -> dict[str, float]:
    """The likeliest tokens by their texts, and the one that was taken, as clients look it up there."""
    top = dict(token.top_logprobs)
    top.setdefault(token.text, token.logprob)
    return top


def _chat_logprobs(tokens: list[SampledToken]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_logprob_entry(token.text, token.logprob),
                "top_logprobs": [_logprob_entry(*one) for one in token.top_logprobs],
            }
            for token in tokens
        ]
    }


def _logprob_entry(text: str, logprob: float) -> dict[str, Any]:
    whole = "\ufffd" not in text  # a part of a character has bytes, but they are not known here
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def _sampled_tokens(result: Mapping[str, Any], order: GenerationRequest) -> tuple[SampledToken, ...]:
    """The model's own probabilities, before any sampler setting."""
    pieces = order.tokenizer.get_id_to_piece_list(include_special_tokens=True)
    logs = torch.log_softmax(result["logits"][0].float(), dim=-1)
    best = torch.topk(logs, min(order.top_logprobs or 0, logs.shape[-1]), dim=-1)

    def text(number: int) -> str:
        return pieces[number] if number < len(pieces) else ""

    out = []
    for row, number in enumerate(result["token_ids"][0].tolist()):
        tops = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        top = tuple((text(one), max(share, MIN_LOGPROB)) for one, share in tops)
        out.append(SampledToken(text(number), max(float(logs[row, number]), MIN_LOGPROB), top))
    return tuple(out)
