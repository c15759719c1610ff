"""The routes. `create_app` joins an engine and its limits into an application; nothing is global.

A route checks who asks, has its request translated, and hands on what comes back. The thinking is elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles

from exlm import ExlmError, __version__

from .answering import Answering
from .body import LargeBodies, body_as
from .description import Described, streamed, taking
from .engine import Engine
from .events import ClientGone, JsonReply
from .guard import Guard, Scope
from .keys import Caller, Keyring
from .limits import Bounds
from .manual import page
from .metrics import Metrics
from .problems import Problem, invalid, problem_of
from .replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    ErrorReply,
    HealthReply,
    ModelCard,
    ModelList,
    StateReply,
    TokenizeReply,
)
from .schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ModelRequest,
    TokenizeRequest,
)
from .state import state_of

WEB = Path(__file__).with_name("web")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply}
    for status in (400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 500, 501, 503)
}
PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Said here, since machines disagree about them and browsers refuse scripts of another type."""
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
GONE = 499
"""The status of a reply that nobody reads."""

AskedChat = Annotated[ChatRequest, Depends(body_as(ChatRequest))]
AskedCompletion = Annotated[CompletionRequest, Depends(body_as(CompletionRequest))]
AskedEmbeddings = Annotated[EmbeddingsRequest, Depends(body_as(EmbeddingsRequest))]
AskedTokens = Annotated[TokenizeRequest, Depends(body_as(TokenizeRequest))]
AskedText = Annotated[DetokenizeRequest, Depends(body_as(DetokenizeRequest))]
AskedModel = Annotated[ModelRequest, Depends(body_as(ModelRequest))]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a server behaves, besides its models."""

    keyring: Keyring = field(default_factory=Keyring)
    bounds: Bounds = field(default_factory=Bounds)
    ready_seconds: float = 5.0
    """How soon a token must come for the server to count as ready."""
    hosts: frozenset[str] | None = None
    """The names in `Host` that are answered; None is any. A web page elsewhere can reach a local server only
    under a name of its own."""
    web: Path = WEB
    """A folder whose index.html, if there is one, is shown at `/`."""


def create_app(engine: Engine, options: Options | None = None) -> FastAPI:
    """A server for an engine, which it starts and closes."""
    options = options or Options()
    metrics = Metrics(engine)
    threads = LargeBodies()
    answering = Answering(engine, options.bounds, metrics, threads, shared=len(options.keyring) > 1)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(threads.close)
            stack.callback(answering.close)
            stack.push_async_callback(engine.close)
            await engine.start()
            yield

    app = Described(
        title="exlm",
        version=__version__,
        lifespan=lifespan,
        responses=ERRORS,
        separate_input_output_schemas=False,
        docs_url=None,  # the library's own pages are scripts of other servers
        redoc_url=None,
    )
    app.add_middleware(
        Guard,
        keyring=options.keyring,
        bounds=options.bounds,
        counted=metrics.count_reply,
        hosts=options.hosts,
        threads=threads,
    )
    _add_problems(app)
    _add_generation(app, answering)
    _add_texts(app, answering)
    _add_models(app, engine)
    _add_health(app, engine, metrics, options)
    _add_state(app, engine, answering, options)
    _add_manual(app)
    if (options.web / "index.html").is_file():
        app.mount("/", Pages(directory=options.web, html=True), name="web")
    return app


class Pages(StaticFiles):
    """The files of a page that may run its own scripts, ask its own server, and nothing else."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, with what browsers must know about it."""
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        kind = PAGE_TYPES.get(Path(path if path != "." else "index.html").suffix)
        if kind is not None and response.status_code == 200:
            response.headers["Content-Type"] = kind
        return response


