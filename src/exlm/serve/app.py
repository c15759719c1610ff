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

from .body import LargeBodyThread, parsed_body
from .engine import Engine
from .errors import APIError, to_api_error, validation_error
from .handlers import RequestHandlers
from .keys import ApiKeys, Caller
from .limits import Limits
from .manual import docs_page
from .metrics import Metrics
from .middleware import RequestMiddleware, Scope
from .openapi import AppWithSchemas, event_stream_of, request_body_of
from .response_schema import (
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
from .sse import ClientDisconnected, JsonResponse
from .state import engine_state

WEB = Path(__file__).with_name("web")
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply}
    for status in (400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 500, 501, 503)
}
STATIC_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Said here, since machines disagree about them and browsers refuse scripts of another type."""
STATIC_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
CLIENT_CLOSED_REQUEST = 499
"""The status of a reply that nobody reads."""

AskedChat = Annotated[ChatRequest, Depends(parsed_body(ChatRequest))]
AskedCompletion = Annotated[CompletionRequest, Depends(parsed_body(CompletionRequest))]
AskedEmbeddings = Annotated[EmbeddingsRequest, Depends(parsed_body(EmbeddingsRequest))]
AskedTokens = Annotated[TokenizeRequest, Depends(parsed_body(TokenizeRequest))]
AskedText = Annotated[DetokenizeRequest, Depends(parsed_body(DetokenizeRequest))]
AskedModel = Annotated[ModelRequest, Depends(parsed_body(ModelRequest))]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a server behaves, besides its models."""

    api_keys: ApiKeys = field(default_factory=ApiKeys)
    limits: Limits = field(default_factory=Limits)
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
    threads = LargeBodyThread()
    answering = RequestHandlers(engine, options.limits, metrics, threads, shared=len(options.api_keys) > 1)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(threads.close)
            stack.callback(answering.close)
            stack.push_async_callback(engine.close)
            await engine.start()
            yield

    app = AppWithSchemas(
        title="exlm",
        version=__version__,
        lifespan=lifespan,
        responses=ERROR_RESPONSES,
        separate_input_output_schemas=False,
        docs_url=None,  # the library's own pages are scripts of other servers
        redoc_url=None,
    )
    app.add_middleware(
        RequestMiddleware,
        api_keys=options.api_keys,
        limits=options.limits,
        on_response=metrics.count_response,
        hosts=options.hosts,
        large_bodies=threads,
    )
    _add_error_handlers(app)
    _add_generation(app, answering)
    _add_texts(app, answering)
    _add_models(app, engine)
    _add_health(app, engine, metrics, options)
    _add_state(app, engine, answering, options)
    _add_docs_page(app)
    if (options.web / "index.html").is_file():
        app.mount("/", WebFiles(directory=options.web, html=True), name="web")
    return app


class WebFiles(StaticFiles):
    """The files of a page that may run its own scripts, ask its own server, and nothing else."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, with what browsers must know about it."""
        response = await super().get_response(path, scope)
        response.headers.update(STATIC_HEADERS)
        kind = STATIC_CONTENT_TYPES.get(Path(path if path != "." else "index.html").suffix)
        if kind is not None and response.status_code == 200:
            response.headers["Content-Type"] = kind
        return response


