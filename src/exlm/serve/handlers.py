"""Request handlers of the routes that generate or tokenise: from a parsed body to the response.

A request gets a slot of the concurrency limiter, is turned into a `GenerationRequest` in a thread, runs in
the engine, and is answered with a complete response or a stream. Two threads prepare most requests, two
others those with a grammar to compile, and one those with large bodies, so that neither grammars nor large
bodies delay other requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import groupby
from typing import Any, TypeVar

import torch
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from exlm import Tokenizer

from .chat_prompt import render_chat
from .engine import Engine, RequestStream, ServedModel
from .errors import APIError
from .generation import (
    GenerationRequest,
    check_token_ids,
    exceeds_token_count,
    needs_grammar,
    to_generation_request,
    tokenize_limit,
)
from .limits import FairLimiter, Limits
from .middleware import Caller, RequestBody
from .monitoring import Metrics
from .responses import Endpoint, JsonResponse, ResponseWriter
from .schema import ChatRequest, DetokenizeReply, DetokenizeRequest, OpenAIRequest, TokenizeReply, TokenizeRequest

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

KEEP_ALIVE_SECONDS = 15.0
EARLY_ERROR_SECONDS = 1.0
"""How long a stream waits for an error before it starts: afterwards errors can only be events."""

log = logging.getLogger(__name__)


async def parse_body(request: Request, kind: type[M]) -> M:
    """The request's body, parsed and validated as `kind`."""
    body: RequestBody = request.state.body
    return await body.parse(kind, lambda parsed: parsed)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


