"""One connection of the server, watched: whoever sends nothing, or reads nothing, does not keep it for ever.

What a request's body may take is `guard`'s business; here it is the headers, the rest of a body that was
refused, and answers that nobody takes. A connection that is cut off counts as a client that left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Bounds
from .problems import Problem


class Connection(H11Protocol):
    """Closed when the client is too slow."""

    def __init__(self, *arguments: Any, bounds: Bounds, **options: Any) -> None:
        """The further arguments are the library's own."""
        super().__init__(*arguments, **options)
        self._seconds = bounds.header_seconds
        self._asking = _Clock(self.loop, bounds.header_seconds, self._give_up)
        self._taking = _Clock(self.loop, bounds.read_seconds, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came; its headers are awaited from now on."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It left."""
        super().connection_lost(exc)
        self._asking.stop()
        self._taking.stop()

    def data_received(self, data: bytes) -> None:
        """It sent something."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """It was answered, and may ask again."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """It does not take what is sent."""
        super().pause_writing()
        self._taking.start()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._taking.stop()

    def _watch(self) -> None:
        """Let the clock run while no request is being answered; a byte now and then does not set it back."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._asking.stop()
        elif not self.transport.is_closing():
            self._asking.start()

    def _give_up(self) -> None:
        """Say why, if the client has begun to ask, and close."""
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            body = json.dumps(Problem(408, f"The headers took longer than {self._seconds} s.").body)
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body.encode())
            )
        self.transport.close()


class _Clock:
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
