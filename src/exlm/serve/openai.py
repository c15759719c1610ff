"""The OpenAI dialect: the routes and the responses of `/v1/chat/completions` and `/v1/completions`.

Complete responses and streams come from the same writer, so the events of a stream add up to exactly the complete
response. Requests in this form are turned into a `GenerationRequest` by `generation`.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar

from .errors import to_api_error
from .generation import FinishInfo, GenerationRequest, OutputDelta, TokenLogprobs, make_output_parser
from .output_parser import ContentDelta, ReasoningDelta, ResponseEvent, ToolCallArgsDelta, ToolCallStart
from .responses import EVENT_STREAM, Endpoint, sse_event
from .schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChatRequest,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
    ErrorReply,
    FinishReason,
    FunctionDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    ToolCallReply,
    TopLogprob,
    Usage,
)
from .tool_formats import MISTRAL


def response_writer(
    request: GenerationRequest, unique_id: str | None = None, created: int | None = None
) -> ChatWriter | CompletionWriter:
    """The writer for a request made by `to_generation_request`."""
    writer = CompletionWriter if request.chat is None else ChatWriter
    return writer(request, unique_id, created)


class _CompletionChoiceState:
    """One continuation while it is generated."""

    def __init__(self, index: int, request: GenerationRequest) -> None:
        self.index, self.request = index, request
        self.finish: FinishInfo | None = None
        self._texts = [request.echo[index]] if request.echo else [""]
        self._tokens: list[tuple[TokenLogprobs, int]] = []  # each with its offset in the text
        self._length = len(self._texts[0])

    def start(self) -> CompletionChoice | None:
        return self._to_choice(self._texts[0], [], None) if self._texts[0] else None

    def push(self, delta: OutputDelta) -> list[CompletionChoice]:
        tokens = self._with_offsets(delta)
        self._texts.append(delta.text)
        self._tokens += tokens
        self._length += len(delta.text)
        self.finish = delta.finish
        return [self._to_choice(delta.text, tokens, delta.finish)]

    def body(self) -> CompletionChoice:
        return self._to_choice("".join(self._texts), self._tokens, self.finish)

    def _with_offsets(self, delta: OutputDelta) -> list[tuple[TokenLogprobs, int]]:
        """Tokens with their offsets, which stay within the delta's text.

        Tokens may stand for more text than a delta shows: a healed token, a hidden special token, the bytes
        of one character.
        """
        out, offset, end = [], self._length, self._length + len(delta.text)
        for token in delta.tokens:
            out.append((token, min(offset, end)))
            offset += len(token.text)
        return out

    def _to_choice(
        self, text: str, tokens: list[tuple[TokenLogprobs, int]], finish: FinishInfo | None
    ) -> CompletionChoice:
        logprobs: CompletionLogprobs | None = None
        if self.request.top_logprobs is not None:
            logprobs = {
                "tokens": [token.text for token, _ in tokens],
                "token_logprobs": [token.logprob for token, _ in tokens],
                "top_logprobs": [_top_logprobs_with_sampled(token) for token, _ in tokens],
                "text_offset": [offset for _, offset in tokens],
            }
        reason = finish.reason if finish is not None else None
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class _ChatChoiceState:
    """One answer of a chat while it is generated."""

    def __init__(self, index: int, request: GenerationRequest) -> None:
        self.index, self.request = index, request
        self.finish: FinishInfo | None = None
        self._parser = make_output_parser(request)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCallReply] = []
        self._tokens: list[TokenLogprobs] = []
        self._unsent_tokens: list[TokenLogprobs] = []

    def start(self) -> ChatChunkChoice:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def push(self, delta: OutputDelta) -> list[ChatChunkChoice]:
        events = self._parser.feed(delta.text)
        if delta.finish is not None:
            events += self._parser.end()
        self._tokens += delta.tokens
        self._unsent_tokens += delta.tokens
        chunks = [self._chunk(self._apply(event), None) for event in events]
        self.finish = delta.finish
        if self.finish is not None:
            chunks.append(self._chunk({}, self._finish_reason()))
        return chunks

    def body(self) -> ChatChoice:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: ChatMessage = {"role": "assistant", "content": content if content or not self._tool_calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._tool_calls:
            message["tool_calls"] = self._tool_calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": _chat_logprobs(self._tokens) if self.request.top_logprobs is not None else None,
            "finish_reason": self._finish_reason(),
        }

    def _finish_reason(self) -> FinishReason:
        assert self.finish is not None
        return "tool_calls" if self._tool_calls and self.finish.reason == "stop" else self.finish.reason

    def _apply(self, event: ResponseEvent) -> ChatDelta:
        """Add an event to the message; returns its delta in a stream."""
        match event:
            case ContentDelta(text):
                self._content.append(text)
                return {"content": text}
            case ReasoningDelta(text):
                self._reasoning.append(text)
                return {"reasoning_content": text}
            case ToolCallStart(index, name):
                call_id = self._new_call_id()
                self._tool_calls.append(
                    {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                )
                function: FunctionDelta = {"name": name, "arguments": ""}
                call: ToolCallDelta = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case ToolCallArgsDelta(index, text):
                self._tool_calls[index]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _new_call_id(self) -> str:
        """Mistral's templates insist on ids of nine letters and digits."""
        tool_format = self.request.chat.tool_format if self.request.chat else None
        return uuid.uuid4().hex[:9] if tool_format == MISTRAL else f"call_{uuid.uuid4().hex[:24]}"

    def _chunk(self, delta: ChatDelta, reason: FinishReason | None) -> ChatChunkChoice:
        chunk: ChatChunkChoice = {"index": self.index, "delta": delta, "finish_reason": reason}
        if self.request.top_logprobs is not None and self._unsent_tokens:
            chunk["logprobs"] = _chat_logprobs(self._unsent_tokens)
            self._unsent_tokens = []
        return chunk


