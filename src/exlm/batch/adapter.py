"""What a row asks for, and the line that answers it. Who runs the jobs, and when, is not known here.

Nothing in an answer says when, where, or in which run it was made: a row that is done again, anywhere, gets
the same line.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from exlm import ExlmError
from exlm.serve import (
    APIError,
    ChatRequest,
    CompletionRequest,
    Limits,
    ModelInfo,
    ResponseBuilder,
    to_generation_request,
)
from exlm.serve.errors import to_api_error, validation_error
from exlm.serve.schema import BaseRequest

from .files import BadRow, Row, row_hash

REQUESTS: dict[str, type[BaseRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowAdapter:
    """How the rows of one file are understood and answered; `place` is a row's number in it, from 0."""

    sha256: str
    """The hash of the whole file."""
    created: int
    """When the batch was begun, in seconds."""
    model: ModelInfo
    limits: Limits

    def prepare(self, place: int, row: Row) -> ResponseBuilder:
        """An answer to be filled, and in its order the jobs that do it; raises what is wrong with the row."""
        url, body = row.request()
        order = to_generation_request(self._request(row, url, body), self.model, self.limits)
        prefix = "chatcmpl-" if order.kind == "chat" else "cmpl-"
        return ResponseBuilder(order, prefix + self._hash(place), self.created)

    def success_line(self, place: int, row: Row, answer: ResponseBuilder) -> bytes:
        """The line of a row whose answer is filled."""
        return self._line(place, row, self._response(place, 200, self._body(place, answer)))

    def error_line(self, place: int, row: Row, error: Exception) -> bytes:
        """The line of a row that is at fault; what is nobody's fault is raised again."""
        if isinstance(error, BadRow):
            return self._line(place, row, None, _error_entry(row, "invalid_row", str(error)))
        problem = to_api_error(error)
        if problem.status >= 500:
            if isinstance(error, ExlmError):
                raise error
            log.warning("Line %d failed", row.line, exc_info=error)
        response = self._response(place, problem.status, problem.body)
        return self._line(
            place, row, response, _error_entry(row, problem.code or "invalid_request", problem.message)
        )

    def _request(self, row: Row, url: str, body: Any) -> BaseRequest:
        """The request, with a seed that its name decides unless it brings one."""
        try:
            request = REQUESTS[url].model_validate(body)
        except ValidationError as error:
            raise validation_error(error.errors()) from None
        if request.stream:
            raise APIError(422, "An answer in a file cannot be a stream: leave stream out.", param="stream")
        if request.model not in (None, self.model.name):
            raise APIError(
                404,
                f"No model is called {request.model!r}; this batch runs {self.model.name!r}: leave model "
                "out, or name it with --name.",
                param="model",
                code="model_not_found",
            )
        if request.seed is None:
            name = (row.custom_id or "").encode("utf-8", "surrogatepass")
            request.seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1
        return request

    def _line(
        self, place: int, row: Row, response: dict[str, Any] | None, error: dict[str, Any] | None = None
    ) -> bytes:
        whole = {
            "id": f"batch_req_{self._hash(place)}",
            "custom_id": row.custom_id,
            "response": response,
            "error": error,
        }
        return json.dumps(whole).encode("ascii")

    def _response(self, place: int, status: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"status_code": status, "request_id": f"req_{self._hash(place)}", "body": body}

    def _body(self, place: int, answer: ResponseBuilder) -> dict[str, Any]:
        """The reply, without what would be different the next time."""
        body = answer.body()
        del body["timings"]
        for name in ("prompt_tokens_details", "completion_tokens_details"):
            del body["usage"][name]
        for choice in body["choices"]:
            calls = choice.get("message", {}).get("tool_calls") or ()
            for number, call in enumerate(calls):
                own = self._hash(place, f"{choice['index']} {number}")
                call["id"] = f"call_{own}" if call["id"].startswith("call_") else own[: len(call["id"])]
        return body

    def _hash(self, place: int, what: str = "") -> str:
        return row_hash(self.sha256, place, what)


def _error_entry(row: Row, code: str, reason: str) -> dict[str, Any]:
    return {"code": code, "message": f"Line {row.line}: {reason}", "line": row.line}
