"""The ASGI application: `create_app` connects an engine, its limits and the routes. Nothing is global."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from exlm import ExlmError, __version__

from . import dialects
from .engine import Engine
from .errors import APIError, to_api_error
from .handlers import ClientDisconnected, RequestHandlers, caller_of, parse_body
from .limits import Limits
from .middleware import ApiKeys, RequestMiddleware, large_body_thread
from .monitoring import Metrics, engine_state
from .openapi import AppWithSchemas, docs_page, event_stream_of, request_body_of
from .responses import JsonResponse
from .schema import (
    DetokenizeReply,
    DetokenizeRequest,
    EmbeddingsRequest,
    ErrorReply,
    HealthReply,
    ModelCard,
    ModelList,
    ModelRequest,
    StateReply,
    TokenizeReply,
    TokenizeRequest,
    sampler_settings_script,
)

WEB_FOLDER = Path(__file__).with_name("web")
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 500, 501, 503)
}
STATIC_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Not left to the operating system, which may know other types: browsers then refuse scripts."""
STATIC_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
SAMPLER_SETTINGS_SCRIPT = "sampler_settings.js"
"""A script that is generated from the table of the sampler's settings instead of read from a file."""
CLIENT_CLOSED_REQUEST = 499
"""The status in metrics where the client disconnected before the response."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """The options of a server, apart from its models."""

    api_keys: ApiKeys = field(default_factory=ApiKeys)
    limits: Limits = field(default_factory=Limits)
    ready_seconds: float = 5.0
    """The server is ready if the engine generates a token within this time."""
    hosts: frozenset[str] | None = None
    """The accepted names in `Host`; None accepts any. Prevents DNS rebinding, where a page of another site
    reaches a local server under a name of its own."""
    web: Path = WEB_FOLDER
    """A folder of static files, served at `/` if it has an index.html."""


def create_app(engine: Engine, options: Options | None = None) -> FastAPI:
    """An application that starts the engine, serves it and closes it."""
    options = options or Options()
    metrics = Metrics(engine)
    large_bodies = large_body_thread()
    handlers = RequestHandlers(engine, options.limits, metrics, shared=len(options.api_keys) > 1)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(large_bodies.shutdown, wait=False, cancel_futures=True)
            stack.callback(handlers.close)
            stack.push_async_callback(engine.close)
            await engine.start()
            yield

    app = AppWithSchemas(
        title="exlm",
        version=__version__,
        lifespan=lifespan,
        responses=ERROR_RESPONSES,
        separate_input_output_schemas=False,
        docs_url=None,  # FastAPI's own pages load scripts from other servers
        redoc_url=None,
    )
    app.add_middleware(
        RequestMiddleware,
        api_keys=options.api_keys,
        limits=options.limits,
        hosts=options.hosts,
        on_response=metrics.count_response,
        large_bodies=large_bodies,
    )
    _add_error_handlers(app)
    _add_text_routes(app, handlers)
    _add_model_routes(app, engine)
    _add_monitoring_routes(app, engine, handlers, options)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(docs_page(app.openapi()), media_type="text/html", headers=STATIC_HEADERS)

    if (options.web / "index.html").is_file():
        app.mount("/", WebFiles(directory=options.web, html=True), name="web")
    return app


class WebFiles(StaticFiles):
    """Static files whose headers allow a page only its own scripts and its own server."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        if path == SAMPLER_SETTINGS_SCRIPT:
            response = Response(sampler_settings_script())
        else:
            response = await super().get_response(path, scope)
        response.headers.update(STATIC_HEADERS)
        kind = STATIC_CONTENT_TYPES.get(Path(path if path != "." else "index.html").suffix)
        if kind is not None and response.status_code == 200:
            response.headers["Content-Type"] = kind
        return response


