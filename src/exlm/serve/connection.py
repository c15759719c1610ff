"""One HTTP/1.1 connection, with timeouts for clients that send no headers or read no response.

uvicorn has no such timeouts, so its h11 protocol is subclassed. `middleware` bounds the time for a request's
body; here it is the headers, the rest of a refused body, and unread responses. A connection that is closed
here looks to the application like a client that disconnected.
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
"""Chunks of a body before `MIN_MEAN_CHUNK_BYTES` applies."""
MIN_MEAN_CHUNK_BYTES = 256
"""Bytes that further chunks must have on average: parsing a chunk of one byte takes as long as thousands."""


class _ChunkLimitedParser(h11.Connection):
    """h11's parser, which also refuses bodies of very many very small chunks."""

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
    """Closes when the client is too slow or does not send HTTP."""

    def __init__(self, *arguments: Any, limits: Limits, **options: Any) -> None:
        """The other arguments are those of uvicorn."""
        super().__init__(*arguments, **options)
        self.conn = _ChunkLimitedParser(self.config.h11_max_incomplete_event_size or limits.headers)
        self._seconds = limits.header_seconds
        self._header_timer = _Timer(self.loop, limits.header_seconds, self._on_header_timeout)
        self._write_timer = _Timer(self.loop, limits.read_seconds, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request's headers."""
        super().connection_made(transport)
        self._update_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        self._header_timer.stop()
        self._write_timer.stop()

    def data_received(self, data: bytes) -> None:
        """Parse what the client sent."""
        super().data_received(data)
        self._update_header_timer()

    def on_response_complete(self) -> None:
        """Start the timer for the next request's headers."""
        super().on_response_complete()
        self._update_header_timer()

    def pause_writing(self) -> None:
        """The send buffer is full: start the timer for reading the response."""
        super().pause_writing()
        self._write_timer.start()

    def resume_writing(self) -> None:
        """The client has read some of the response."""
        super().resume_writing()
        self._write_timer.stop()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, unless a response has begun, and close: the framing is lost."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = APIError(400, "This is no valid HTTP/1.1 request, or it has too many small chunks.")
            self._write_error("400 Bad Request", problem)
        self.transport.close()

    def _update_header_timer(self) -> None:
        """Run the timer while no request is being answered; single bytes do not reset it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._header_timer.stop()
        elif not self.transport.is_closing():
            self._header_timer.start()

    def _on_header_timeout(self) -> None:
        """Answer 408 if the client has sent part of a request, and close."""
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._write_error(
                "408 Request Timeout", APIError(408, f"The headers took longer than {self._seconds} s.")
            )
        self.transport.close()

    def _write_error(self, status: str, problem: APIError) -> None:
        """Write an error response without an application."""
        body = json.dumps(problem.body)
        self.transport.write(
            f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode("ascii")
        )


class _Timer:
    """Calls an action after it has run for `seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], object]) -> None:
        self._loop, self._seconds, self._action = loop, seconds, action
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start, unless it is running."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._action)

    def stop(self) -> None:
        """Stop, and start from zero the next time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
