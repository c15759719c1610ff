"""API errors: an HTTP status, and the error object of the OpenAI API.

Every error of the server becomes an `APIError`; `app` and `middleware` send it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from exlm import CacheTooSmall, ChatTemplateError, DoesNotFit, ExlmError, InputError, MissingExtra, QueueFull

from .schema import ErrorReply

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "service_unavailable_error",
}
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMATS = ("text", "json_object", "json_schema")
UNION_TAGS = ("str", "int", "float", "bool", "NamedTool")
RETRY_SECONDS = 2
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class APIError(Exception):
    """A request that is refused or cannot be finished, with its HTTP status and error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers)

    @property
    def body(self) -> ErrorReply:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def too_many_requests(message: str, code: str = "queue_full") -> APIError:
    """A 429 that asks the client to retry in a moment."""
    return APIError(429, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def to_api_error(error: Exception) -> APIError:
    """The error that a client gets for an exception; of unexpected exceptions it shows only the type."""
    match error:
        case APIError():
            return error
        case QueueFull():
            return too_many_requests(str(error))
        case CacheTooSmall():
            return APIError(400, str(error), code="context_length_exceeded")
        case DoesNotFit():
            return APIError(503, str(error), code="does_not_fit")
        case InputError() | ChatTemplateError():
            return APIError(422, str(error))
        case MissingExtra():
            return APIError(501, str(error))
        case ExlmError():
            return APIError(500, str(error))
    return APIError(500, f"The server failed: {type(error).__name__}. Its log says more.")


def validation_error(errors: Sequence[Any]) -> APIError:
    """The errors of a pydantic validation: 400 for unknown fields, 422 for the others."""
    unknown = [_field_path(one["loc"]) for one in errors if one["type"] == "extra_forbidden"]
    if unknown:
        named = ", ".join(repr(name) for name in unknown[:20])
        return APIError(400, f"Unknown or unsupported: {named}.", param=unknown[0], code="unknown_field")
    summary = "; ".join(f"{_field_path(one['loc']) or 'body'}: {one['msg']}" for one in errors[:8])
    return APIError(422, summary[:2000], param=(_field_path(errors[0]["loc"]) or None) if errors else None)


def _field_path(path: Sequence[Any]) -> str:
    """A location as `messages.0.content`, without `body` and the tags of pydantic's unions."""
    kept: list[str] = []
    for before, part in zip(("", *path), path, strict=False):
        variant = part in UNION_TAGS or (isinstance(before, int) and part in ROLES)
        variant = variant or (before == "response_format" and part in FORMATS)
        if isinstance(part, int) or (part.isidentifier() and part != "body" and not variant):
            kept.append(str(part))
    return ".".join(kept)[:200]
