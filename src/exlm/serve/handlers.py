"""From a request to its reply: in through the gate, translated, run, answered whole or as a stream.

The one place where translation, engine and HTTP meet. Translating is done in threads: two for most requests,
two for those with a grammar, and one for those with large bodies, so that neither of these keeps the others
waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import groupby
from typing import Any, TypeVar

import torch
from starlette.requests import Request
from starlette.responses import Response

from exlm import Tokenizer

from .body import LargeBodyThread, RequestBody
from .chat_prompt import render_chat
from .engine import Engine, LoadedModel, RequestStream
from .errors import APIError, to_api_error
from .generation import GenerationRequest, needs_grammar, to_generation_request
from .limits import ConcurrencyLimiter, Limits
from .metrics import Metrics
from .openai import ResponseBuilder
from .prompts import check_token_count, check_token_ids, tokenize_limit
from .schema import BaseRequest, ChatRequest, DetokenizeRequest, TokenizeRequest
from .sse import (
    DONE,
    KEEP_ALIVE,
    KEEP_ALIVE_SECONDS,
    EventStreamResponse,
    JsonResponse,
    sse_event,
    unless_disconnected,
)

T = TypeVar("T")

EARLY_ERROR_SECONDS = 1.0
"""How long a stream waits for a refusal before it begins: then errors can only be events."""

log = logging.getLogger(__name__)


class RequestHandlers:
    """Replies to requests, within bounds."""

    def __init__(
        self, engine: Engine, bounds: Limits, metrics: Metrics, threads: LargeBodyThread, shared: bool = False
    ) -> None:
        """`shared` is whether there are several callers to be fair to; `threads` is closed by its owner."""
        self.engine, self.bounds, self.metrics, self.threads = engine, bounds, metrics, threads
        self.limiter = ConcurrencyLimiter(bounds.requests, "requests", shared)
        self._grammar_limiter = ConcurrencyLimiter(bounds.grammars, "schemas and grammars", shared)
        self._prompt_pool = ThreadPoolExecutor(2, thread_name_prefix="exlm-translate")
        self._grammar_pool = ThreadPoolExecutor(2, thread_name_prefix="exlm-grammar")

    def close(self) -> None:
        """Let the threads go."""
        for pool in (self._prompt_pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def generate(self, request: Request, asked: BaseRequest, salt: str) -> Response:
        """The reply to a request to generate; `salt` tells callers, and what is cached for them, apart."""
        hosted = self.engine.find(asked.model)
        with ExitStack() as stack:
            stack.enter_context(self.limiter.slot(salt))
            stack.enter_context(hosted.request_in_flight())
            answer = ResponseBuilder(
                await unless_disconnected(request, self._prepare(request, asked, hosted, salt))
            )
            run = stack.enter_context(closing(hosted.submit(answer.order)))
            stack.callback(self._count, answer, run)
            if not answer.order.stream:
                return JsonResponse(await unless_disconnected(request, self._complete(answer, run)))
            await unless_disconnected(request, run.wait_for_first(EARLY_ERROR_SECONDS))
            return EventStreamResponse(self._stream(answer, run), stack.pop_all().close)

    async def tokenize(self, request: Request, asked: TokenizeRequest, salt: str) -> dict[str, Any]:
        """The tokens of a text, or of a conversation as the model's chat template writes it."""
        host = self.engine.find(asked.model).info
        if (asked.text is None) == (asked.messages is None):
            raise APIError(422, "Give either text or messages.", param="text")
        most = tokenize_limit(host.max_seq_len)
        refusal = APIError(422, f"The text has more than {most} tokens: ask in parts.", param="text")

        def work() -> list[int]:
            text, special = asked.text, asked.encode_special_tokens
            if asked.messages is not None:
                chat = ChatRequest(messages=asked.messages)
                text, special = render_chat(chat, host.tokenizer, host.name).text, True
            check_token_count(text or "", host.tokenizer, most, special, refusal)
            ids = host.tokenizer.encode(text or "", add_bos=asked.add_bos, encode_special_tokens=special)
            return [int(number) for number in ids[0].tolist()]

        with self.limiter.slot(salt):
            tokens = await self._run_in_pool(request, work)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": host.max_seq_len}

    async def detokenize(self, request: Request, asked: DetokenizeRequest, salt: str) -> dict[str, Any]:
        """The text of tokens."""
        host = self.engine.find(asked.model).info

        def work() -> str:
            if (found := len(asked.tokens)) > (most := tokenize_limit(host.max_seq_len)):
                raise APIError(
                    422, f"At most {most} tokens are taken at a time, found {found}.", param="tokens"
                )
            check_token_ids(asked.tokens, host.vocab_size, "tokens")
            if not asked.decode_special_tokens:
                return str(host.tokenizer.decode(torch.tensor(asked.tokens, dtype=torch.long)))
            return _decode_with_special_tokens(host.tokenizer, asked.tokens)

        with self.limiter.slot(salt):
            return {"text": await self._run_in_pool(request, work)}

    async def _prepare(
        self, request: Request, asked: BaseRequest, hosted: LoadedModel, salt: str
    ) -> GenerationRequest:
        def work() -> GenerationRequest:
            return to_generation_request(asked, hosted.info, self.bounds, salt)

        if not needs_grammar(asked):
            return await self._run_in_pool(request, work)
        with self._grammar_limiter.slot(salt):
            return await asyncio.get_running_loop().run_in_executor(self._grammar_pool, work)

    async def _run_in_pool(self, request: Request, work: Callable[[], T]) -> T:
        body: RequestBody = request.state.body
        if body.large:
            return await self.threads.run(work)
        return await asyncio.get_running_loop().run_in_executor(self._prompt_pool, work)

    async def _complete(self, answer: ResponseBuilder, run: RequestStream) -> dict[str, Any]:
        while not answer.done:
            answer.push(*await run.next())
        return answer.body()

    async def _stream(self, answer: ResponseBuilder, run: RequestStream) -> AsyncIterator[bytes]:
        """A stream, from the first word to the last; a sign of life where there is long nothing to say."""
        for told in answer.start_events():
            yield sse_event(told)
        try:
            while not answer.done:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        place, piece = await run.next()
                except TimeoutError:
                    yield KEEP_ALIVE
                    continue
                if told_now := answer.push(place, piece):
                    yield b"".join(map(sse_event, told_now))
        except Exception as error:
            log.warning("A stream ended early: %s", error)
            yield sse_event(to_api_error(error).body)
            return
        for told in answer.final_events():
            yield sse_event(told)
        yield DONE

    def _count(self, answer: ResponseBuilder, run: RequestStream) -> None:
        self.metrics.count_tokens(answer.order.model, run.token_counts())
        self.metrics.observe_request(answer)


def _decode_with_special_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of every token, also of the one that pads: in many models it is what ends a turn."""
    stream, pad = tokenizer.detokenizer(decode_special_tokens=True), tokenizer.pad_token_id
    shown = tokenizer.extended_id_to_piece.get(pad, "")
    parts: list[str] = []
    for padding, group in groupby(tokens, key=lambda number: bool(shown) and number == pad):
        run = list(group)
        parts.append(stream.flush() + shown * len(run) if padding else stream.feed(run))
    return "".join(parts) + stream.flush()
