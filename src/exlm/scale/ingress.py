"""The front of a cluster: requests to replicas, within limits, and the deaths of replicas kept from clients.

An ASGI application that knows no Ray: it is given a function that asks some replica. Keys, sizes and JSON are
`exlm.serve`'s guard's business, who stands before it. A request whose replica dies is asked again, as long as
nothing of an answer has gone out; a stream that has begun ends with an error event.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from typing import TypeAlias

from exlm.serve import APIError, ApiKeys
from exlm.serve.errors import RETRY_SECONDS
from exlm.serve.limits import ConcurrencyLimiter
from exlm.serve.middleware import App, Message, Receive, RequestMiddleware, Scope, Send
from exlm.serve.sse import JsonResponse, sse_event

from .affinity import prompt_blocks
from .replica import ReplicaRequest, ServerConfig

Ask: TypeAlias = Callable[[ReplicaRequest, Sequence[bytes]], AsyncGenerator[list[Message], None]]
"""Asks a replica, chosen by the blocks of the prompt; the messages of its answer, a few at a time."""

GENERATION = frozenset(("/v1/chat/completions", "/v1/completions"))
MAX_ATTEMPTS = 3
"""Replicas that a request may lose before it is given up: it may be what kills them."""

log = logging.getLogger(__name__)


class Ingress:
    """Hands requests to replicas, within limits."""

    def __init__(
        self,
        ask: Ask,
        lost: tuple[type[Exception], ...],
        requests: int = 512,
        tenant_requests: int | None = None,
        shared: bool = False,
    ) -> None:
        """`lost` is what `ask` raises when a replica dies; `tenant_requests` limits those of one key.

        `shared` is whether there are several keys to be fair to.
        """
        self._ask, self._lost = ask, lost
        self._limiter = ConcurrencyLimiter(requests, "requests", shared)
        self._most, self._tenants = tenant_requests, dict[str, ConcurrencyLimiter]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has passed the guard."""
        tenant: str = scope["state"]["caller"].salt if "caller" in scope.get("state", {}) else ""
        body = (await receive()).get("body", b"")
        try:
            with ExitStack() as stack:
                if scope["path"] in GENERATION:
                    stack.enter_context(self._limiter.slot(tenant))
                    if self._most is not None:
                        stack.enter_context(self._tenant(tenant, self._most).slot())
                await self._answer(scope, body, tenant, send)
        except APIError as problem:
            await JsonResponse(problem.body, problem.status, headers=problem.headers)(scope, receive, send)

    def _tenant(self, name: str, most: int) -> ConcurrencyLimiter:
        return self._tenants.setdefault(name, ConcurrencyLimiter(most, "requests of this key"))

    async def _answer(self, scope: Scope, body: bytes, tenant: str, send: Send) -> None:
        if scope["path"].startswith("/v1/admin/"):
            raise APIError(501, "The models of a cluster change when it is deployed again, not one by one.")
        asked = ReplicaRequest(
            scope["method"], scope["path"], scope["query_string"], tuple(scope["headers"]), body
        )
        blocks = prompt_blocks(body, tenant) if scope["path"] in GENERATION else ()
        for _ in range(MAX_ATTEMPTS):
            reply = _ResponseRelay(send)
            try:
                async with aclosing(self._ask(asked, blocks)) as messages:
                    async for some in messages:
                        await reply.forward(some)
                return
            except self._lost as error:
                if reply.complete:
                    return
                log.warning("A replica was lost with a request: %s", error)
                if reply.started:
                    await reply.fail()
                    return
        raise APIError(
            503,
            f"The replicas that had this request were lost, {MAX_ATTEMPTS} times in a row: try again.",
            code="replica_lost",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )


class _ResponseRelay:
    """What goes to a client: an answer at once when it is whole, a stream as it comes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []
        self._flows = False
        self.started = self.complete = False

    async def forward(self, messages: Sequence[Message]) -> None:
        """Some more of the answer."""
        for message in messages:
            if message["type"] == "http.response.start":
                kind = dict(message["headers"]).get(b"content-type", b"")
                self._flows = kind.startswith(b"text/event-stream")
        self._held += messages
        last = self._held[-1]
        if last["type"] != "http.response.body":  # until there is some text, another replica can begin anew
            return
        self.complete = not last.get("more_body")
        if self._flows or self.complete:
            self.started = True
            for message in self._held:
                await self._send(message)
            self._held.clear()

    async def fail(self) -> None:
        """End a stream that cannot go on."""
        problem = APIError(
            503, "The replica was lost; what came so far is not the whole.", code="replica_lost"
        )
        await self._send({"type": "http.response.body", "body": sse_event(problem.body)})


def with_middleware(front: App, terms: ServerConfig, hosts: frozenset[str] | None) -> RequestMiddleware:
    """A front that nobody reaches without a key, with too much, or with what is not JSON."""
    keyring = ApiKeys(terms.keys, terms.admin_keys)
    return RequestMiddleware(front, keyring, terms.limits, lambda route, status: None, hosts)