def _add_problems(app: FastAPI) -> None:
    """Every error becomes an error object."""

    async def told(_: Request, error: Exception) -> Response:
        problem = problem_of(error)
        if problem.status == 500:
            log.error("%s: %s", type(error).__name__, error)
        return JsonReply(problem.body, problem.status, headers=problem.headers)

    async def unread(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await told(_, invalid(error.errors()))

    async def routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = Problem(error.status_code, str(error.detail), headers=error.headers or {})
        return await told(request, _unrouted(request) if error.status_code in (404, 405) else problem)

    async def unheard(_: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    app.add_exception_handler(Problem, told)
    app.add_exception_handler(ExlmError, told)
    app.add_exception_handler(Exception, told)
    app.add_exception_handler(RequestValidationError, unread)
    app.add_exception_handler(HTTPException, routed)
    app.add_exception_handler(ClientGone, unheard)


def _add_generation(app: FastAPI, answering: Answering) -> None:
    @app.post(
        "/v1/chat/completions",
        response_model=ChatReply,
        responses=streamed(ChatChunk),
        openapi_extra=taking(ChatRequest),
    )
    async def chat(request: Request, asked: AskedChat) -> Response:
        """Answer a conversation, at once or as a stream of events."""
        return await answering.reply(request, asked, _caller(request).salt)

    @app.post(
        "/v1/completions",
        response_model=CompletionReply,
        responses=streamed(CompletionReply),
        openapi_extra=taking(CompletionRequest),
    )
    async def complete(request: Request, asked: AskedCompletion) -> Response:
        """Continue a text, or several."""
        return await answering.reply(request, asked, _caller(request).salt)

    @app.post(
        "/v1/embeddings",
        response_model=ErrorReply,
        status_code=501,
        openapi_extra=taking(EmbeddingsRequest),
    )
    async def embed(asked: AskedEmbeddings) -> Response:
        """Refused: the models served here generate text and have no embeddings to give."""
        raise Problem(501, "Embeddings are not supported: the models served here generate text.")


def _add_texts(app: FastAPI, answering: Answering) -> None:
    @app.post("/tokenize", response_model=TokenizeReply, openapi_extra=taking(TokenizeRequest))
    async def tokenize(request: Request, asked: AskedTokens) -> Response:
        """The tokens of a text or of a conversation."""
        return JsonReply(await answering.tokenized(request, asked, _caller(request).salt))

    @app.post("/detokenize", response_model=DetokenizeReply, openapi_extra=taking(DetokenizeRequest))
    async def detokenize(request: Request, asked: AskedText) -> Response:
        """The text of tokens."""
        return JsonReply(await answering.detokenized(request, asked, _caller(request).salt))


def _add_models(app: FastAPI, engine: Engine) -> None:
    def card(name: str) -> dict[str, Any]:
        hosted = engine.hosted.get(name)
        return {
            "id": name,
            "object": "model",
            "created": engine.started,
            "owned_by": "exlm",
            "loaded": hosted is not None,
            "max_model_len": None if hosted is None else hosted.host.length,
            "loras": sorted(engine.listings[name].loras),
        }

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """Every registered model, loaded or not."""
        return JsonReply({"object": "list", "data": [card(name) for name in engine.listings]})

    @app.get("/v1/models/{name:path}", response_model=ModelCard)
    async def model(name: str) -> Response:
        """One registered model."""
        if name not in engine.listings:
            raise Problem(404, f"No model is called {name[:200]!r}.", param="model", code="model_not_found")
        return JsonReply(card(name))

    @app.post("/v1/admin/models/load", response_model=ModelCard, openapi_extra=taking(ModelRequest))
    async def load(request: Request, asked: AskedModel) -> Response:
        """Load a registered model; for admins."""
        _check_admin(request)
        await asyncio.shield(engine.load(asked.model))
        return JsonReply(card(asked.model))

    @app.post("/v1/admin/models/unload", response_model=ModelCard, openapi_extra=taking(ModelRequest))
    async def unload(request: Request, asked: AskedModel) -> Response:
        """Unload a registered model, once the requests it has are answered or out of time; for admins."""
        _check_admin(request)
        await asyncio.shield(engine.unload(asked.model))
        return JsonReply(card(asked.model))


def _add_health(app: FastAPI, engine: Engine, metrics: Metrics, options: Options) -> None:
    @app.get("/health/live", response_model=HealthReply)
    async def live() -> Response:
        """Whether the process answers at all; needs no key."""
        return JsonReply({"status": "alive"})

    @app.get("/health/ready", response_model=HealthReply)
    async def ready() -> Response:
        """Whether the engine makes tokens: one has to come out of the scheduler in time."""
        if not await engine.find(None).ready(options.ready_seconds):
            raise Problem(503, f"No token came within {options.ready_seconds} s.", code="not_ready")
        return JsonReply({"status": "ready"})

    @app.get("/metrics", response_class=Response)
    async def numbers() -> Response:
        """Numbers for Prometheus."""
        return Response(metrics.text(), media_type=metrics.content_type)


def _add_state(app: FastAPI, engine: Engine, answering: Answering, options: Options) -> None:
    @app.get("/v1/internal/state", response_model=StateReply)
    async def state(request: Request) -> Response:
        """A live look at cache pages, queue and batch; where there are keys, for admins."""
        if options.keyring:
            _check_admin(request)
        return JsonReply(state_of(engine, answering.gate))


def _add_manual(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def manual() -> Response:
        """What there is to ask, for people."""
        return Response(page(app.openapi()), media_type="text/html", headers=PAGE_HEADERS)


def _unrouted(request: Request) -> Problem:
    """There is no such route, or not with this method; the pages, mounted at `/`, cannot tell which."""
    path, routes = request.url.path, request.app.routes
    fitting = [
        one for one in routes if isinstance(one, Route) and one.matches(request.scope)[0] != Match.NONE
    ]
    methods = sorted({method for one in fitting for method in one.methods or ()})
    if not methods or request.method in methods:
        return Problem(404, f"There is no {path[:200]} here; /docs lists what there is.")
    allowed = ", ".join(methods)
    return Problem(405, f"{path} takes {allowed}, not {request.method}.", headers={"Allow": allowed})


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _check_admin(request: Request) -> None:
    if not _caller(request).admin:
        raise Problem(403, "This needs an admin key; the server takes those it was started with.")
