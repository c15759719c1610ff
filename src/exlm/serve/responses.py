"""HTTP responses: JSON and server-sent events; and the cancelling of work whose client has disconnected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, which clients ignore."""
KEEP_ALIVE_SECONDS = 15.0


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


def sse_event(data: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + json_bytes(data) + b"\n\n"


def json_bytes(data: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates, which models can produce, become `?`."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JsonResponse(Response):
    """A response of compact JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The response's body."""
        return json_bytes(content)


class EventStreamResponse(Response):
    """A stream that ends with its iterator or when the client disconnects; it then calls `close`."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], media_type: str = EVENT_STREAM) -> None:
        self.status_code, self.background = 200, None
        self.media_type = media_type
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events while listening for a disconnect."""
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