class _Writer:
    """The parts that the writers of chats and of completions share."""

    MEDIA_TYPE: ClassVar[str] = EVENT_STREAM
    STREAM_END: ClassVar[bytes] = b"data: [DONE]\n\n"
    KEEP_ALIVE: ClassVar[bytes] = b": waiting\n\n"  # a comment, which clients ignore
    ID_PREFIX: ClassVar[str]
    CHOICE: ClassVar[type[_ChatChoiceState] | type[_CompletionChoiceState]]

    def __init__(self, request: GenerationRequest, unique_id: str | None = None, created: int | None = None) -> None:
        """A random id and the current time are used unless given."""
        self.request = request
        self.id = self.ID_PREFIX + (unique_id or uuid.uuid4().hex)
        self.created = int(time.time()) if created is None else created
        self._choices: list[Any] = [self.CHOICE(index, request) for index in range(len(request.job_arguments))]

    @property
    def done(self) -> bool:
        return len(self._finished()) == len(self._choices)

    def start_events(self) -> list[Any]:
        return [self._event([start]) for choice in self._choices if (start := choice.start())]

    def push(self, index: int, delta: OutputDelta) -> list[Any]:
        return [self._event([choice]) for choice in self._choices[index].push(delta)]

    def final_events(self) -> list[Any]:
        """The event with the usage, if the request asks for it."""
        if not self.request.include_usage:
            return []
        return [{**self._event([]), "usage": self.usage(), "timings": self.timings()}]

    @staticmethod
    def encode(event: Any) -> bytes:
        return sse_event(event)

    @staticmethod
    def error_event(error: Exception) -> ErrorReply:
        """The error object, as an event of its own."""
        return to_api_error(error).body

    def usage(self) -> Usage:
        """Token counts; a prompt with several answers counts once."""
        finished = self._finished()
        firsts = finished[:: self.request.n]
        prompt, new = sum(one.prompt_tokens for one in firsts), sum(one.new_tokens for one in finished)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(one.accepted_draft_tokens for one in finished),
                "rejected_prediction_tokens": sum(one.rejected_draft_tokens for one in finished),
            },
        }

    def timings(self) -> Timings:
        """Times of the slowest text, and tokens per second of all."""
        finished = self._finished()
        queue, prompt, generation = (max((one.seconds[i] for one in finished), default=0.0) for i in range(3))
        speed = sum(one.new_tokens for one in finished) / max(generation, 1e-9)
        return {
            "queue_seconds": round(queue, 6),
            "prompt_seconds": round(prompt, 6),
            "generation_seconds": round(generation, 6),
            "tokens_per_second": round(speed, 3),
        }

    def _finished(self) -> list[FinishInfo]:
        return [choice.finish for choice in self._choices if choice.finish is not None]

    def _event(self, choices: list[Any]) -> Any:
        raise NotImplementedError


class ChatWriter(_Writer):
    """Writes the response to a chat."""

    ID_PREFIX = "chatcmpl-"
    CHOICE = _ChatChoiceState

    def body(self) -> ChatReply:
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.request.model,
            "choices": [choice.body() for choice in self._choices],
            "usage": self.usage(),
            "timings": self.timings(),
        }

    def _event(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }


class CompletionWriter(_Writer):
    """Writes the response to a completion."""

    ID_PREFIX = "cmpl-"
    CHOICE = _CompletionChoiceState

    def body(self) -> CompletionReply:
        return {
            **self._event([choice.body() for choice in self._choices]),
            "usage": self.usage(),
            "timings": self.timings(),
        }

    def _event(self, choices: list[CompletionChoice]) -> CompletionReply:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }


def _top_logprobs_with_sampled(token: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens by their texts, with the sampled one, as clients look it up there."""
    top = dict(token.top_logprobs)
    top.setdefault(token.text, token.logprob)
    return top


def _chat_logprobs(tokens: list[TokenLogprobs]) -> ChatLogprobs:
    entries: list[TokenLogprob] = [
        {
            **_logprob_entry(token.text, token.logprob),
            "top_logprobs": [_logprob_entry(*one) for one in token.top_logprobs],
        }
        for token in tokens
    ]
    return {"content": entries}


def _logprob_entry(text: str, logprob: float) -> TopLogprob:
    is_complete = "\ufffd" not in text  # the bytes of a part of a character are not known here
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_complete else None}


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        path="/v1/chat/completions",
        name="chat",
        description="Answer a conversation, at once or as a stream of events.",
        request_type=ChatRequest,
        response_type=ChatReply,
        event_type=ChatChunk,
        to_openai=lambda request: request,
        writer=ChatWriter,
    ),
    Endpoint(
        path="/v1/completions",
        name="complete",
        description="Continue a text, or several.",
        request_type=CompletionRequest,
        response_type=CompletionReply,
        event_type=CompletionReply,
        to_openai=lambda request: request,
        writer=CompletionWriter,
    ),
)