class RequestHandlers:
    """Handles requests within the server's limits."""

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics, shared: bool) -> None:
        """`shared`: several callers share the limits fairly."""
        self.engine, self.limits, self.metrics = engine, limits, metrics
        self.limiter = FairLimiter(limits.requests, "requests", shared)
        self._grammar_limiter = FairLimiter(limits.grammars, "schemas and grammars", shared)
        self._prompt_pool = ThreadPoolExecutor(2, thread_name_prefix="exlm-prompt")
        self._grammar_pool = ThreadPoolExecutor(2, thread_name_prefix="exlm-grammar")

    def close(self) -> None:
        """End the threads; work that has not started is dropped."""
        for pool in (self._prompt_pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def generation_route(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """The route function of an endpoint that generates text."""

        async def generate(request: Request) -> Response:
            body: RequestBody = request.state.body
            parsed = await body.parse(endpoint.request_type, endpoint.to_openai)
            return await self._generate(request, parsed, endpoint)

        return generate

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        body = await parse_body(request, TokenizeRequest)
        model = self.engine.find(body.model).info
        if (body.text is None) == (body.messages is None):
            raise APIError(422, "Give either text or messages.", param="text")
        limit = tokenize_limit(model.max_seq_len)

        def work() -> list[int]:
            text, special = body.text, body.encode_special_tokens
            if body.messages is not None:
                chat = ChatRequest(messages=body.messages)
                text, special = render_chat(chat, model.tokenizer, model.name).text, True
            if exceeds_token_count(text or "", model.tokenizer, limit, special):
                raise APIError(422, f"The text has more than {limit} tokens: ask in parts.", param="text")
            ids = model.tokenizer.encode(text or "", add_bos=body.add_bos, encode_special_tokens=special)
            return [int(token_id) for token_id in ids[0].tolist()]

        with self.limiter.slot(caller_of(request).salt):
            tokens = await self._run_in_pool(request, work)
        reply: TokenizeReply = {"tokens": tokens, "count": len(tokens), "max_model_len": model.max_seq_len}
        return JsonResponse(reply)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        body = await parse_body(request, DetokenizeRequest)
        model = self.engine.find(body.model).info

        def work() -> str:
            if (found := len(body.tokens)) > (limit := tokenize_limit(model.max_seq_len)):
                raise APIError(422, f"At most {limit} tokens are taken at a time, found {found}.", param="tokens")
            check_token_ids(body.tokens, model.vocab_size, "tokens")
            if not body.decode_special_tokens:
                return str(model.tokenizer.decode(torch.tensor(body.tokens, dtype=torch.long)))
            return _decode_with_special_tokens(model.tokenizer, body.tokens)

        with self.limiter.slot(caller_of(request).salt):
            reply: DetokenizeReply = {"text": await self._run_in_pool(request, work)}
        return JsonResponse(reply)

    async def _generate(self, request: Request, body: OpenAIRequest, endpoint: Endpoint) -> Response:
        model, salt = self.engine.find(body.model), caller_of(request).salt
        with ExitStack() as stack:
            stack.enter_context(self.limiter.slot(salt))
            stack.enter_context(model.request_in_flight())
            prepared = await cancel_on_disconnect(self._prepare(request, body, model, salt), request.receive)
            writer = endpoint.writer(prepared, None, None)
            stream = stack.enter_context(closing(model.submit(prepared)))
            stack.callback(self.metrics.observe_request, stream)
            if not prepared.stream:
                return JsonResponse(await cancel_on_disconnect(_complete(writer, stream), request.receive))
            await cancel_on_disconnect(stream.wait_for_first(EARLY_ERROR_SECONDS), request.receive)
            return EventStreamResponse(_stream(writer, stream), stack.pop_all().close, writer.MEDIA_TYPE)

    async def _prepare(self, request: Request, body: OpenAIRequest, model: ServedModel, salt: str) -> GenerationRequest:
        def work() -> GenerationRequest:
            return to_generation_request(body, model.info, self.limits, salt)

        if not needs_grammar(body):
            return await self._run_in_pool(request, work)
        with self._grammar_limiter.slot(salt):
            return await asyncio.get_running_loop().run_in_executor(self._grammar_pool, work)

    async def _run_in_pool(self, request: Request, work: Callable[[], T]) -> T:
        pool = request.state.body.executor or self._prompt_pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)


async def _complete(writer: ResponseWriter, stream: RequestStream) -> Any:
    while not writer.done:
        writer.push(*await stream.next())
    return writer.body()


async def _stream(writer: ResponseWriter, stream: RequestStream) -> AsyncIterator[bytes]:
    """The response as events, with a keep-alive comment whenever nothing was sent for a while."""
    for event in writer.start_events():
        yield writer.encode(event)
    try:
        while not writer.done:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    index, delta = await stream.next()
            except TimeoutError:
                yield writer.KEEP_ALIVE
                continue
            if events := writer.push(index, delta):
                yield b"".join(map(writer.encode, events))
    except Exception as error:
        log.warning("A stream ended early: %s", error)
        yield writer.encode(writer.error_event(error))
        return
    for event in writer.final_events():
        yield writer.encode(event)
    yield writer.STREAM_END


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


class EventStreamResponse(Response):
    """A stream that ends with its iterator or when the client disconnects; it then calls `close`."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], media_type: str) -> None:
        self.status_code, self.background = 200, None
        self.media_type = media_type
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnected):
                await cancel_on_disconnect(self._send(send), receive)
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def cancel_on_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Await `work`; cancel it and raise ClientDisconnected if the client disconnects before it is done."""
    task, listener = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        both: list[asyncio.Future[Any]] = [task, listener]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _decode_with_special_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of every token, the padding token included: in many models it is also the end of a turn."""
    stream, pad = tokenizer.detokenizer(decode_special_tokens=True), tokenizer.pad_token_id
    pad_text = tokenizer.extended_id_to_piece.get(pad, "")
    parts: list[str] = []
    for is_padding, group in groupby(tokens, key=lambda token_id: bool(pad_text) and token_id == pad):
        run = list(group)
        parts.append(stream.flush() + pad_text * len(run) if is_padding else stream.feed(run))
    return "".join(parts) + stream.flush()
