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

from .calls import Argued, Called
from .parse import Part, Said, Thought
from .styles import MISTRAL
from .translate import Order

FINISHED = {
    "stop_token": "stop",
    "stop_string": "stop",
    "end_filter": "stop",
    "max_new_tokens": "length",
}
LEAST = -9999.0
"""What the API calls the logarithm of nothing."""


@dataclass(frozen=True)
class Token:
    """A token, its logarithmic probability, and the likeliest ones with theirs."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class End:
    """How a text ended, and what it took."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    accepted: int
    rejected: int
    seconds: tuple[float, float, float]
    """Waiting, reading the prompt, generating."""


@dataclass(frozen=True)
class Piece:
    """What one result adds to a text."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    end: End | None = None


def piece_of(result: Mapping[str, Any], order: Order) -> Piece | None:
    """What a result adds; None for one that is not about text. The error of a job that failed is raised."""
    if result["stage"] != "streaming":
        return None
    if "error" in result:
        raise result["error"]
    tokens: tuple[Token, ...] = ()
    if order.top is not None and "logits" in result:
        tokens = _shares(result, order)
    end = None
    if result["eos"]:
        end = End(
            reason=FINISHED[result["eos_reason"]],
            prompt_tokens=result["prompt_tokens"],
            cached_tokens=result["cached_tokens"],
            new_tokens=result["new_tokens"],
            accepted=result.get("accepted_draft_tokens", 0),
            rejected=result.get("rejected_draft_tokens", 0),
            seconds=(result["time_enqueued"], result["time_prefill"], result["time_generate"]),
        )
    text = result.get("text", "")
    return Piece(text, tokens, end) if text or tokens or end else None


class Answer:
    """The reply to one request."""

    def __init__(self, order: Order, identity: str | None = None, created: int | None = None) -> None:
        """`identity` and `created` are made up unless given."""
        prefix = "chatcmpl-" if order.kind == "chat" else "cmpl-"
        self.order = order
        self.id = identity or prefix + uuid.uuid4().hex
        self.created = int(time.time()) if created is None else created
        kind = _Chat if order.kind == "chat" else _Text
        self._choices: list[_Chat | _Text] = [kind(place, order) for place in range(len(order.jobs))]

    @property
    def done(self) -> bool:
        """Whether every text has ended."""
        return all(choice.end is not None for choice in self._choices)

    def first(self) -> list[dict[str, Any]]:
        """The events a stream begins with."""
        return [self._event(choice.first()) for choice in self._choices if choice.first()]

    def push(self, place: int, piece: Piece) -> list[dict[str, Any]]:
        """Add to a text; the events that tell of it."""
        return [self._event(told) for told in self._choices[place].push(piece)]

    def last(self) -> list[dict[str, Any]]:
        """The events a stream ends with."""
        if not self.order.usage:
            return []
        return [{**self._event(None), "usage": self.usage(), "timings": self.timings()}]

    def body(self) -> dict[str, Any]:
        """The whole reply."""
        return {
            "id": self.id,
            "object": "chat.completion" if self.order.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.order.model,
            "choices": [choice.whole() for choice in self._choices],
            "usage": self.usage(),
            "timings": self.timings(),
        }

    def usage(self) -> dict[str, Any]:
        """Tokens; a prompt that has several answers counts once."""
        ends = [choice.end for choice in self._choices if choice.end is not None]
        firsts = ends[:: self.order.n]
        prompt, new = sum(end.prompt_tokens for end in firsts), sum(end.new_tokens for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(end.accepted for end in ends),
                "rejected_prediction_tokens": sum(end.rejected for end in ends),
            },
        }

    def timings(self) -> dict[str, float]:
        """Seconds."""
        ends = [choice.end for choice in self._choices if choice.end is not None]
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


class _Text:
    """One continuation."""

    def __init__(self, place: int, order: Order) -> None:
        self.place, self.order = place, order
        self.end: End | None = None
        self._texts = [order.prefixes[place]] if order.prefixes else [""]
        self._tokens: list[tuple[Token, int]] = []  # and where in the text each begins
        self._length = len(self._texts[0])

    def first(self) -> dict[str, Any] | None:
        return self._told(self._texts[0], [], None) if self._texts[0] else None

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        tokens = self._placed(piece)
        self._texts.append(piece.text)
        self._tokens += tokens
        self._length += len(piece.text)
        self.end = piece.end
        return [self._told(piece.text, tokens, piece.end.reason if piece.end else None)]

    def whole(self) -> dict[str, Any]:
        return self._told("".join(self._texts), self._tokens, self.end.reason if self.end else None)

    def _placed(self, piece: Piece) -> list[tuple[Token, int]]:
        """Tokens and their places, within what a piece adds: they may stand for more than it shows.

        Such are a healed token, one that is hidden, and the parts of a character.
        """
        out, place, end = [], self._length, self._length + len(piece.text)
        for token in piece.tokens:
            out.append((token, min(place, end)))
            place += len(token.text)
        return out

    def _told(self, text: str, tokens: list[tuple[Token, int]], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self.order.top is not None:
            logprobs = {
                "tokens": [token.text for token, _ in tokens],
                "token_logprobs": [token.logprob for token, _ in tokens],
                "top_logprobs": [_with_own(token) for token, _ in tokens],
                "text_offset": [place for _, place in tokens],
            }
        return {"index": self.place, "text": text, "logprobs": logprobs, "finish_reason": reason}


class _Chat:
    """One answer of a chat."""

    def __init__(self, place: int, order: Order) -> None:
        self.place, self.order = place, order
        self.end: End | None = None
        self._parser = order.parser()
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._tokens: list[Token] = []
        self._untold: list[Token] = []

    def first(self) -> dict[str, Any] | None:
        return self._delta({"role": "assistant", "content": ""}, None)

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        parts = self._parser.feed(piece.text)
        if piece.end is not None:
            parts += self._parser.end()
        self._tokens += piece.tokens
        self._untold += piece.tokens
        told = [self._delta(self._add(part), None) for part in parts]
        self.end = piece.end
        if self.end is not None:
            told.append(self._delta({}, self._reason()))
        return told

    def whole(self) -> dict[str, Any]:
        said, thought = "".join(self._said), "".join(self._thought)
        message: dict[str, Any] = {"role": "assistant", "content": said if said or not self._calls else None}
        if thought:
            message["reasoning_content"] = thought
        if self._calls:
            message["tool_calls"] = self._calls
        return {
            "index": self.place,
            "message": message,
            "logprobs": _told_tokens(self._tokens) if self.order.top is not None else None,
            "finish_reason": self._reason(),
        }

    def _reason(self) -> str:
        assert self.end is not None
        return "tool_calls" if self._calls and self.end.reason == "stop" else self.end.reason

    def _add(self, part: Part) -> dict[str, Any]:
        """Take a part into the message; what a stream says of it."""
        match part:
            case Said(text):
                self._said.append(text)
                return {"content": text}
            case Thought(text):
                self._thought.append(text)
                return {"reasoning_content": text}
            case Called(index, name):
                call = {
                    "id": self._call_id(),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
                self._calls.append(call)
                return {"tool_calls": [{"index": index, **call, "function": {"name": name, "arguments": ""}}]}
            case Argued(index, text):
                self._calls[index]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call_id(self) -> str:
        """A new name for a call; Mistral's templates insist on nine letters."""
        style = self.order.talk.style if self.order.talk else None
        return uuid.uuid4().hex[:9] if style == MISTRAL else f"call_{uuid.uuid4().hex[:24]}"

    def _delta(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        told: dict[str, Any] = {"index": self.place, "delta": delta, "finish_reason": reason}
        if self.order.top is not None and self._untold:
            told["logprobs"] = _told_tokens(self._untold)
            self._untold = []
        return told


def _with_own(token: Token) -> dict[str, float]:
    """The likeliest tokens by their texts, and the one that was taken, as clients look it up there."""
    top = dict(token.top)
    top.setdefault(token.text, token.logprob)
    return top


def _told_tokens(tokens: list[Token]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_told_token(token.text, token.logprob),
                "top_logprobs": [_told_token(*one) for one in token.top],
            }
            for token in tokens
        ]
    }


def _told_token(text: str, logprob: float) -> dict[str, Any]:
    whole = "\ufffd" not in text  # a part of a character has bytes, but they are not known here
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def _shares(result: Mapping[str, Any], order: Order) -> tuple[Token, ...]:
    """The model's own probabilities, before any sampler setting."""
    pieces = order.tokenizer.get_id_to_piece_list(include_special_tokens=True)
    logs = torch.log_softmax(result["logits"][0].float(), dim=-1)
    best = torch.topk(logs, min(order.top or 0, logs.shape[-1]), dim=-1)

    def text(number: int) -> str:
        return pieces[number] if number < len(pieces) else ""

    out = []
    for row, number in enumerate(result["token_ids"][0].tolist()):
        tops = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        top = tuple((text(one), max(share, LEAST)) for one, share in tops)
        out.append(Token(text(number), max(float(logs[row, number]), LEAST), top))
    return tuple(out)
