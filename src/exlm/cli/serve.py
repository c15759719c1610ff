"""`exlm serve`: the OpenAI API for a model on this machine."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from exlm import InputError

from .model_options import (
    MODEL_HELP,
    Gpus,
    ModelOptions,
    Ray,
    Replicas,
    cluster_config,
    parse_pairs,
    refuse_without_ray,
    with_model_options,
)

if TYPE_CHECKING:
    from exlm.scale import ClusterConfig, ServerConfig
    from exlm.serve import ModelSpec

LOCAL_HOSTS = frozenset(("127.0.0.1", "::1", "localhost"))

Model = Annotated[str | None, typer.Argument(help=MODEL_HELP)]
Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")]
ApiKey = Annotated[list[str] | None, typer.Option(help="A key that clients must send; @FILE reads one from each line.")]
AdminKey = Annotated[list[str] | None, typer.Option(help="A key that may also load and unload models; @FILE as above.")]
Also = Annotated[list[str] | None, typer.Option(metavar="NAME=MODEL", help="Another model, which an admin can load.")]
MaxRequests = Annotated[int, typer.Option(min=1, help="Most requests at once; more are answered with 429.")]
TenantRequests = Annotated[int | None, typer.Option(min=1, help="With --ray: most requests at once for each key.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Largest max_tokens of a request.")]
MaxBody = Annotated[int, typer.Option(min=1, help="Largest request body, in bytes.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Default of a sampler setting, for requests without it."),
]
DrainSeconds = Annotated[
    float, typer.Option(min=0, max=86400, help="Time for running requests to finish before stopping or unloading.")
]
StallSeconds = Annotated[
    float, typer.Option(min=0, help="Exit with status 70 after N seconds without progress; 0 disables.")
]
Reports = Annotated[Path | None, typer.Option(help="Folder for reports about a stuck engine.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")]


@with_model_options
def serve(
    model: Model = None,
    host: Host = "127.0.0.1",
    port: Port = 5000,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    *,
    model_options: ModelOptions,
    also: Also = None,
    max_requests: MaxRequests = 512,
    max_tokens: MaxTokens = None,
    max_body: MaxBody = 4 << 20,
    setting: Setting = None,
    drain_seconds: DrainSeconds = 30.0,
    stall_seconds: StallSeconds = 120.0,
    reports: Reports = None,
    ray: Ray = False,
    replicas: Replicas = "1",
    gpus: Gpus = None,
    tenant_requests: TenantRequests = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP with the OpenAI API, and a web chat.

    Example: exlm serve ./llama.gguf --host 0.0.0.0 --api-key @keys.txt
    """
    from exlm import serve as server

    refuse_without_ray(ray, replicas, gpus, tenant_requests)
    main_model = model_options.main_model(model)
    others = [model_options.additional_model(name, path) for name, path in parse_pairs("--also", also, "MODEL").items()]
    if main_model.name in {other.name for other in others}:
        raise InputError(f"Two models are called {main_model.name!r}: name one with --name or --also.")
    keys, admin_keys = _read_keys(api_key), _read_keys(admin_key)
    has_keys = bool(keys or admin_keys)
    sampling, reports = _parse_settings(setting), _make_folder(reports)
    limits = server.Limits(body=max_body, tokens=max_tokens, requests=max_requests, sampling=sampling)
    accepted_hosts = None if has_keys or host not in LOCAL_HOSTS else LOCAL_HOSTS
    if ray:
        from exlm.scale import ServerConfig

        if others:
            raise InputError("A cluster serves one model: leave --also out, or deploy another.")
        _serve_on_ray(
            main_model,
            ServerConfig(keys, admin_keys, limits),
            partial(cluster_config, replicas, gpus, main_model.device, drain=drain_seconds),
            tenant_requests,
            accepted_hosts,
            (host, port),
        )
        return
    engine = server.Engine(
        [main_model, *others],
        lambda model_spec: server.load(model_spec, progress=not quiet),
        drain_seconds=drain_seconds,
    )
    with server.listen(host, port) as listener:  # fail on a taken port before the model is loaded
        engine.preload(main_model.name)
        server.serve(
            engine,
            server.Options(api_keys=server.ApiKeys(keys, admin_keys), limits=limits, hosts=accepted_hosts),
            listener,
            drain_seconds=drain_seconds,
            stall_seconds=stall_seconds or None,
            reports=reports,
            started=lambda: _announce(main_model.name, listener.getsockname(), has_keys),
        )


