"""A real server on a real socket, in a thread of the test's process, with a tiny model."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from exlm import Cache, Config, Lora, Model, Tokenizer
from exlm.serve import Engine, GeneratorParts, Limits, ModelSpec, Options, create_app, listen
from exlm.serve.server import uvicorn_config

PATIENCE = 30.0


def load_tiny(listing: ModelSpec) -> GeneratorParts:
    """A model folder with a cache of 16 pages, or of as many as the spec says."""
    config = Config(listing.path)
    model = Model(config)
    model.load()
    cache = Cache(model, max_seq_len=listing.cache_tokens or 4096)
    options: dict[str, Any] = {"max_batch_size": listing.max_batch_size}
    if listing.draft == "ngram":
        options["use_ngram_draft"] = True
    loras = {name: Lora.from_directory(model, place) for name, place in listing.loras.items()}
    return GeneratorParts(model, cache, Tokenizer(config), options, loras)


@dataclass
class RunningServer:
    """A running server with its engine and event loop."""

    port: int
    engine: Engine
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, key: str | None = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text) and headers of one request; `body` is sent as JSON unless it is bytes."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"Content-Type": "application/json"} if raw is not None else {}
            if key is not None:
                sent["Authorization"] = f"Bearer {key}"
            line.request(method, path, raw, {**sent, **headers})
            reply = line.getresponse()
            text = reply.read()
            kept = {name.lower(): value for name, value in reply.getheaders()}
            if kept.get("content-type", "").startswith("application/json"):
                return reply.status, json.loads(text), kept
            return reply.status, text.decode(errors="replace"), kept
        finally:
            line.close()

    def post(self, path: str, key: str | None = None, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a request with these fields."""
        return self.ask("POST", path, body, key)[:2]

    def events(self, path: str, key: str | None = None, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with `[DONE]`."""
        status, text, headers = self.ask("POST", path, {**body, "stream": True}, key)
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def wait(self, fact: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait until `fact` is true."""
        deadline = time.monotonic() + seconds
        while not fact():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)


@contextmanager
def slow_decode(server: RunningServer, before: Callable[[], Any], name: str = "tiny") -> Iterator[None]:
    """Call `before` before every forward pass of a served model."""
    runner: Any = server.engine.models[name].generator.generator._engine.runner
    decode = runner.decode

    def slow(*arguments: Any) -> Any:
        before()
        return decode(*arguments)

    runner.decode = slow
    try:
        yield
    finally:
        runner.decode = decode


@contextmanager
def listening(app: Any, limits: Limits) -> Iterator[tuple[int, asyncio.AbstractEventLoop]]:
    """Run an application until the block ends; yields its port and its event loop."""
    opened = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(app, limits, drain_seconds=1))
    found: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        found.append(asyncio.get_running_loop())
        await server.serve([opened])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        yield opened.getsockname()[1], found[0]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def running_server(engine: Engine, options: Options | None = None) -> Iterator[RunningServer]:
    """Serve what the engine has preloaded, until the block ends."""
    options = options or Options()
    with listening(create_app(engine, options), options.limits) as (port, loop):
        yield RunningServer(port, engine, loop)


def preloaded(folder: Path, name: str = "tiny", drain_seconds: float = 30.0, **options: Any) -> Engine:
    """An engine with one small model."""
    engine = Engine([ModelSpec(name, str(folder), **options)], load_tiny, drain_seconds=drain_seconds)
    engine.preload(name)
    return engine