def _add_error_handlers(app: FastAPI) -> None:
    """Every error becomes an error object."""

    async def told(_: Request, error: Exception) -> Response:
        problem = to_api_error(error)
        if problem.status == 500:
            log.error("%s: %s", type(error).__name__, error)
        return JsonResponse(problem.body, problem.status, headers=problem.headers)

    async def unread(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await told(_, validation_error(error.errors()))

    async def routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = APIError(error.status_code, str(error.detail), headers=error.headers or {})
        return await told(request, _routing_error(request) if error.status_code in (404, 405) else problem)

    async def unheard(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(APIError, told)
    app.add_exception_handler(ExlmError, told)
    app.add_exception_handler(Exception, told)
    app.add_exception_handler(RequestValidationError, unread)
    app.add_exception_handler(HTTPException, routed)
    app.add_exception_handler(ClientDisconnected, unheard)


def _add_generation(app: FastAPI, answering: RequestHandlers) -> None:
    @app.post(
        "/v1/chat/completions",
        response_model=ChatReply,
        responses=event_stream_of(ChatChunk),
        openapi_extra=request_body_of(ChatRequest),
    )
    async def chat(request: Request, asked: AskedChat) -> Response:
        """Answer a conversation, at once or as a stream of events."""
        return await answering.generate(request, asked, _caller(request).salt)

    @app.post(
        "/v1/completions",
        response_model=CompletionReply,
        responses=event_stream_of(CompletionReply),
        openapi_extra=request_body_of(CompletionRequest),
    )
    async def complete(request: Request, asked: AskedCompletion) -> Response:
        """Continue a text, or several."""
        return await answering.generate(request, asked, _caller(request).salt)

    @app.post(
        "/v1/embeddings",
        response_model=ErrorReply,
        status_code=501,
        openapi_extra=request_body_of(EmbeddingsRequest),
    )
    async def embed(asked: AskedEmbeddings) -> Response:
        """Refused: the models served here generate text and have no embeddings to give."""
        raise APIError(501, "Embeddings are not supported: the models served here generate text.")


def _add_texts(app: FastAPI, answering: RequestHandlers) -> None:
    @app.post("/tokenize", response_model=TokenizeReply, openapi_extra=request_body_of(TokenizeRequest))
    async def tokenize(request: Request, asked: AskedTokens) -> Response:
        """The tokens of a text or of a conversation."""
        return JsonResponse(await answering.tokenize(request, asked, _caller(request).salt))

    @app.post("/detokenize", response_model=DetokenizeReply, openapi_extra=request_body_of(DetokenizeRequest))
    async def detokenize(request: Request, asked: AskedText) -> Response:
        """The text of tokens."""
        return JsonResponse(await answering.detokenize(request, asked, _caller(request).salt))


def _add_models(app: FastAPI, engine: Engine) -> None:
    def card(name: str) -> dict[str, Any]:
        hosted = engine.models.get(name)
        return {
            "id": name,
            "object": "model",
            "created": engine.started,
            "owned_by": "exlm",
            "loaded": hosted is not None,
            "max_model_len": None if hosted is None else hosted.info.max_seq_len,
            "loras": sorted(engine.specs[name].loras),
        }

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """Every registered model, loaded or not."""
        return JsonResponse({"object": "list", "data": [card(name) for name in engine.specs]})

    @app.get("/v1/models/{name:path}", response_model=ModelCard)
    async def model(name: str) -> Response:
        """One registered model."""
        if name not in engine.specs:
            raise APIError(404, f"No model is called {name[:200]!r}.", param="model", code="model_not_found")
        return JsonResponse(card(name))

    @app.post("/v1/admin/models/load", response_model=ModelCard, openapi_extra=request_body_of(ModelRequest))
    async def load(request: Request, asked: AskedModel) -> Response:
        """Load a registered model; for admins."""
        _check_admin(request)
        await asyncio.shield(engine.load(asked.model))
        return JsonResponse(card(asked.model))

    @app.post(
        "/v1/admin/models/unload", response_model=ModelCard, openapi_extra=request_body_of(ModelRequest)
    )
    async def unload(request: Request, asked: AskedModel) -> Response:
        """Unload a registered model, once the requests it has are answered or out of time; for admins."""
        _check_admin(request)
        await asyncio.shield(engine.unload(asked.model))
        return JsonResponse(card(asked.model))


def _add_health(app: FastAPI, engine: Engine, metrics: Metrics, options: Options) -> None:
    @app.get("/health/live", response_model=HealthReply)
    async def live() -> Response:
        """Whether the process answers at all; needs no key."""
        return JsonResponse({"status": "alive"})

    @app.get("/health/ready", response_model=HealthReply)
    async def ready() -> Response:
        """Whether the engine makes tokens: one has to come out of the scheduler in time."""
        if not await engine.find(None).is_ready(options.ready_seconds):
            raise APIError(503, f"No token came within {options.ready_seconds} s.", code="not_ready")
        return JsonResponse({"status": "ready"})

    @app.get("/metrics", response_class=Response)
    async def numbers() -> Response:
        """Numbers for Prometheus."""
        return Response(metrics.text(), media_type=metrics.content_type)


def _add_state(app: FastAPI, engine: Engine, answering: RequestHandlers, options: Options) -> None:
    @app.get("/v1/internal/state", response_model=StateReply)
    async def state(request: Request) -> Response:
        """A live look at cache pages, queue and batch; where there are keys, for admins."""
        if options.api_keys:
            _check_admin(request)
        return JsonResponse(engine_state(engine, answering.limiter))


def _add_docs_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def manual() -> Response:
        """What there is to ask, for people."""
        return Response(docs_page(app.openapi()), media_type="text/html", headers=STATIC_HEADERS)


def _routing_error(request: Request) -> APIError:
    """There is no such route, or not with this method; the pages, mounted at `/`, cannot tell which."""
    path, routes = request.url.path, request.app.routes
    fitting = [
        one for one in routes if isinstance(one, Route) and one.matches(request.scope)[0] != Match.NONE
    ]
    methods = sorted({method for one in fitting for method in one.methods or ()})
    if not methods or request.method in methods:
        return APIError(404, f"There is no {path[:200]} here; /docs lists what there is.")
    allowed = ", ".join(methods)
    return APIError(405, f"{path} takes {allowed}, not {request.method}.", headers={"Allow": allowed})


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _check_admin(request: Request) -> None:
    if not _caller(request).admin:
        raise APIError(403, "This needs an admin key; the server takes those it was started with.")
