"""`exlm serve`: the OpenAI API for a model on this machine."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from exlm import InputError

LOCAL = frozenset(("127.0.0.1", "::1", "localhost"))
MODEL_HELP = "A folder, a .gguf file or owner/name on the Hub; a small default model if left out."

Model = Annotated[str | None, typer.Argument(help=MODEL_HELP)]
Host = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all of them.")]
Port = Annotated[int, typer.Option(help="The port; 0 is any that is free.")]
ApiKey = Annotated[
    list[str] | None, typer.Option(help="A key that clients must show; @FILE reads one from each line.")
]
AdminKey = Annotated[
    list[str] | None, typer.Option(help="A key that may also load and unload models; @FILE as above.")
]
Name = Annotated[str | None, typer.Option(help="What clients call the model; else its file's name.")]
Also = Annotated[
    list[str] | None, typer.Option(metavar="NAME=MODEL", help="Another model, for an admin to load.")
]
Lora = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FOLDER", help="An adapter for requests to name.")
]
MaxSeqLen = Annotated[int | None, typer.Option(help="Longest prompt and answer together.")]
CacheTokens = Annotated[int | None, typer.Option(help="Room that all requests share.")]
CacheType = Annotated[str, typer.Option(help="fp16, q8, q6, q4 or fp8.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")]
Draft = Annotated[str | None, typer.Option(help="A smaller model that guesses ahead, or ngram.")]
MaxBatchSize = Annotated[int | None, typer.Option(help="Sequences that run at once.")]
MaxRequests = Annotated[int, typer.Option(help="Requests under way before 429 is answered.")]
MaxTokens = Annotated[int | None, typer.Option(help="The largest max_tokens a request may have.")]
MaxBody = Annotated[int, typer.Option(help="Bytes of a request.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A sampler setting for requests that say nothing."),
]
DrainSeconds = Annotated[float, typer.Option(help="For requests under way when told to stop.")]
StallSeconds = Annotated[
    float, typer.Option(help="End with status 70 if the engine is silent for so long; 0 never.")
]
Reports = Annotated[Path | None, typer.Option(help="A folder for reports of a stuck engine.")]
Quiet = Annotated[bool, typer.Option("-q", help="No progress.")]


def serve(
    model: Model = None,
    host: Host = "127.0.0.1",
    port: Port = 5000,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    name: Name = None,
    also: Also = None,
    lora: Lora = None,
    max_seq_len: MaxSeqLen = None,
    cache_tokens: CacheTokens = None,
    cache_type: CacheType = "fp16",
    device: Device = None,
    dtype: Dtype = None,
    draft: Draft = None,
    max_batch_size: MaxBatchSize = None,
    max_requests: MaxRequests = 512,
    max_tokens: MaxTokens = None,
    max_body: MaxBody = 4 << 20,
    setting: Setting = None,
    drain_seconds: DrainSeconds = 30.0,
    stall_seconds: StallSeconds = 120.0,
    reports: Reports = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP, with the OpenAI API."""
    from exlm import serve as server

    shared: dict[str, Any] = {
        "max_seq_len": max_seq_len,
        "cache_tokens": cache_tokens,
        "cache_type": cache_type,
        "device": device,
        "dtype": dtype,
        "max_batch_size": max_batch_size,
    }
    first = server.Listing(name or _named(model), model, draft=draft, loras=_pairs("--lora", lora), **shared)
    others = [server.Listing(one, path, **shared) for one, path in _pairs("--also", also).items()]
    if first.name in {listing.name for listing in others}:
        raise InputError(f"Two models are called {first.name!r}: name one of them with --name or --also.")
    keyring = server.Keyring(_keys(api_key), _keys(admin_key))
    sampling = _settings(setting)
    bounds = server.Bounds(body=max_body, tokens=max_tokens, requests=max_requests, sampling=sampling)
    engine = server.Engine([first, *others], lambda listing: server.load(listing, progress=not quiet))
    with server.listen(host, port) as opened:  # a port that is taken should not cost a model's loading time
        engine.preload(first.name)
        server.serve(
            engine,
            server.Options(
                keyring=keyring, bounds=bounds, hosts=None if keyring or host not in LOCAL else LOCAL
            ),
            opened,
            drain_seconds=drain_seconds,
            stall_seconds=stall_seconds or None,
            reports=reports,
            started=lambda: _announce(first.name, opened, bool(keyring)),
        )


def _announce(name: str, opened: socket.socket, guarded: bool) -> None:
    console = Console(stderr=True)
    shown, port = opened.getsockname()[:2]
    console.print(f"{name} at http://{f'[{shown}]' if ':' in shown else shown}:{port}", soft_wrap=True)
    if shown not in LOCAL and not guarded:
        console.print("[yellow]Anybody who can reach this machine may use it: set --api-key.[/]")


def _named(model: str | None) -> str:
    """What a model is called if nobody says."""
    return "default" if model is None else Path(model).name.removesuffix(".gguf") or "default"


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name or not equals or not value:
            raise InputError(f"{option} takes NAME=PLACE, found {one!r}.")
        pairs[name] = value
    return pairs


def _keys(given: list[str] | None) -> list[str]:
    """Keys as they are given, or one from each line of a file."""
    keys: list[str] = []
    for one in given or ():
        if one.startswith("@"):
            try:
                lines = Path(one[1:]).read_text(encoding="utf-8").splitlines()
            except OSError as error:
                raise InputError(f"The keys in {one[1:]} cannot be read: {error}.") from None
            keys += [line.strip() for line in lines if line.strip()]
        else:
            keys.append(one)
    if any(not key or not key.isascii() or not key.isprintable() for key in keys):
        raise InputError("A key must be printable ASCII, and not empty.")
    return keys


def _settings(given: list[str] | None) -> dict[str, Any]:
    """Sampler settings, their values as JSON."""
    from exlm.serve.translate import SETTINGS

    out: dict[str, Any] = {}
    for name, value in _pairs("--set", given).items():
        if name not in SETTINGS:
            raise InputError(
                f"--set: there is no sampler setting {name!r}; there are: {', '.join(SETTINGS)}."
            )
        try:
            out[name] = json.loads(value)
        except ValueError:
            raise InputError(f"--set {name}: {value!r} is no number, true or false.") from None
    return out
