"""One connection of the server, watched: whoever sends nothing, or reads nothing, does not keep it for ever.

What a request's body may take is `guard`'s business; here it is the headers, the rest of a body that was
refused, and answers that nobody takes. A connection that is cut off counts as a client that left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import APIError
from .limits import Limits

Event: TypeAlias = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]

FREE_CHUNKS = 1024
"""Chunks of a body of which nothing is asked."""
MIN_MEAN_CHUNK_BYTES = 256
"""How much the others must hold on average: to parse one byte as a chunk takes as long as thousands."""


class _ChunkLimitedParser(h11.Connection):
    """The library's parser, which refuses bodies in very many very small chunks."""

    def __init__(self, longest: int) -> None:
        super().__init__(h11.SERVER, longest)
        self._chunks = self._bytes = 0

    def next_event(self) -> Event:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // MIN_MEAN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class Connection(H11Protocol):
    """Closed when the client is too slow, or sends what is not HTTP."""

    def __init__(self, *arguments: Any, limits: Limits, **options: Any) -> None:
        """The further arguments are the library's own."""
        super().__init__(*arguments, **options)
        self.conn = _ChunkLimitedParser(self.config.h11_max_incomplete_event_size or limits.headers)
        self._seconds = limits.header_seconds
        self._header_timer = _Timer(self.loop, limits.header_seconds, self._on_header_timeout)
        self._write_timer = _Timer(self.loop, limits.read_seconds, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came; its headers are awaited from now on."""
        super().connection_made(transport)
        self._update_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """It left."""
        super().connection_lost(exc)
        self._header_timer.stop()
        self._write_timer.stop()

    def data_received(self, data: bytes) -> None:
        """It sent something."""
        super().data_received(data)
        self._update_header_timer()

    def on_response_complete(self) -> None:
        """It was answered, and may ask again."""
        super().on_response_complete()
        self._update_header_timer()

    def pause_writing(self) -> None:
        """It does not take what is sent."""
        super().pause_writing()
        self._write_timer.start()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._write_timer.stop()

    def send_400_response(self, msg: str) -> None:
        """Say that this is not HTTP, if no answer has begun, and close: what follows may be anything."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = APIError(400, "This is no valid HTTP/1.1 request, or it has too many small chunks.")
            self._write_error("400 Bad Request", problem)
        self.transport.close()

    def _update_header_timer(self) -> None:
        """Let the clock run while no request is being answered; a byte now and then does not set it back."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._header_timer.stop()
        elif not self.transport.is_closing():
            self._header_timer.start()

    def _on_header_timeout(self) -> None:
        """Say why, if the client has begun to ask, and close."""
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._write_error(
                "408 Request Timeout", APIError(408, f"The headers took longer than {self._seconds} s.")
            )
        self.transport.close()

    def _write_error(self, status: str, problem: APIError) -> None:
        """Answer without a request."""
        body = json.dumps(problem.body)
        self.transport.write(
            f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode("ascii")
        )


class _Timer:
    """Calls an action once it has run for so many seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], object]) -> None:
        self._loop, self._seconds, self._action = loop, seconds, action
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Run; nothing if it does."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._action)

    def stop(self) -> None:
        """Begin anew the next time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
