"""Run the server in this process until a signal ends it: connections, signals, draining, watchdog.

uvicorn has no timeouts for clients that send no headers or read no response, so its h11 protocol is
subclassed. `middleware` limits the time for a request's body; here it is the headers, the rest of a refused
body, and unread responses. To the application, a connection that is closed here looks like a client that
disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from exlm import InputError

from .app import Options, create_app
from .engine import Engine
from .errors import APIError
from .limits import Limits
from .monitoring import Watchdog, exit_on_stall

Event: TypeAlias = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]

MAX_SMALL_CHUNKS = 1024
"""Chunks of a body that may be of any size."""
MIN_MEAN_CHUNK_BYTES = 256
"""Bytes that further chunks must have on average: a chunk of one byte takes as long to parse as one of
thousands."""


class _ChunkLimitedParser(h11.Connection):
    """h11's parser, which also refuses bodies of very many very small chunks."""

    def __init__(self, max_event_bytes: int) -> None:
        super().__init__(h11.SERVER, max_event_bytes)
        self._chunks = self._bytes = 0

    def next_event(self) -> Event:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > MAX_SMALL_CHUNKS + self._bytes // MIN_MEAN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class Connection(H11Protocol):
    """An HTTP/1.1 connection that is closed when the client is too slow or does not send HTTP."""

    def __init__(self, *arguments: Any, limits: Limits, **options: Any) -> None:
        """The other arguments are those of uvicorn."""
        super().__init__(*arguments, **options)
        self.conn = _ChunkLimitedParser(self.config.h11_max_incomplete_event_size or limits.headers)
        self._seconds = limits.header_seconds
        self._header_timer = _Timer(self.loop, limits.header_seconds, self._on_header_timeout)
        self._write_timer = _Timer(self.loop, limits.read_seconds, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_timer.stop()
        self._write_timer.stop()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_header_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_header_timer()

    def pause_writing(self) -> None:
        """The send buffer is full: start the timer for reading the response."""
        super().pause_writing()
        self._write_timer.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer.stop()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, unless a response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = APIError(400, "This is no valid HTTP/1.1 request, or it has too many small chunks.")
            self._write_error("400 Bad Request", error)
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
            self._write_error("408 Request Timeout", APIError(408, f"The headers took longer than {self._seconds} s."))
        self.transport.close()

    def _write_error(self, status: str, error: APIError) -> None:
        body = json.dumps(error.body)
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


FINAL_EVENTS_SECONDS = 5.0
"""Time for sending the errors of requests that are not finished when draining ends."""


class _Server(uvicorn.Server):
    """Drains after SIGTERM or SIGINT, and then returns.

    uvicorn instead raises the same signal again, which looks like a failure to its sender, and closes the
    connections of requests that are not finished in time without an error.
    """

    def __init__(self, engine: Engine, options: Options, drain_seconds: float) -> None:
        app = create_app(engine, options)
        super().__init__(uvicorn_config(app, options.limits, drain_seconds + FINAL_EVENTS_SECONDS))
        self._engine, self._seconds = engine, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._close_engine_later())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _close_engine_later(self) -> None:
        """Close the engine after `drain_seconds`: its requests then end with the error `model_unloaded`."""
        await asyncio.sleep(self._seconds)
        await self._engine.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, action in previous.items():
                signal.signal(number, action)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second signal ends at once
        if self.force_exit:  # no traceback of each request that is cut off
            logging.getLogger("uvicorn.error").disabled = True
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for the server; port 0 chooses a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(1024)
    except OSError as error:
        raise InputError(f"Cannot listen on {host} port {port}: {error}. Choose another --host or --port.") from None
    return opened


def uvicorn_config(app: FastAPI, limits: Limits, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=limits.headers + 4096,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )


def serve(
    engine: Engine,
    options: Options,
    opened: socket.socket,
    *,
    drain_seconds: float = 30.0,
    stall_seconds: float | None = 120.0,
    reports: Path | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight then have `drain_seconds` to finish.

    An engine without progress for `stall_seconds` ends the process with status 70, after a report in the log
    and, if given, in the folder `reports`; None disables the watchdog. `started` is called when requests are
    accepted.
    """
    server = _Server(engine, options, drain_seconds)

    async def run() -> None:
        watchdog = Watchdog(engine, stall_seconds, exit_on_stall(reports)) if stall_seconds else None
        serving = asyncio.create_task(server.serve([opened]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            gc.collect()
            gc.freeze()  # what is loaded now stays; each full garbage collection over it took 0.2 s
            started()
            if watchdog is not None:
                watchdog.start()
        try:
            await serving
        finally:
            if watchdog is not None:
                watchdog.stop()

    asyncio.run(run())
