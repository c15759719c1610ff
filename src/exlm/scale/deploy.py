"""The server on a cluster: two Ray Serve deployments, the ingress and the replicas behind it.

Clients reach Ray Serve's proxies, these the ingress, and the ingress a replica, which the prefix router
chooses. A replica has the application of `exlm.serve` with its engine, called in its process instead of over
a socket. `Replica` and `Ingress` do not use Ray; the deployments do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exlm import ExlmError, InputError
from exlm.serve import ApiKeys, Engine, Limits, ModelSpec, Options, create_app, load

from .cluster import ClusterConfig, ServerConfig, import_ray
from .ingress import Ingress, ReplicaRequest, with_middleware

MAX_BUFFERED_MESSAGES = 64
"""ASGI messages of a response that wait until the ingress takes them."""


class NotReady(ExlmError, RuntimeError):
    """A replica's engine makes no tokens."""


class Replica:
    """A loaded model with its server's application."""

    def __init__(self, spec: ModelSpec, config: ServerConfig, tensor_parallel: int = 1, name: str = "replica") -> None:
        """Load the model; `name` is the value of the response header `x-exlm-replica`."""
        self._config, self._name = config, name
        self._engine = Engine([spec], partial(load, tensor_parallel=tensor_parallel))
        self._engine.preload(spec.name)
        api_keys = ApiKeys(config.keys, config.admin_keys)
        self._app = create_app(self._engine, Options(api_keys, config.limits, config.ready_seconds))
        self._lifespan = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()
        self._started = False

    async def handle(self, request: ReplicaRequest, blocks: Sequence[bytes] = ()) -> AsyncIterator[list[Message]]:
        """Answer a request with the ASGI messages of its response, a few at a time.

        `blocks` is not used here: the router reads it from the call.
        """
        await self._start()
        response: asyncio.Queue[Message | None] = asyncio.Queue(MAX_BUFFERED_MESSAGES)
        disconnected = asyncio.Event()
        unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def run_app() -> None:
            try:
                await self._app(request.scope(), receive, response.put)
            finally:
                await response.put(None)

        task = asyncio.create_task(run_app())
        try:
            while (message := await response.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-exlm-replica", self._name.encode())]
                messages = [message]
                while not response.empty() and (more := response.get_nowait()) is not None:
                    messages.append(more)
                yield messages
                if messages[-1]["type"] == "http.response.body" and not messages[-1].get("more_body"):
                    break
            disconnected.set()
            await task
        finally:
            disconnected.set()
            task.cancel()

    async def check_health(self) -> None:
        """Raise NotReady unless the engine makes a token in time."""
        await self._start()
        if not await self._engine.find(None).is_ready(self._config.ready_seconds):
            raise NotReady(f"No token came within {self._config.ready_seconds} s.")

    async def close(self) -> None:
        """Cancel all requests and free the memory."""
        await self._lifespan.aclose()

    async def _start(self) -> None:
        async with self._starting:
            if not self._started:
                await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
                self._started = True


ROUTER_CLASS = "exlm.scale.router.PrefixRouter"
APPLICATION_NAME = "exlm"
"""The Ray Serve application. Deploying it again replaces the replicas one by one."""

RENAMED_FIELDS = frozenset(("path", "least", "most"))
"""Fields that a configuration file sets by other keys: `model` and `replicas`."""


@dataclass(frozen=True)
class Service:
    """What a cluster serves, and how."""

    spec: ModelSpec
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tenant_requests: int | None = None
    """Concurrent requests of one key; None is any number. Several ingresses have equal shares of it."""
    hosts: frozenset[str] | None = None
    """The accepted names in `Host`; None accepts any."""


class ReplicaDeployment(Replica):
    """The Ray Serve deployment of a replica, which is named by its id in Ray."""

    def __init__(self, spec: ModelSpec, config: ServerConfig, tensor_parallel: int) -> None:
        from ray import serve

        super().__init__(spec, config, tensor_parallel, serve.get_replica_context().replica_id.unique_id)


class IngressDeployment:
    """The Ray Serve deployment of the ingress."""

    def __init__(self, replicas: Any, service: Service) -> None:
        from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError

        self._replicas = replicas.options(stream=True)
        limit = service.tenant_requests
        ingress = Ingress(
            self._call_replica,
            (RayActorError, WorkerCrashedError, ObjectLostError),  # the last one when a machine is lost
            service.server.limits.requests,
            None if limit is None else -(-limit // service.cluster.fronts),
            len(service.server.keys) + len(service.server.admin_keys) > 1,
        )
        self._app = with_middleware(ingress, service.server, service.hosts)

    async def __call__(self, request: Any) -> Any:
        """Handle an HTTP request; Ray Serve calls the returned response as an ASGI application."""
        return _AppResponse(self._app)

    async def _call_replica(
        self, request: ReplicaRequest, blocks: Sequence[bytes]
    ) -> AsyncGenerator[list[Message], None]:
        response = self._replicas.handle.remote(request, blocks=blocks)
        try:
            async for messages in response:
                yield messages
        finally:
            response.cancel()


class _AppResponse(Response):
    """A response that is sent by an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def replica_options(config: ClusterConfig) -> dict[str, Any]:
    """Options of the deployment of replicas.

    All GPUs of a replica are one bundle of a placement group, so that they are on one machine and visible to
    the replica's process, which starts its tensor-parallel ranks itself.
    """
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": config.cpus, "num_gpus": config.gpus},
        "max_ongoing_requests": config.ongoing,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "health_check_period_s": 10,
        "health_check_timeout_s": 60,
        "graceful_shutdown_timeout_s": config.drain,
        "graceful_shutdown_wait_loop_s": 0.5,
        "request_router_config": {
            "request_router_class": ROUTER_CLASS,
            "request_router_kwargs": {"slack": config.slack},
        },
    }
    if config.gpus > 1:
        options["placement_group_bundles"] = [{"CPU": config.cpus, "GPU": config.gpus}]
        options["placement_group_strategy"] = "STRICT_PACK"
    if config.least == config.most:
        return options | {"num_replicas": config.least}
    scaling = {
        "min_replicas": config.least,
        "max_replicas": config.most,
        "target_ongoing_requests": config.queue,
        "upscale_delay_s": config.patience,
        "downscale_delay_s": 10 * config.patience,
    }
    return options | {"autoscaling_config": scaling}


def ingress_options(config: ClusterConfig) -> dict[str, Any]:
    """Options of the deployment of the ingress, which takes every request and does its own limiting."""
    return {
        "num_replicas": config.fronts,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 100_000,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "graceful_shutdown_timeout_s": config.drain,
        "graceful_shutdown_wait_loop_s": 0.5,
    }


def bind_application(service: Service) -> Any:
    """The application, for `serve.run`."""
    serve = import_ray("serve")
    config = service.cluster
    replicas = serve.deployment(ReplicaDeployment, name="Replica", **replica_options(config)).bind(
        service.spec, service.server, config.tensor_parallel
    )
    ingress = serve.deployment(IngressDeployment, name="Front", **ingress_options(config))
    return ingress.bind(replicas, service)


def deploy(service: Service, host: str = "127.0.0.1", port: int = 5000) -> None:
    """Serve on the connected cluster; returns when every replica is ready.

    A deployed application is updated: new replicas start, old ones finish their requests. `host` and `port`
    stay those of the first deployment.
    """
    serve = import_ray("serve")
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    serve.run(bind_application(service), name=APPLICATION_NAME, route_prefix="/")


def application(args: Mapping[str, Any]) -> Any:
    """The application for a Ray Serve configuration file: `import_path: exlm.scale:application`.

    The arguments are the fields of `ModelSpec`, `ClusterConfig` and `Limits` by name, and `model` (its path),
    `replicas` ("2..8"), `keys_file` and `tenant_requests`.
    """
    return bind_application(service_from_config(args))


def service_from_config(args: Mapping[str, Any]) -> Service:
    """A service from the arguments of a configuration file; an unknown one is an error."""
    rest = dict(args)
    path = rest.pop("model", None)
    name = rest.pop("name", None) or ("default" if path is None else Path(path).name.removesuffix(".gguf"))
    keys: list[str] = []
    if (keys_file := rest.pop("keys_file", None)) is not None:
        lines = Path(keys_file).read_text(encoding="utf-8").splitlines()
        keys = [line.strip() for line in lines if line.strip()]
    tenant_requests = rest.pop("tenant_requests", None)
    replicas = str(rest.pop("replicas", 1))

    def take(kind: type[ModelSpec] | type[ClusterConfig] | type[Limits]) -> dict[str, Any]:
        names = {field.name for field in fields(kind)} - RENAMED_FIELDS
        return {name: rest.pop(name) for name in names & rest.keys()}

    spec, cluster, limits = take(ModelSpec), take(ClusterConfig), take(Limits)
    if rest:
        raise InputError(f"There is no setting {sorted(rest)[0]!r} for a service on Ray.")
    return Service(
        ModelSpec(name, path, **spec),
        ServerConfig(keys, limits=Limits(**limits)),
        ClusterConfig.from_replicas(replicas, **cluster),
        tenant_requests,
    )
