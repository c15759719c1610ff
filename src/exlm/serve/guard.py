"""The door of the server: nobody gets in without a key, with too much luggage, or with what is not JSON.

An ASGI layer around the routes. It reads a request's body, within limits, before any route is asked, and
counts what goes out. What requests mean is not known here.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from typing import Any, TypeAlias

from pydantic_core import from_json

from .keys import Keyring
from .limits import Bounds
from .problems import Problem

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset(("/health/live",))
BODILESS = frozenset(("GET", "HEAD", "OPTIONS", "DELETE"))


class Guard:
    """Checks every request before it goes in."""

    def __init__(
        self,
        app: App,
        keyring: Keyring,
        bounds: Bounds,
        counted: Callable[[str, int], None],
        hosts: Collection[str] | None = None,
    ) -> None:
        """`counted` is told the route and the status of every reply; `hosts` are the names it answers to."""
        self.app, self.keyring, self.bounds, self.counted = app, keyring, bounds, counted
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the body is left out by whoever sends the answer
            scope = {**scope, "method": "GET"}

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.counted(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        body_of = _Incoming(receive)
        try:
            self._check_headers(scope)
            self._check_key(scope)
            body = await self._body(scope, body_of)
        except Problem as problem:
            if problem.status != 408 and _closes(scope):
                await body_of.rest(self.bounds.body_seconds)
            await _refuse(problem, counting)
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), counting)

    def _check_headers(self, scope: Scope) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self.bounds.headers:
            raise Problem(431, f"The headers may have {self.bounds.headers} bytes in all.")
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if self.hosts is not None and name not in self.hosts:
            raise Problem(
                403,
                f"Without keys this server answers only to {', '.join(sorted(self.hosts))}, not to "
                f"{name[:80]!r}: ask it under one of these, or start it with --api-key.",
            )

    def _check_key(self, scope: Scope) -> None:
        if scope["path"] in OPEN:
            return
        caller = self.keyring.caller(dict(scope["headers"]))
        if caller is None:
            kind = (
                "Bearer"
                if scope["path"].startswith("/v1/")
                else 'Basic realm="exlm, the key is the password"'
            )
            raise Problem(
                401,
                "This needs an API key: send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": kind},
            )
        scope.setdefault("state", {})["caller"] = caller

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """All of it, known to be JSON; None if the client left meanwhile."""
        headers, most = dict(scope["headers"]), self.bounds.body
        too_large = Problem(413, f"The body may have {most} bytes.", code="body_too_large")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > most:
            raise too_large
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self.bounds.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
        except TimeoutError:
            raise Problem(408, f"The body took longer than {self.bounds.body_seconds} s.") from None
        body = b"".join(parts)
        if body and scope["method"] not in BODILESS:
            _check_json(headers.get(b"content-type", b""), body)
        return body


def _check_json(kind: bytes, body: bytes) -> None:
    """Refuse what is not JSON, cannot be UTF-8, or nests too deep; web pages elsewhere cannot send JSON."""
    if kind.partition(b";")[0].strip().lower() != b"application/json":
        raise Problem(415, "Send JSON, with `Content-Type: application/json`.")
    try:
        from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, f"The body is not JSON: {error}.", code="invalid_json") from None


class _Incoming:
    """What a client sends, and whether there is more of it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._more = True

    async def __call__(self) -> Message:
        message = await self._receive()
        self._more = message.get("more_body", False)
        return message

    async def rest(self, seconds: float) -> None:
        """Let the client finish, for a while, and keep nothing of it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._more:
                    await self()


def _closes(scope: Scope) -> bool:
    """Whether the connection ends with the answer: then a client that still sends would never read it."""
    told = dict(scope["headers"]).get(b"connection", b"").lower()
    return b"close" in told or scope.get("http_version") == "1.0"


def _replay(body: bytes, receive: Receive) -> Receive:
    """What a route receives: the body at once, then what the client does next."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return waiting.pop() if waiting else await receive()

    return received


async def _refuse(problem: Problem, send: Send) -> None:
    body = json.dumps(problem.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **problem.headers}
    if problem.status == 408:  # whoever sends too much reads the answer only if the rest is taken, too
        headers["Connection"] = "close"
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
