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

from .body import BodyMemoryLimiter, LargeBodyThread, RequestBody
from .errors import APIError
from .keys import ApiKeys
from .limits import Limits

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC_PATHS = frozenset(("/health/live",))
BODILESS_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "DELETE"))


class RequestMiddleware:
    """Checks every request before it goes in."""

    def __init__(
        self,
        app: App,
        api_keys: ApiKeys,
        limits: Limits,
        on_response: Callable[[str, int], None],
        hosts: Collection[str] | None = None,
        large_bodies: LargeBodyThread | None = None,
    ) -> None:
        """`counted` is told the route and the status of every reply; `hosts` are the names it answers to.

        `threads` parses large bodies; it is closed by its owner.
        """
        self.app, self.api_keys, self.limits, self.on_response = app, api_keys, limits, on_response
        self.hosts = hosts
        self.memory, self.large_bodies = (
            BodyMemoryLimiter(limits, len(api_keys) > 1),
            large_bodies or LargeBodyThread(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the body is left out by whoever sends the answer
            scope = {**scope, "method": "GET"}

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.on_response(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        incoming = _IncomingBody(receive, self.memory)
        try:
            try:
                self._check_headers(scope)
                incoming.caller = self._check_key(scope)
                if not await self._received(scope, incoming):
                    return
                await self._parse(scope, incoming.body)
            except APIError as problem:
                if problem.headers.get("Connection") != "close" and _closes(scope):
                    await incoming.discard_rest(self.limits.body_seconds)
                await _refuse(problem, counting)
                return
            await self.app(scope, incoming.replay(), counting)
        finally:
            incoming.release()

    def _check_headers(self, scope: Scope) -> None:
        names = [name for name, _ in scope["headers"]]
        if b"transfer-encoding" in names and (
            b"content-length" in names or scope.get("http_version") == "1.0"
        ):
            # Two parties that disagree where a body ends take its rest for another request (RFC 9112, 6.1).
            raise APIError(
                400,
                "Where the body ends is not clear: send Content-Length or Transfer-Encoding, not both, and "
                "Transfer-Encoding with HTTP/1.1 only.",
                code="ambiguous_length",
                headers={"Connection": "close"},
            )
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self.limits.headers:
            raise APIError(431, f"The headers may have {self.limits.headers} bytes in all.")
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if self.hosts is not None and name not in self.hosts:
            raise APIError(
                403,
                f"Without keys this server answers only to {', '.join(sorted(self.hosts))}, not to "
                f"{name[:80]!r}: ask it under one of these, or start it with --api-key.",
            )

    def _check_key(self, scope: Scope) -> str:
        """What tells the caller apart from others."""
        if scope["path"] in PUBLIC_PATHS:
            return ""
        caller = self.api_keys.authenticate(dict(scope["headers"]))
        if caller is None:
            kind = (
                "Bearer"
                if scope["path"].startswith("/v1/")
                else 'Basic realm="exlm, the key is the password"'
            )
            raise APIError(
                401,
                "This needs an API key: send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": kind},
            )
        scope.setdefault("state", {})["caller"] = caller
        return caller.salt

    async def _received(self, scope: Scope, incoming: _IncomingBody) -> bool:
        """Take all of the body; whether the client stayed meanwhile."""
        headers, most = dict(scope["headers"]), self.limits.body
        too_large = APIError(413, f"The body may have {most} bytes.", code="body_too_large")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > most:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while incoming.more:
                    if not await incoming.receive_some():
                        return False
                    if len(incoming.body) > most:
                        raise too_large
        except TimeoutError:
            raise APIError(
                408,  # and what still comes is not waited for
                f"The body took longer than {self.limits.body_seconds} s.",
                headers={"Connection": "close"},
            ) from None
        return True

    async def _parse(self, scope: Scope, body: bytearray) -> None:
        """Put the parsed body where routes find it; web pages of other servers cannot send JSON."""
        if scope["method"] in BODILESS_METHODS:
            return
        kind = dict(scope["headers"]).get(b"content-type", b"")
        if body and kind.partition(b";")[0].strip().lower() != b"application/json":
            raise APIError(415, "Send JSON, with `Content-Type: application/json`.")
        scope.setdefault("state", {})["body"] = await RequestBody.parsed(body, self.limits, self.large_bodies)


class _IncomingBody:
    """The body that a client sends: kept until it is parsed and handed on, and counted as memory so long."""

    def __init__(self, receive: Receive, memory: BodyMemoryLimiter) -> None:
        self._receive, self._memory = receive, memory
        self.caller = ""
        self.body = bytearray()
        self.more = True
        """Whether the client has not sent all of it."""

    async def receive_some(self) -> bool:
        """Receive some of it; False if the client left."""
        message = await self._receive()
        part: bytes = message.get("body", b"")
        self.more = message.get("more_body", False)
        self._memory.acquire(len(part), self.caller)
        self.body += part
        return bool(message["type"] == "http.request")

    async def discard_rest(self, seconds: float) -> None:
        """Let the client finish, for a while, and keep nothing of it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.more:
                    self.more = (await self._receive()).get("more_body", False)

    def release(self) -> None:
        """The body is not kept any longer."""
        self._memory.release(len(self.body), self.caller)
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
            self.release()
            return {"type": "http.request", "body": body, "more_body": False}

        return received


def _closes(scope: Scope) -> bool:
    """Whether the connection ends with the answer: then a client that still sends would never read it."""
    told = dict(scope["headers"]).get(b"connection", b"").lower()
    return b"close" in told or scope.get("http_version") == "1.0"


async def _refuse(problem: APIError, send: Send) -> None:
    body = json.dumps(problem.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **problem.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
