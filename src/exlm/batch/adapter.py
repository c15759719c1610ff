"""From a row of a batch to a generation request, and from its output to the row's line in the output file.

A line does not depend on the time, the machine or the run that made it: a row that is done again, anywhere,
gets the same line.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from exlm import ExlmError
from exlm.serve import APIError, Limits, ModelInfo, to_api_error, to_generation_request
from exlm.serve.dialects import ENDPOINTS
from exlm.serve.errors import validation_error
from exlm.serve.responses import ResponseWriter
from exlm.serve.schema import BaseRequest

from .files import BadRow, Row, row_hash

ENDPOINT_OF = {endpoint.path: endpoint for endpoint in ENDPOINTS}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowAdapter:
    """Adapts the rows of one file to the server's requests and responses; `index` counts rows from 0."""

    sha256: str
    """The hash of the whole file."""
    created: int
    """When the batch was started: Unix time."""
    model: ModelInfo
    limits: Limits

    def prepare(self, index: int, row: Row) -> ResponseWriter:
        """A writer for the row's response, whose `request` has the jobs to run; raises errors of the row."""
        url, body = row.request()
        request = to_generation_request(self._request(row, url, body), self.model, self.limits)
        return ENDPOINT_OF[url].writer(request, self._hash(index), self.created)

    def success_line(self, index: int, row: Row, writer: ResponseWriter) -> bytes:
        """The line of a row whose texts have all finished."""
        return self._line(index, row, self._response(index, 200, self._body(index, writer)))

    def error_line(self, index: int, row: Row, error: Exception) -> bytes:
        """The line of a row that caused the error; other errors are raised again."""
        if isinstance(error, BadRow):
            return self._line(index, row, None, _error_entry(row, "invalid_row", str(error)))
        api_error = to_api_error(error)
        if api_error.status >= 500:
            if isinstance(error, ExlmError):
                raise error
            log.warning("Line %d failed", row.line, exc_info=error)
        response = self._response(index, api_error.status, api_error.body)
        return self._line(
            index, row, response, _error_entry(row, api_error.code or "invalid_request", api_error.message)
        )

    def _request(self, row: Row, url: str, body: Any) -> BaseRequest:
        """The row's request; without a seed it gets one derived from its custom_id."""
        try:
            request = ENDPOINT_OF[url].request_type.model_validate(body)
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
        self, index: int, row: Row, response: dict[str, Any] | None, error: dict[str, Any] | None = None
    ) -> bytes:
        whole = {
            "id": f"batch_req_{self._hash(index)}",
            "custom_id": row.custom_id,
            "response": response,
            "error": error,
        }
        return json.dumps(whole).encode("ascii")

    def _response(self, index: int, status: int, body: Any) -> dict[str, Any]:
        return {"status_code": status, "request_id": f"req_{self._hash(index)}", "body": body}

    def _body(self, index: int, writer: ResponseWriter) -> dict[str, Any]:
        """The response, without times and with ids that are the same in every run."""
        body: dict[str, Any] = writer.body()
        del body["timings"]
        for name in ("prompt_tokens_details", "completion_tokens_details"):
            del body["usage"][name]
        for choice in body["choices"]:
            calls = choice.get("message", {}).get("tool_calls") or ()
            for number, call in enumerate(calls):
                own = self._hash(index, f"{choice['index']} {number}")
                call["id"] = f"call_{own}" if call["id"].startswith("call_") else own[: len(call["id"])]
        return body

    def _hash(self, index: int, what: str = "") -> str:
        return row_hash(self.sha256, index, what)


def _error_entry(row: Row, code: str, reason: str) -> dict[str, Any]:
    return {"code": code, "message": f"Line {row.line}: {reason}", "line": row.line}
