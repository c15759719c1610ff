"""The door of the server: nobody gets in without a key, with too much luggage, or with what is not JSON.

An ASGI layer around the routes. It reads a request's body, within limits, and has it parsed (`body`) before
any route is asked; and it counts what goes out. What requests mean is not known here.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from typing import Any, TypeAlias

from .body import Body, BodyMemory, LargeBodies
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
        threads: LargeBodies | None = None,
    ) -> None:
        """`counted` is told the route and the status of every reply; `hosts` are the names it answers to.

        `threads` parses large bodies; it is closed by its owner.
        """
        self.app, self.keyring, self.bounds, self.counted = app, keyring, bounds, counted
        self.hosts = hosts
        self.memory, self.threads = BodyMemory(bounds, len(keyring) > 1), threads or LargeBodies()

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

        incoming = _Incoming(receive, self.memory)
        try:
            try:
                self._check_headers(scope)
                incoming.owner = self._check_key(scope)
                if not await self._received(scope, incoming):
                    return
                await self._parse(scope, incoming.body)
            except Problem as problem:
                if problem.headers.get("Connection") != "close" and _closes(scope):
                    await incoming.rest(self.bounds.body_seconds)
                await _refuse(problem, counting)
                return
            await self.app(scope, incoming.replay(), counting)
        finally:
            incoming.drop()

    def _check_headers(self, scope: Scope) -> None:
        names = [name for name, _ in scope["headers"]]
        if b"transfer-encoding" in names and (
            b"content-length" in names or scope.get("http_version") == "1.0"
        ):
            # Two parties that disagree where a body ends take its rest for another request (RFC 9112, 6.1).
            raise Problem(
                400,
                "Where the body ends is not clear: send Content-Length or Transfer-Encoding, not both, and "
                "Transfer-Encoding with HTTP/1.1 only.",
                code="ambiguous_length",
                headers={"Connection": "close"},
            )
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

    def _check_key(self, scope: Scope) -> str:
        """What tells the caller apart from others."""
        if scope["path"] in OPEN:
            return ""
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
        return caller.salt

    async def _received(self, scope: Scope, incoming: _Incoming) -> bool:
        """Take all of the body; whether the client stayed meanwhile."""
        headers, most = dict(scope["headers"]), self.bounds.body
        too_large = Problem(413, f"The body may have {most} bytes.", code="body_too_large")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > most:
            raise too_large
        try:
            async with asyncio.timeout(self.bounds.body_seconds):
                while incoming.more:
                    if not await incoming.take():
                        return False
                    if len(incoming.body) > most:
                        raise too_large
        except TimeoutError:
            raise Problem(
                408,  # and what still comes is not waited for
                f"The body took longer than {self.bounds.body_seconds} s.",
                headers={"Connection": "close"},
            ) from None
        return True

    async def _parse(self, scope: Scope, body: bytearray) -> None:
        """Put the parsed body where routes find it; web pages of other servers cannot send JSON."""
        if scope["method"] in BODILESS:
            return
        kind = dict(scope["headers"]).get(b"content-type", b"")
        if body and kind.partition(b";")[0].strip().lower() != b"application/json":
            raise Problem(415, "Send JSON, with `Content-Type: application/json`.")
        scope.setdefault("state", {})["body"] = await Body.parsed(body, self.bounds, self.threads)


class _Incoming:
    """The body that a client sends: kept until it is parsed and handed on, and counted as memory so long."""

    def __init__(self, receive: Receive, memory: BodyMemory) -> None:
        self._receive, self._memory = receive, memory
        self.owner = ""
        self.body = bytearray()
        self.more = True
        """Whether the client has not sent all of it."""

    async def take(self) -> bool:
        """Receive some of it; False if the client left."""
        message = await self._receive()
        part: bytes = message.get("body", b"")
        self.more = message.get("more_body", False)
        self._memory.take(len(part), self.owner)
        self.body += part
        return bool(message["type"] == "http.request")

    async def rest(self, seconds: float) -> None:
        """Let the client finish, for a while, and keep nothing of it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.more:
                    self.more = (await self._receive()).get("more_body", False)

    def drop(self) -> None:
        """The body is not kept any longer."""
        self._memory.give_back(len(self.body), self.owner)
        self.body = bytearray()

    def replay(self) -> Receive:
        """What a route receives: the body at once, then what the client does next."""
        told = False

        async def received() -> Message:
            nonlocal told
            if told:
                return await self._receive()
            told = True
            body = bytes(self.body)
            self.drop()
            return {"type": "http.request", "body": body, "more_body": False}

        return received


def _closes(scope: Scope) -> bool:
    """Whether the connection ends with the answer: then a client that still sends would never read it."""
    told = dict(scope["headers"]).get(b"connection", b"").lower()
    return b"close" in told or scope.get("http_version") == "1.0"


async def _refuse(problem: Problem, send: Send) -> None:
    body = json.dumps(problem.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **problem.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
