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
from exlm.serve import Answer, Bounds, ChatRequest, CompletionRequest, Host, Problem, order_of
from exlm.serve.problems import invalid, problem_of
from exlm.serve.schema import Asking

from .files import BadRow, Row, identity

REQUESTS: dict[str, type[Asking]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wording:
    """How the rows of one file are understood and answered; `place` is a row's number in it, from 0."""

    digest: str
    """The hash of the whole file."""
    created: int
    """When the batch was begun, in seconds."""
    host: Host
    bounds: Bounds

    def asked(self, place: int, row: Row) -> Answer:
        """An answer to be filled, and in its order the jobs that do it; raises what is wrong with the row."""
        url, body = row.request()
        order = order_of(self._request(row, url, body), self.host, self.bounds)
        prefix = "chatcmpl-" if order.kind == "chat" else "cmpl-"
        return Answer(order, prefix + self._identity(place), self.created)

    def answered(self, place: int, row: Row, answer: Answer) -> bytes:
        """The line of a row whose answer is filled."""
        return self._line(place, row, self._response(place, 200, self._body(place, answer)))

    def failed(self, place: int, row: Row, error: Exception) -> bytes:
        """The line of a row that is at fault; what is nobody's fault is raised again."""
        if isinstance(error, BadRow):
            return self._line(place, row, None, _told(row, "invalid_row", str(error)))
        problem = problem_of(error)
        if problem.status >= 500:
            if isinstance(error, ExlmError):
                raise error
            log.warning("Line %d failed", row.line, exc_info=error)
        response = self._response(place, problem.status, problem.body)
        return self._line(
            place, row, response, _told(row, problem.code or "invalid_request", problem.message)
        )

    def _request(self, row: Row, url: str, body: Any) -> Asking:
        """The request, with a seed that its name decides unless it brings one."""
        try:
            request = REQUESTS[url].model_validate(body)
        except ValidationError as error:
            raise invalid(error.errors()) from None
        if request.stream:
            raise Problem(422, "An answer in a file cannot be a stream: leave stream out.", param="stream")
        if request.model not in (None, self.host.name):
            raise Problem(
                404,
                f"No model is called {request.model!r}; this batch runs {self.host.name!r}: leave model out, "
                "or name it with --name.",
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
            "id": f"batch_req_{self._identity(place)}",
            "custom_id": row.custom_id,
            "response": response,
            "error": error,
        }
        return json.dumps(whole).encode("ascii")

    def _response(self, place: int, status: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"status_code": status, "request_id": f"req_{self._identity(place)}", "body": body}

    def _body(self, place: int, answer: Answer) -> dict[str, Any]:
        """The reply, without what would be different the next time."""
        body = answer.body()
        del body["timings"]
        for name in ("prompt_tokens_details", "completion_tokens_details"):
            del body["usage"][name]
        for choice in body["choices"]:
            calls = choice.get("message", {}).get("tool_calls") or ()
            for number, call in enumerate(calls):
                own = self._identity(place, f"{choice['index']} {number}")
                call["id"] = f"call_{own}" if call["id"].startswith("call_") else own[: len(call["id"])]
        return body

    def _identity(self, place: int, what: str = "") -> str:
        return identity(self.digest, place, what)


def _told(row: Row, code: str, reason: str) -> dict[str, Any]:
    return {"code": code, "message": f"Line {row.line}: {reason}", "line": row.line}