def _add_error_handlers(app: FastAPI) -> None:
    """Turn every exception into a response with an error object."""

    async def send_error(request: Request, error: Exception) -> Response:
        api_error = to_api_error(error)
        if api_error.status == 500:
            log.error("%s: %s", type(error).__name__, error)
        return dialects.error_response(request.scope["path"], api_error)

    async def send_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405):
            return await send_error(request, _routing_error(request))
        return await send_error(request, APIError(error.status_code, str(error.detail), headers=error.headers or {}))

    async def send_nothing(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(APIError, send_error)
    app.add_exception_handler(ExlmError, send_error)
    app.add_exception_handler(Exception, send_error)
    app.add_exception_handler(HTTPException, send_http_error)
    app.add_exception_handler(ClientDisconnected, send_nothing)


def _add_text_routes(app: FastAPI, handlers: RequestHandlers) -> None:
    for endpoint in dialects.ENDPOINTS:
        app.add_api_route(
            endpoint.path,
            handlers.generation_route(endpoint),
            methods=["POST"],
            name=endpoint.name,
            description=endpoint.description,
            response_model=endpoint.response_type,
            responses=event_stream_of(endpoint),
            openapi_extra=request_body_of(endpoint.request_type),
        )

    @app.post(
        "/v1/embeddings", response_model=ErrorReply, status_code=501, openapi_extra=request_body_of(EmbeddingsRequest)
    )
    async def embed(request: Request) -> Response:
        """Always refused: the models served here generate text."""
        await parse_body(request, EmbeddingsRequest)
        raise APIError(501, "Embeddings are not supported: the models served here generate text.")

    app.post("/tokenize", response_model=TokenizeReply, openapi_extra=request_body_of(TokenizeRequest))(
        handlers.tokenize
    )
    app.post("/detokenize", response_model=DetokenizeReply, openapi_extra=request_body_of(DetokenizeRequest))(
        handlers.detokenize
    )


def _add_model_routes(app: FastAPI, engine: Engine) -> None:
    def card(name: str) -> ModelCard:
        loaded = engine.models.get(name)
        return {
            "id": name,
            "object": "model",
            "created": engine.started,
            "owned_by": "exlm",
            "loaded": loaded is not None,
            "max_model_len": None if loaded is None else loaded.info.max_seq_len,
            "loras": sorted(engine.specs[name].loras),
        }

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        """Every registered model, loaded or not."""
        reply: ModelList = {"object": "list", "data": [card(name) for name in engine.specs]}
        return JsonResponse(reply)

    @app.get("/v1/models/{name:path}", response_model=ModelCard)
    async def model(name: str) -> Response:
        """One registered model."""
        if name not in engine.specs:
            raise APIError(404, f"No model is called {name[:200]!r}.", param="model", code="model_not_found")
        return JsonResponse(card(name))

    @app.post("/v1/admin/models/load", response_model=ModelCard, openapi_extra=request_body_of(ModelRequest))
    async def load(request: Request) -> Response:
        """Load a registered model; for admins."""
        body = await parse_body(request, ModelRequest)
        _check_admin(request)
        await asyncio.shield(engine.load(body.model))
        return JsonResponse(card(body.model))

    @app.post("/v1/admin/models/unload", response_model=ModelCard, openapi_extra=request_body_of(ModelRequest))
    async def unload(request: Request) -> Response:
        """Unload a registered model once its requests are answered, or out of time; for admins."""
        body = await parse_body(request, ModelRequest)
        _check_admin(request)
        await asyncio.shield(engine.unload(body.model))
        return JsonResponse(card(body.model))


def _add_monitoring_routes(app: FastAPI, engine: Engine, handlers: RequestHandlers, options: Options) -> None:
    @app.get("/health/live", response_model=HealthReply)
    async def live() -> Response:
        """Whether the process answers at all; needs no key."""
        return JsonResponse({"status": "alive"})

    @app.get("/health/ready", response_model=HealthReply)
    async def ready() -> Response:
        """Whether the engine generates tokens: the scheduler must give one in time."""
        if not await engine.find(None).is_ready(options.ready_seconds):
            raise APIError(503, f"No token came within {options.ready_seconds} s.", code="not_ready")
        return JsonResponse({"status": "ready"})

    @app.get("/metrics", response_class=Response)
    async def numbers() -> Response:
        """Metrics for Prometheus."""
        return Response(handlers.metrics.text(), media_type=handlers.metrics.content_type)

    @app.get("/v1/internal/state", response_model=StateReply)
    async def state(request: Request) -> Response:
        """The current cache pages, queue and batch; if the server has keys, for admins."""
        if options.api_keys:
            _check_admin(request)
        return JsonResponse(engine_state(engine, handlers.limiter))


def _routing_error(request: Request) -> APIError:
    """404, or 405 with the methods that the path allows: the files mounted at `/` match every path."""
    path, routes = request.url.path, request.app.routes
    matching = [route for route in routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE]
    methods = sorted({method for route in matching for method in route.methods or ()})
    if not methods or request.method in methods:
        return APIError(404, f"There is no {path[:200]} here; /docs lists what there is.")
    allowed = ", ".join(methods)
    return APIError(405, f"{path} takes {allowed}, not {request.method}.", headers={"Allow": allowed})


def _check_admin(request: Request) -> None:
    if not caller_of(request).admin:
        raise APIError(403, "This needs an admin key; the server takes those it was started with.")
