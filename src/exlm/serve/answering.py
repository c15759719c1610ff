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

from .answer import Answer
from .body import Body, LargeBodies
from .conversation import conversation
from .engine import Engine, Hosted, Run
from .events import DONE, WAITING, WAITING_SECONDS, EventStream, JsonReply, event, unless_gone
from .limits import Bounds, Gate
from .metrics import Metrics
from .problems import Problem, problem_of
from .prompts import check_ids, check_text, countable
from .schema import Asking, ChatRequest, DetokenizeRequest, TokenizeRequest
from .translate import Order, needs_grammar, order_of

T = TypeVar("T")

SETTLE_SECONDS = 1.0
"""How long a stream waits for a refusal before it begins: then errors can only be events."""

log = logging.getLogger(__name__)


class Answering:
    """Replies to requests, within bounds."""

    def __init__(
        self, engine: Engine, bounds: Bounds, metrics: Metrics, threads: LargeBodies, shared: bool = False
    ) -> None:
        """`shared` is whether there are several callers to be fair to; `threads` is closed by its owner."""
        self.engine, self.bounds, self.metrics, self.threads = engine, bounds, metrics, threads
        self.gate = Gate(bounds.requests, "requests", shared)
        self._grammars = Gate(bounds.grammars, "schemas and grammars", shared)
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="exlm-translate")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="exlm-grammar")

    def close(self) -> None:
        """Let the threads go."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    async def reply(self, request: Request, asked: Asking, salt: str) -> Response:
        """The reply to a request to generate; `salt` tells callers, and what is cached for them, apart."""
        hosted = self.engine.find(asked.model)
        with ExitStack() as stack:
            stack.enter_context(self.gate.entered(salt))
            stack.enter_context(hosted.visited())
            answer = Answer(await unless_gone(request, self._translated(request, asked, hosted, salt)))
            run = stack.enter_context(closing(hosted.run(answer.order)))
            stack.callback(self._count, answer, run)
            if not answer.order.stream:
                return JsonReply(await unless_gone(request, self._whole(answer, run)))
            await unless_gone(request, run.settle(SETTLE_SECONDS))
            return EventStream(self._events(answer, run), stack.pop_all().close)

    async def tokenized(self, request: Request, asked: TokenizeRequest, salt: str) -> dict[str, Any]:
        """The tokens of a text, or of a conversation as the model's chat template writes it."""
        host = self.engine.find(asked.model).host
        if (asked.text is None) == (asked.messages is None):
            raise Problem(422, "Give either text or messages.", param="text")
        most = countable(host.length)
        refusal = Problem(422, f"The text has more than {most} tokens: ask in parts.", param="text")

        def work() -> list[int]:
            text, special = asked.text, asked.encode_special_tokens
            if asked.messages is not None:
                chat = ChatRequest(messages=asked.messages)
                text, special = conversation(chat, host.tokenizer, host.name).text, True
            check_text(text or "", host.tokenizer, most, special, refusal)
            ids = host.tokenizer.encode(text or "", add_bos=asked.add_bos, encode_special_tokens=special)
            return [int(number) for number in ids[0].tolist()]

        with self.gate.entered(salt):
            tokens = await self._worked(request, work)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": host.length}

    async def detokenized(self, request: Request, asked: DetokenizeRequest, salt: str) -> dict[str, Any]:
        """The text of tokens."""
        host = self.engine.find(asked.model).host

        def work() -> str:
            if (found := len(asked.tokens)) > (most := countable(host.length)):
                raise Problem(
                    422, f"At most {most} tokens are taken at a time, found {found}.", param="tokens"
                )
            check_ids(asked.tokens, host.vocab, "tokens")
            if not asked.decode_special_tokens:
                return str(host.tokenizer.decode(torch.tensor(asked.tokens, dtype=torch.long)))
            return _spelled(host.tokenizer, asked.tokens)

        with self.gate.entered(salt):
            return {"text": await self._worked(request, work)}

    async def _translated(self, request: Request, asked: Asking, hosted: Hosted, salt: str) -> Order:
        def work() -> Order:
            return order_of(asked, hosted.host, self.bounds, salt)

        if not needs_grammar(asked):
            return await self._worked(request, work)
        with self._grammars.entered(salt):
            return await asyncio.get_running_loop().run_in_executor(self._slow, work)

    async def _worked(self, request: Request, work: Callable[[], T]) -> T:
        body: Body = request.state.body
        if body.large:
            return await self.threads.run(work)
        return await asyncio.get_running_loop().run_in_executor(self._quick, work)

    async def _whole(self, answer: Answer, run: Run) -> dict[str, Any]:
        while not answer.done:
            answer.push(*await run.next())
        return answer.body()

    async def _events(self, answer: Answer, run: Run) -> AsyncIterator[bytes]:
        """A stream, from the first word to the last; a sign of life where there is long nothing to say."""
        for told in answer.first():
            yield event(told)
        try:
            while not answer.done:
                try:
                    async with asyncio.timeout(WAITING_SECONDS):
                        place, piece = await run.next()
                except TimeoutError:
                    yield WAITING
                    continue
                if told_now := answer.push(place, piece):
                    yield b"".join(map(event, told_now))
        except Exception as error:
            log.warning("A stream ended early: %s", error)
            yield event(problem_of(error).body)
            return
        for told in answer.last():
            yield event(told)
        yield DONE

    def _count(self, answer: Answer, run: Run) -> None:
        self.metrics.count_tokens(answer.order.model, run.spent())
        self.metrics.count_answer(answer)


def _spelled(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of every token, also of the one that pads: in many models it is what ends a turn."""
    stream, pad = tokenizer.detokenizer(decode_special_tokens=True), tokenizer.pad_token_id
    shown = tokenizer.extended_id_to_piece.get(pad, "")
    parts: list[str] = []
    for padding, group in groupby(tokens, key=lambda number: bool(shown) and number == pad):
        run = list(group)
        parts.append(stream.flush() + shown * len(run) if padding else stream.feed(run))
    return "".join(parts) + stream.flush()
