"""The endpoints of all dialects.

The application, its OpenAPI description and the ingress of a cluster take them from here: a new dialect is a module
with `ENDPOINTS`, which are added to these.
"""

from __future__ import annotations

from starlette.responses import Response

from . import openai
from .errors import APIError
from .responses import Endpoint, JsonResponse

ENDPOINTS: tuple[Endpoint, ...] = (*openai.ENDPOINTS,)


def endpoint_at(path: str) -> Endpoint | None:
    """The endpoint of a path; None if no text is generated there."""
    return next((endpoint for endpoint in ENDPOINTS if endpoint.path == path), None)


def error_response(path: str, error: APIError) -> Response:
    """The response that refuses a request, in the dialect of its path."""
    endpoint = endpoint_at(path)
    body = error.body if endpoint is None else endpoint.error_body(error)
    return JsonResponse(body, error.status, headers=error.headers)
