"""`exlm serve`: the OpenAI API for a model on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from exlm import InputError

from .cluster import Gpus, Ray, Replicas, cluster_shape, refuse_without_ray, serve_on_ray
from .model_options import MODEL_HELP, ModelOptions, parse_pairs, with_model_options

LOCAL = frozenset(("127.0.0.1", "::1", "localhost"))

Model = Annotated[str | None, typer.Argument(help=MODEL_HELP)]
Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")]
ApiKey = Annotated[
    list[str] | None, typer.Option(help="A key that clients must send; @FILE reads one from each line.")
]
AdminKey = Annotated[
    list[str] | None, typer.Option(help="A key that may also load and unload models; @FILE as above.")
]
Also = Annotated[
    list[str] | None, typer.Option(metavar="NAME=MODEL", help="Another model, which an admin can load.")
]
MaxRequests = Annotated[int, typer.Option(min=1, help="Most requests at once; more are answered with 429.")]
TenantRequests = Annotated[
    int | None, typer.Option(min=1, help="With --ray: most requests at once for each key.")
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Largest max_tokens of a request.")]
MaxBody = Annotated[int, typer.Option(min=1, help="Largest request body, in bytes.")]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Default of a sampler setting, for requests without it."
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option(min=0, max=86400, help="Time for running requests to finish before stopping or unloading."),
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
    hosting: ModelOptions,
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
    first = hosting.listing(model)
    others = [hosting.listing_of(name, path) for name, path in parse_pairs("--also", also, "MODEL").items()]
    if first.name in {listing.name for listing in others}:
        raise InputError(f"Two models are called {first.name!r}: name one of them with --name or --also.")
    keyring = server.ApiKeys(_read_keys(api_key), _read_keys(admin_key))
    sampling, reports = _parse_settings(setting), _make_folder(reports)
    bounds = server.Limits(body=max_body, tokens=max_tokens, requests=max_requests, sampling=sampling)
    answered = None if keyring or host not in LOCAL else LOCAL
    if ray:
        if others:
            raise InputError("A cluster serves one model: leave --also out, or deploy another.")
        keys, shape = (
            (_read_keys(api_key), _read_keys(admin_key)),
            partial(cluster_shape, replicas, gpus, drain=drain_seconds),
        )
        told = partial(_announce, first.name, guarded=bool(keyring))
        serve_on_ray(first, keys, bounds, shape, (tenant_requests, answered), (host, port), told)
        return
    engine = server.Engine(
        [first, *others],
        lambda listing: server.load(listing, progress=not quiet),
        drain_seconds=drain_seconds,
    )
    with server.listen(host, port) as opened:  # fail on a taken port before the model is loaded
        engine.preload(first.name)
        server.serve(
            engine,
            server.Options(api_keys=keyring, limits=bounds, hosts=answered),
            opened,
            drain_seconds=drain_seconds,
            stall_seconds=stall_seconds or None,
            reports=reports,
            started=lambda: _announce(first.name, opened.getsockname(), bool(keyring)),
        )


def _announce(name: str, where: Sequence[Any], guarded: bool) -> None:
    console = Console(stderr=True)
    shown, port = where[:2]
    console.print(f"{name} at http://{f'[{shown}]' if ':' in shown else shown}:{port}", soft_wrap=True)
    if shown not in LOCAL and not guarded:
        console.print("[yellow]Without --api-key, everyone who can reach this machine can use the server.[/]")


def _read_keys(given: list[str] | None) -> list[str]:
    """The keys given on the command line, those of each @FILE among them."""
    keys: list[str] = []
    for one in given or ():
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


def _parse_settings(given: list[str] | None) -> dict[str, Any]:
    """Parse --set NAME=VALUE; values are JSON, and checked like those of a request."""
    from pydantic import ValidationError

    from exlm.serve.errors import validation_error
    from exlm.serve.generation import SETTINGS
    from exlm.serve.schema import Sampling

    out: dict[str, Any] = {}
    for name, value in parse_pairs("--set", given, "VALUE").items():
        if name not in SETTINGS:
            raise InputError(
                f"--set: there is no sampler setting {name!r}; there are: {', '.join(SETTINGS)}."
            )
        try:
            out[name] = json.loads(value)
        except ValueError:
            raise InputError(f"--set {name}: {value!r} is no number, true or false.") from None
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
        raise InputError(f"--reports {reports} is no folder that can be made: {error}.") from None
    return reports
