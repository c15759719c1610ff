"""Run the server in this process until a signal ends it: socket, signals, draining, watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from exlm import InputError

from .app import Options, create_app
from .connection import Connection
from .engine import Engine
from .health import Watchdog, exit_on_stall
from .limits import Limits

FINAL_EVENTS_SECONDS = 5.0


class _Server(uvicorn.Server):
    """Drains after SIGTERM or SIGINT, and then returns.

    uvicorn instead raises the same signal again, which looks like a failure to its sender, and cuts off the
    requests that are not finished in time without a word.
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
        previous = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
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
        raise InputError(
            f"Cannot listen on {host} port {port}: {error}. Choose another --host or --port."
        ) from None
    return opened


def uvicorn_config(app: FastAPI, bounds: Limits, drain_seconds: float) -> uvicorn.Config:
    """The configuration of uvicorn for an application."""
    return uvicorn.Config(
        app,
        http=partial(Connection, limits=bounds),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=bounds.headers + 4096,
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
