"""The server on a cluster: two Ray Serve deployments, the front and the replicas behind it.

Clients reach Ray Serve's own proxies, these the front, and the front a replica, which the prefix router
chooses. What a request means is decided where it always is, in the application that every replica has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from exlm import InputError
from exlm.serve import Limits, ModelSpec
from exlm.serve.middleware import App, Message, Receive, Scope, Send

from .cluster import import_ray
from .config import ClusterConfig, ingress_options, replica_options
from .ingress import Ingress, with_middleware
from .replica import Replica, ReplicaRequest, ServerConfig

APPLICATION_NAME = "exlm"
"""The Ray Serve application. To deploy it again replaces the replicas one by one."""

SAID = frozenset(("path", "least", "most"))
"""What a configuration file says in other words: `model` and `replicas`."""


@dataclass(frozen=True)
class Service:
    """All that a cluster serves, and how."""

    spec: ModelSpec
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tenant_requests: int | None = None
    """Requests of one key under way; None is any number. Several fronts have equal shares of it."""
    hosts: frozenset[str] | None = None
    """The names in `Host` that are answered; None is any."""


class ReplicaDeployment(Replica):
    """A replica as Ray Serve has it."""

    def __init__(self, listing: ModelSpec, terms: ServerConfig, tensor_parallel: int) -> None:
        from ray import serve

        super().__init__(listing, terms, tensor_parallel, serve.get_replica_context().replica_id.unique_id)


class IngressDeployment:
    """The front as Ray Serve has it: an HTTP request in, whatever a replica answers out."""

    def __init__(self, replicas: Any, service: Service) -> None:
        from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError

        self._replicas = replicas.options(stream=True)
        shape, most = service.cluster, service.tenant_requests
        front = Ingress(
            self._ask,
            (RayActorError, WorkerCrashedError, ObjectLostError),  # the last, with a machine
            service.server.limits.requests,
            None if most is None else -(-most // shape.fronts),
            len(service.server.keys) + len(service.server.admin_keys) > 1,
        )
        self._app = with_middleware(front, service.server, service.hosts)

    async def __call__(self, request: Any) -> Any:
        """What Ray Serve calls: a response that is our application."""
        return _relayed(self._app)

    async def _ask(
        self, asked: ReplicaRequest, blocks: Sequence[bytes]
    ) -> AsyncGenerator[list[Message], None]:
        answer = self._replicas.ask.remote(asked, blocks=blocks)
        try:
            async for messages in answer:
                yield messages
        finally:
            answer.cancel()


def _relayed(app: App) -> Any:
    """A response that lets an application answer: Ray Serve sends responses as they are."""
    from starlette.responses import Response

    class Relayed(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)

    return Relayed()


def bind_application(service: Service) -> Any:
    """The application, for `serve.run`."""
    serve = import_ray("serve")
    shape = service.cluster
    replicas = serve.deployment(ReplicaDeployment, name="Replica", **replica_options(shape)).bind(
        service.spec, service.server, shape.tensor_parallel
    )
    return serve.deployment(IngressDeployment, name="Front", **ingress_options(shape)).bind(replicas, service)


def deploy(service: Service, host: str = "127.0.0.1", port: int = 5000) -> None:
    """Serve on the cluster that is connected; returns when every replica is ready.

    An application that is there is updated: new replicas start, old ones finish what they have. `host` and
    `port` are those of the first time.
    """
    serve = import_ray("serve")
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    serve.run(bind_application(service), name=APPLICATION_NAME, route_prefix="/")


def application(wishes: Mapping[str, Any]) -> Any:
    """The application for a Ray Serve configuration file: `import_path: exlm.scale:application`.

    Wishes are the fields of `Listing`, `Shape` and `Bounds` by name, and `model` (its path), `replicas`
    ("2..8"), `keys_file` and `tenant_requests`.
    """
    return bind_application(service_from_config(wishes))


def service_from_config(wishes: Mapping[str, Any]) -> Service:
    """A service from a configuration's names and values; an unknown name is an error."""
    left = dict(wishes)
    path = left.pop("model", None)
    named = left.pop("name", None) or ("default" if path is None else Path(path).name.removesuffix(".gguf"))
    keys: list[str] = []
    if (place := left.pop("keys_file", None)) is not None:
        keys = [line.strip() for line in Path(place).read_text(encoding="utf-8").splitlines() if line.strip()]
    tenant = left.pop("tenant_requests", None)
    replicas = str(left.pop("replicas", 1))
    parts = [
        {one.name: left.pop(one.name) for one in fields(kind) if one.name in left and one.name not in SAID}
        for kind in (ModelSpec, ClusterConfig, Limits)
    ]
    if left:
        raise InputError(f"There is no setting {sorted(left)[0]!r} for a service on Ray.")
    return Service(
        ModelSpec(named, path, **parts[0]),
        ServerConfig(keys, limits=Limits(**parts[2])),
        ClusterConfig.from_replicas(replicas, **parts[1]),
        tenant,
    )