def _serve_on_ray(
    model_spec: ModelSpec,
    server_config: ServerConfig,
    make_cluster_config: Callable[[], ClusterConfig],
    tenant_requests: int | None,
    accepted_hosts: frozenset[str] | None,
    address: tuple[str, int],
) -> None:
    """Deploy a service.

    A cluster that was running already keeps the service: the command returns, and running it again updates
    the deployment. A cluster that this command started serves until SIGINT or SIGTERM.
    """
    from exlm.scale import Service, cluster, deploy, import_ray
    from exlm.serve import listen

    import_ray("serve")
    with cluster() as started_here:
        if started_here:
            with listen(*address) as listener:  # fail now if the port is taken
                address = (address[0], listener.getsockname()[1])
        service = Service(model_spec, server_config, make_cluster_config(), tenant_requests, accepted_hosts)
        deploy(service, *address)
        _announce(model_spec.name, address, bool(server_config.keys or server_config.admin_keys))
        if not started_here:
            return
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
            signal.pause()
        except KeyboardInterrupt:
            import_ray("serve").shutdown()


def _announce(name: str, address: Sequence[Any], has_keys: bool) -> None:
    console = Console(stderr=True)
    host, port = address[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    console.print(f"{name} at {url}", soft_wrap=True)  # programs that start a server read the address from here
    console.print(f"A browser shows the web chat there; the OpenAI API is at {url}/v1", soft_wrap=True)
    if host not in LOCAL_HOSTS and not has_keys:
        console.print("[yellow]Without --api-key, anyone who can reach this machine can use the server.[/]")


def _read_keys(values: list[str] | None) -> list[str]:
    """The keys given on the command line, those of each @FILE among them."""
    keys: list[str] = []
    for one in values or ():
        if one.startswith("@"):
            try:
                lines = Path(one[1:]).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"The keys in {one[1:]} cannot be read: {error}.") from None
            found = [line.strip() for line in lines if line.strip()]
            if not found:  # an empty file would switch authentication off
                raise InputError(f"There is no key in {one[1:]}: write one in each line.")
            keys += found
        else:
            keys.append(one)
    if any(not key or not key.isascii() or not key.isprintable() for key in keys):
        raise InputError("A key must be printable ASCII, and not empty.")
    return keys


def _parse_settings(values: list[str] | None) -> dict[str, Any]:
    """Parse --set NAME=VALUE; values are JSON, and checked like those of a request."""
    from pydantic import ValidationError

    from exlm.serve.errors import validation_error
    from exlm.serve.generation import SETTINGS
    from exlm.serve.schema import Sampling

    out: dict[str, Any] = {}
    for name, value in parse_pairs("--set", values, "VALUE").items():
        if name not in SETTINGS:
            raise InputError(f"--set: there is no sampler setting {name!r}; there are: {', '.join(SETTINGS)}.")
        try:
            out[name] = json.loads(value)
        except ValueError:
            raise InputError(f"--set {name}: {value!r} is not a number, true or false.") from None
    try:
        return Sampling(**out).model_dump(exclude_none=True)
    except ValidationError as error:
        raise InputError(f"--set {validation_error(error.errors()).message}.") from None


def _make_folder(reports: Path | None) -> Path | None:
    """Create the folder for reports now: a stuck engine may not be able to."""
    try:
        if reports is not None:
            reports.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--reports {reports} cannot be created as a folder: {error}.") from None
    return reports
