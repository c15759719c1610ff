"""ASGI middleware: API keys, header checks, and request bodies.

It checks headers, and receives a body within its limits as `scope["state"]["body"]`. Each route then parses and
validates it once, as the kind of request that it takes. Small bodies are parsed on the event loop. All large ones
share one thread, so that other requests wait for at most one parser however many large bodies arrive together.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .dialects import error_response
from .errors import APIError, validation_error
from .limits import FairLimiter, JsonLimits, Limits, RawJson, body_too_large

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

LARGE_BODY_BYTES = 32 << 10
"""Bodies from this size on are parsed in the thread; smaller ones take at most a few milliseconds."""
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


class RequestBody:
    """The body of one request: received within limits, then parsed once, which frees its bytes."""

    def __init__(self, receive: Receive, memory: FairLimiter, limits: Limits, large_bodies: Executor) -> None:
        self.caller_id = ""
        """The client whose share of the memory for bodies this body takes."""
        self.raw = bytearray()
        self._receive, self._memory, self._limits, self._large_bodies = receive, memory, limits, large_bodies
        self._size, self._more = 0, True

    @property
    def executor(self) -> Executor | None:
        """The one-thread executor of all work on this request if its body is large."""
        return self._large_bodies if self._size >= LARGE_BODY_BYTES else None

    async def receive_all(self, headers: Mapping[bytes, bytes]) -> bool:
        """Receive the body; False if the client disconnected. Raises 413, 408 or 429."""
        limit = self._limits.body
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            raise body_too_large(f"The body may have {limit} bytes.")
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while self._more:
                    message = await self._receive()
                    part: bytes = message.get("body", b"")
                    self._more = message.get("more_body", False)
                    self._memory.acquire(self.caller_id, len(part))
                    self.raw += part
                    if message["type"] != "http.request":
                        return False
                    if len(self.raw) > limit:
                        raise body_too_large(f"The body may have {limit} bytes.")
        except TimeoutError:
            raise APIError(
                408,  # the connection is closed, so that the rest need not be read
                f"The body took longer than {self._limits.body_seconds} s.",
                headers={"Connection": "close"},
            ) from None
        self._size = len(self.raw)
        return True

    async def discard_rest(self) -> None:
        """Let the client finish sending, within the time limit, and keep nothing of it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.body_seconds):
                while self._more:
                    self._more = (await self._receive()).get("more_body", False)

    async def parse(self, kind: type[M], convert: Callable[[M], T]) -> T:
        """Parse, validate as a request of this kind, convert that, and free the bytes."""
        try:
            return await self.inspect_json(lambda value: _validate(kind, value, convert))
        finally:
            self.release()

    async def inspect_json(self, function: Callable[[Any], T]) -> T:
        """Parse without validating and return `function` of the value; keeps the bytes."""
        raw, limits = self.raw, JsonLimits.for_body(self._limits.body)

        def work() -> T:
            return function(_parse_json(raw, limits))

        if self.executor is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    def release(self) -> None:
        """Free the bytes and give their memory back to the limiter."""
        self._memory.release(self.caller_id, len(self.raw))
        self.raw = bytearray()


def _parse_json(raw: RawJson, limits: JsonLimits) -> Any:
    """Parse JSON; an empty body is None. pydantic_core bounds the nesting depth."""
    if not raw:
        return None
    limits.check(raw)
    try:
        return from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise APIError(400, f"The body is not JSON: {error}.", code="invalid_json") from None


def _validate(kind: type[M], value: Any, convert: Callable[[M], T]) -> T:
    try:
        return convert(kind.model_validate(value))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise validation_error(details) from None


def large_body_thread() -> Executor:
    """The one thread that works on requests with large bodies; it starts with the first of them."""
    return ThreadPoolExecutor(1, thread_name_prefix="exlm-large-body")


class RequestMiddleware:
    """Refuses requests that fail authentication or a limit; passes the others on with their bodies."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: ApiKeys,
        limits: Limits,
        hosts: Collection[str] | None = None,
        on_response: Callable[[str, int], None] = lambda route, status: None,
        large_bodies: Executor | None = None,
    ) -> None:
        """`hosts` are the accepted `Host` names; `on_response` gets the route and status of every response.

        `large_bodies` is the thread that parses large bodies; its owner ends it.
        """
        self.app, self.api_keys, self.limits, self.hosts, self.on_response = app, api_keys, limits, hosts, on_response
        max_bytes = max(limits.bodies, 4 * limits.body)
        self.memory = FairLimiter(max_bytes, "bytes of request bodies", shared=len(api_keys) > 1)
        self.large_bodies = large_bodies or large_body_thread()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                body.caller_id = self._authenticate(scope, headers)
                if not await body.receive_all(headers):
                    return
                if scope["method"] not in BODILESS_METHODS:
                    _check_content_type(headers, body)
                    scope.setdefault("state", {})["body"] = body
            except APIError as error:
                if error.headers.get("Connection") != "close" and _closes_connection(scope, headers):
                    await body.discard_rest()
                await error_response(scope["path"], error)(scope, receive, counted_send)
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
