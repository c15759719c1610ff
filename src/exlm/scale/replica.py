"""One replica: the server of `exlm.serve` with its engine, asked in this process instead of through a socket.

A plain class that knows nothing of Ray; `deploy` makes a deployment of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from exlm import ExlmError
from exlm.serve import ApiKeys, Engine, Limits, ModelSpec, Options, create_app
from exlm.serve.middleware import Message

from .loading import loader

MAX_BUFFERED_MESSAGES = 64
"""Messages of an answer that wait to be fetched."""


class NotReady(ExlmError, RuntimeError):
    """A replica gives no tokens."""


@dataclass(frozen=True)
class ReplicaRequest:
    """A request as it travels to a replica."""

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""

    def scope(self) -> dict[str, Any]:
        """The request as an ASGI application knows it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


@dataclass(frozen=True)
class ServerConfig:
    """What replicas and the front have to agree on: keys, bounds, and how soon a token must come."""

    keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    ready_seconds: float = 10.0


class Replica:
    """A model at work. Whoever holds it asks it things and checks its health."""

    def __init__(
        self, listing: ModelSpec, terms: ServerConfig, tensor_parallel: int = 1, name: str = "replica"
    ) -> None:
        """Load the model; `name` is shown to clients in a header."""
        self._terms, self._name = terms, name
        self._engine = Engine([listing], loader(tensor_parallel))
        self._engine.preload(listing.name)
        keyring = ApiKeys(terms.keys, terms.admin_keys)
        self._app = create_app(self._engine, Options(keyring, terms.limits, terms.ready_seconds))
        self._life = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()
        self._started = False

    async def ask(self, asked: ReplicaRequest, blocks: Sequence[bytes] = ()) -> AsyncIterator[list[Message]]:
        """Answer a request with the messages that an ASGI application sends, a few at a time.

        `blocks` is for whoever routes the call.
        """
        await self._start()
        outbox: asyncio.Queue[Message | None] = asyncio.Queue(MAX_BUFFERED_MESSAGES)
        gone = asyncio.Event()
        inbox: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if inbox:
                return inbox.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                await self._app(asked.scope(), receive, outbox.put)
            finally:
                await outbox.put(None)

        task = asyncio.create_task(work())
        try:
            while (message := await outbox.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-exlm-replica", self._name.encode())]
                messages = [message]
                while not outbox.empty() and (more := outbox.get_nowait()) is not None:
                    messages.append(more)
                yield messages
                if messages[-1]["type"] == "http.response.body" and not messages[-1].get("more_body"):
                    break
            gone.set()
            await task
        finally:
            gone.set()
            task.cancel()

    async def check_health(self) -> None:
        """Raise unless the engine makes a token in time."""
        await self._start()
        if not await self._engine.find(None).is_ready(self._terms.ready_seconds):
            raise NotReady(f"No token came within {self._terms.ready_seconds} s.")

    async def close(self) -> None:
        """Drop what runs and give the memory back."""
        await self._life.aclose()

    async def _start(self) -> None:
        async with self._starting:
            if not self._started:
                await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
                self._started = True
