"""What goes back to a client, and noticing that it has left: then the work for it stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .middleware import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
KEEP_ALIVE_SECONDS = 15.0


class ClientDisconnected(Exception):
    """Nobody is listening any more."""


def sse_event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


def json_bytes(data: Any) -> bytes:
    """JSON, whatever the model wrote."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class JsonResponse(Response):
    """A whole reply."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """As JSON."""
        return json_bytes(content)


class EventStreamResponse(Response):
    """Events as they come, until the last one or until the client leaves; then `close` is called."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self.status_code, self.background = 200, None
        self.media_type = "text/event-stream"
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, and listen for the client leaving."""
        sending = asyncio.ensure_future(self._send(send))
        try:
            await race_disconnect(sending, _disconnected(receive))
        except ClientDisconnected:
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of some work, which is dropped if the client leaves: ClientGone."""
    return await race_disconnect(asyncio.ensure_future(work), _disconnected(request.receive))


async def race_disconnect(work: asyncio.Future[T], leaving: Coroutine[Any, Any, None]) -> T:
    """What the work gives, unless the client leaves before."""
    listener = asyncio.ensure_future(leaving)
    try:
        both: list[asyncio.Future[Any]] = [work, listener]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientDisconnected
    finally:
        work.cancel()
        listener.cancel()
        await asyncio.gather(work, listener, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
