"""A replica: the application of `exlm.serve` with its engine, called in this process instead of over a
socket.

It does not use Ray; `deploy` makes a Ray Serve deployment of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Message

from exlm import ExlmError
from exlm.serve import ApiKeys, Engine, ModelSpec, Options, create_app, load

from .config import ServerConfig

MAX_BUFFERED_MESSAGES = 64
"""Messages of a response that may wait to be fetched."""


class NotReady(ExlmError, RuntimeError):
    """A replica's engine makes no tokens."""


@dataclass(frozen=True)
class ReplicaRequest:
    """An HTTP request as it is sent to a replica."""

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""

    def scope(self) -> dict[str, Any]:
        """The request's ASGI scope."""
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


class Replica:
    """A loaded model with its server's application."""

    def __init__(
        self, spec: ModelSpec, config: ServerConfig, tensor_parallel: int = 1, name: str = "replica"
    ) -> None:
        """Load the model; `name` is the value of the response header `x-exlm-replica`."""
        self._config, self._name = config, name
        self._engine = Engine([spec], partial(load, tensor_parallel=tensor_parallel))
        self._engine.preload(spec.name)
        api_keys = ApiKeys(config.keys, config.admin_keys)
        self._app = create_app(self._engine, Options(api_keys, config.limits, config.ready_seconds))
        self._lifespan = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()
        self._started = False

    async def ask(
        self, request: ReplicaRequest, blocks: Sequence[bytes] = ()
    ) -> AsyncIterator[list[Message]]:
        """Answer a request with the ASGI messages of its response, a few at a time.

        `blocks` is not used here: the router reads it from the call.
        """
        await self._start()
        outbox: asyncio.Queue[Message | None] = asyncio.Queue(MAX_BUFFERED_MESSAGES)
        disconnected = asyncio.Event()
        inbox: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if inbox:
                return inbox.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                await self._app(request.scope(), receive, outbox.put)
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
            disconnected.set()
            await task
        finally:
            disconnected.set()
            task.cancel()

    async def check_health(self) -> None:
        """Raise NotReady unless the engine makes a token in time."""
        await self._start()
        if not await self._engine.find(None).is_ready(self._config.ready_seconds):
            raise NotReady(f"No token came within {self._config.ready_seconds} s.")

    async def close(self) -> None:
        """Cancel all requests and free the memory."""
        await self._lifespan.aclose()

    async def _start(self) -> None:
        async with self._starting:
            if not self._started:
                await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
                self._started = True
