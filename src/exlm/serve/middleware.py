"""ASGI middleware: API keys, header checks and limits, and the receiving of bodies.

It looks at headers only. A body is received within its limits and passed on unparsed as
`scope["state"]["body"]`: each route parses and validates it once, as the kind of request that it takes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .body import LargeBodyThread, RequestBody
from .errors import APIError
from .limits import BodyMemoryLimiter, Limits
from .responses import JsonResponse

PUBLIC_PATHS = frozenset(("/health/live",))
BODILESS_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "DELETE"))


@dataclass(frozen=True)
class Caller:
    """An authenticated client. Callers with different salts never share pages of the prefix cache."""

    admin: bool = False
    salt: str = ""


class ApiKeys:
    """The API and admin keys of a server. Without any key every client is accepted, and none is an admin."""

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        """Each key's cache salt is a keyed hash, with a secret that is new in every process."""
        secret = secrets.token_bytes(32)
        self._callers: list[tuple[bytes, Caller]] = []
        for group, admin in ((keys, False), (admin_keys, True)):
            for key in group:
                salt = hashlib.blake2b(key.encode(), key=secret, digest_size=16).hexdigest()
                self._callers.append((key.encode(), Caller(admin, salt)))

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._callers)

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """The caller whose key the headers carry; None if no known key is among them."""
        if not self._callers:
            return Caller()
        presented = _presented_key(headers)
        match = None
        for key, caller in self._callers:  # compares with every key, so that timing reveals nothing
            if hmac.compare_digest(key, presented):
                match = caller
        return match


class RequestMiddleware:
    """Refuses requests that fail authentication or a limit; passes the others on with their bodies."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: ApiKeys,
        limits: Limits,
        on_response: Callable[[str, int], None],
        hosts: Collection[str] | None = None,
        large_bodies: LargeBodyThread | None = None,
    ) -> None:
        """`on_response` gets the route and status of every response; `hosts` are the accepted `Host` names.

        `large_bodies` parses large bodies and is closed by its owner.
        """
        self.app, self.api_keys, self.limits, self.on_response = app, api_keys, limits, on_response
        self.hosts = hosts
        self.memory = BodyMemoryLimiter(limits, len(api_keys) > 1)
        self.large_bodies = large_bodies or LargeBodyThread()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it on or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server leaves out the body of its response
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.on_response(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        body = RequestBody(receive, self.memory, self.limits, self.large_bodies)
        try:
            try:
                self._check_headers(scope, headers)
                body.caller = self._authenticate(scope, headers)
                if not await body.receive_all(headers):
                    return
                if scope["method"] not in BODILESS_METHODS:
                    _check_content_type(headers, body)
                    scope.setdefault("state", {})["body"] = body
            except APIError as error:
                if error.headers.get("Connection") != "close" and _closes_connection(scope, headers):
                    await body.discard_rest()
                await JsonResponse(error.body, error.status, headers=error.headers)(scope, receive, counted_send)
                return
            await self.app(scope, receive, counted_send)  # all that `receive` can still give is a disconnect
        finally:
            body.release()

    def _check_headers(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        if b"transfer-encoding" in headers and (b"content-length" in headers or scope.get("http_version") == "1.0"):
            # Request smuggling: a proxy that disagrees about where the body ends takes its rest for another
            # request (RFC 9112, 6.1).
            raise APIError(
                400,
                "Where the body ends is not clear: send Content-Length or Transfer-Encoding, not both, and "
                "Transfer-Encoding with HTTP/1.1 only.",
                code="ambiguous_length",
                headers={"Connection": "close"},
            )
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self.limits.headers:
            raise APIError(431, f"The headers may have {self.limits.headers} bytes in all.")
        host = headers.get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if self.hosts is not None and name not in self.hosts:
            raise APIError(
                403,
                f"Without keys this server answers only to {', '.join(sorted(self.hosts))}, not to "
                f"{name[:80]!r}: ask it under one of these, or start it with --api-key.",
            )

    def _authenticate(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Put the caller into the request's state; returns its salt, which identifies it."""
        if scope["path"] in PUBLIC_PATHS:
            return ""
        caller = self.api_keys.authenticate(headers)
        if caller is None:
            is_api = scope["path"].startswith("/v1/")
            raise APIError(
                401,
                "This needs an API key: send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer" if is_api else 'Basic realm="exlm, the key is the password"'},
            )
        scope.setdefault("state", {})["caller"] = caller
        return caller.salt


def _presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key in the headers: a bearer token, a browser's basic-auth password, or X-API-Key."""
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return value.strip()
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return headers.get(b"x-api-key", b"")


def _check_content_type(headers: Mapping[bytes, bytes], body: RequestBody) -> None:
    """Only JSON is taken: web pages of other sites cannot send it without the browser asking first."""
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if body.raw and content_type != b"application/json":
        raise APIError(415, "Send JSON, with `Content-Type: application/json`.")


def _closes_connection(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the connection ends with the response: a client still sending would never read it."""
    return b"close" in headers.get(b"connection", b"").lower() or scope.get("http_version") == "1.0"
