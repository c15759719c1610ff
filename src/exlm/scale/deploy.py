"""The server on a cluster: two Ray Serve deployments, the ingress and the replicas behind it.

Clients reach Ray Serve's proxies, these the ingress, and the ingress a replica, which the prefix router
chooses. Every replica has the whole application of `exlm.serve`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exlm import InputError
from exlm.serve import Limits, ModelSpec

from .cluster import import_ray
from .config import ClusterConfig, ServerConfig, ingress_options, replica_options
from .ingress import Ingress, with_middleware
from .replica import Replica, ReplicaRequest

APPLICATION_NAME = "exlm"
"""The Ray Serve application. Deploying it again replaces the replicas one by one."""

RENAMED_FIELDS = frozenset(("path", "least", "most"))
"""Fields that have other keys in a configuration file: `model` and `replicas`."""


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
    """The Ray Serve deployment of a replica."""

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
            self._ask,
            (RayActorError, WorkerCrashedError, ObjectLostError),  # the last if a machine is lost
            service.server.limits.requests,
            None if limit is None else -(-limit // service.cluster.fronts),
            len(service.server.keys) + len(service.server.admin_keys) > 1,
        )
        self._app = with_middleware(ingress, service.server, service.hosts)

    async def __call__(self, request: Any) -> Any:
        """Answer an HTTP request; Ray Serve calls the returned response as an ASGI application."""
        return _AppResponse(self._app)

    async def _ask(
        self, request: ReplicaRequest, blocks: Sequence[bytes]
    ) -> AsyncGenerator[list[Message], None]:
        response = self._replicas.ask.remote(request, blocks=blocks)
        try:
            async for messages in response:
                yield messages
        finally:
            response.cancel()


class _AppResponse(Response):
    """A response that lets an application answer."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


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
    left = dict(args)
    path = left.pop("model", None)
    name = left.pop("name", None) or ("default" if path is None else Path(path).name.removesuffix(".gguf"))
    keys: list[str] = []
    if (keys_file := left.pop("keys_file", None)) is not None:
        keys = [
            line.strip() for line in Path(keys_file).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    tenant_requests = left.pop("tenant_requests", None)
    replicas = str(left.pop("replicas", 1))
    parts = [
        {
            one.name: left.pop(one.name)
            for one in fields(kind)
            if one.name in left and one.name not in RENAMED_FIELDS
        }
        for kind in (ModelSpec, ClusterConfig, Limits)
    ]
    if left:
        raise InputError(f"There is no setting {sorted(left)[0]!r} for a service on Ray.")
    return Service(
        ModelSpec(name, path, **parts[0]),
        ServerConfig(keys, limits=Limits(**parts[2])),
        ClusterConfig.from_replicas(replicas, **parts[1]),
        tenant_requests,
    )
