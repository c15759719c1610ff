"""The ingress of a cluster: forwards requests to replicas, within limits, and retries when a replica dies.

It is an ASGI application that does not use Ray: it is given a function that calls a replica. Requests first
pass the middleware of `exlm.serve`, which checks keys, headers and sizes. A request whose replica dies is
sent to another one as long as nothing of its response has been sent; a stream that has started ends with an
error event.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exlm.serve import APIError, ApiKeys
from exlm.serve.dialects import endpoint_at, error_response
from exlm.serve.errors import RETRY_SECONDS
from exlm.serve.limits import FairLimiter
from exlm.serve.middleware import RequestBody, RequestMiddleware
from exlm.serve.responses import Endpoint

from .affinity import prompt_blocks
from .cluster import ServerConfig


@dataclass(frozen=True)
class ReplicaRequest:
    """An HTTP request in the form in which it is sent to a replica."""

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""

    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


CallReplica: TypeAlias = Callable[[ReplicaRequest, Sequence[bytes]], AsyncGenerator[list[Message], None]]
"""Calls a replica, chosen by the blocks of the prompt; yields the ASGI messages of its response."""

MAX_ATTEMPTS = 3
"""Replicas a request may lose before it fails: the request itself may be what kills them."""

log = logging.getLogger(__name__)


class Ingress:
    """Forwards requests to replicas, within limits."""

    def __init__(
        self,
        call_replica: CallReplica,
        replica_errors: tuple[type[Exception], ...],
        requests: int = 512,
        tenant_requests: int | None = None,
        shared: bool = False,
    ) -> None:
        """`replica_errors` are the exceptions of `call_replica` when a replica dies.

        `tenant_requests` limits the requests of one key; `shared`: several keys share `requests` fairly.
        """
        self._call_replica, self._replica_errors = call_replica, replica_errors
        self._limiter = FairLimiter(requests, "requests", shared)
        self._tenant_limit, self._tenants = tenant_requests, dict[str, FairLimiter]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: dict[str, Any] = scope.get("state", {})
        tenant: str = state["caller"].salt if "caller" in state else ""
        body: RequestBody | None = state.get("body")
        endpoint = endpoint_at(scope["path"])
        try:
            blocks: Sequence[bytes] = ()
            raw = b""
            if body is not None:
                if endpoint is not None:
                    blocks = await body.inspect_json(partial(prompt_blocks, tenant=tenant))
                raw = bytes(body.raw)
                body.release()
            with ExitStack() as stack:
                if endpoint is not None:
                    stack.enter_context(self._limiter.slot(tenant))
                    if self._tenant_limit is not None:
                        limiter = FairLimiter(self._tenant_limit, "requests of this key")
                        stack.enter_context(self._tenants.setdefault(tenant, limiter).slot())
                await self._forward(scope, raw, blocks, send, endpoint)
        except APIError as error:
            await error_response(scope["path"], error)(scope, receive, send)

    async def _forward(
        self, scope: Scope, body: bytes, blocks: Sequence[bytes], send: Send, endpoint: Endpoint | None
    ) -> None:
        if scope["path"].startswith("/v1/admin/"):
            raise APIError(501, "The models of a cluster change when it is deployed again, not one by one.")
        request = ReplicaRequest(scope["method"], scope["path"], scope["query_string"], tuple(scope["headers"]), body)
        for _ in range(MAX_ATTEMPTS):
            relay = _ResponseRelay(send, endpoint)
            try:
                async with aclosing(self._call_replica(request, blocks)) as response:
                    async for messages in response:
                        await relay.forward(messages)
                return
            except self._replica_errors as error:
                if relay.complete:
                    return
                log.warning("A replica was lost with a request: %s", error)
                if relay.started:
                    await relay.fail()
                    return
        raise APIError(
            503,
            f"The replicas that had this request were lost, {MAX_ATTEMPTS} times in a row: try again.",
            code="replica_lost",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )


class _ResponseRelay:
    """Forwards a response to the client: a stream as it comes, any other response once it is complete."""

    def __init__(self, send: Send, endpoint: Endpoint | None) -> None:
        """`endpoint` is that of the request; None if it generates no text."""
        self._send, self._endpoint = send, endpoint
        self._buffered: list[Message] = []
        self._is_stream = False
        self.started = self.complete = False

    async def forward(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start" and self._endpoint is not None:
                content_type = dict(message["headers"]).get(b"content-type", b"")
                self._is_stream = content_type.startswith(self._endpoint.writer.MEDIA_TYPE.encode())
        self._buffered += messages
        last = self._buffered[-1]
        if last["type"] != "http.response.body":  # until there is a body, another replica can start anew
            return
        self.complete = not last.get("more_body")
        if self._is_stream or self.complete:
            self.started = True
            for message in self._buffered:
                await self._send(message)
            self._buffered.clear()

    async def fail(self) -> None:
        """End a stream that has started with an error event."""
        assert self._endpoint is not None
        writer = self._endpoint.writer
        error = APIError(503, "The replica was lost; what came so far is not the whole.", code="replica_lost")
        await self._send({"type": "http.response.body", "body": writer.encode(writer.error_event(error))})


def with_middleware(app: ASGIApp, config: ServerConfig, hosts: frozenset[str] | None) -> RequestMiddleware:
    """The application behind the server's middleware: keys, headers, sizes."""
    api_keys = ApiKeys(config.keys, config.admin_keys)
    return RequestMiddleware(app, api_keys, config.limits, hosts)
