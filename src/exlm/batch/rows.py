"""The rows of a batch: read from the input file, turned into requests, and answered by lines of the output.

A row is one request on one line; the output has one line for each, in the same order. A line that is not a
request is answered with an error in its place. A row's answer does not depend on the time, the machine or the
run that made it: a row that is done again, anywhere, gets the same line.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from exlm import ExlmError, InputError
from exlm.atomic import atomic_file
from exlm.serve import APIError, Limits, ModelInfo, to_api_error, to_generation_request
from exlm.serve.errors import validation_error
from exlm.serve.openai import ENDPOINTS
from exlm.serve.responses import ResponseWriter
from exlm.serve.schema import OpenAIRequest

from .journal import Journal, failed_write

ENDPOINT_OF = {endpoint.path: endpoint for endpoint in ENDPOINTS}

log = logging.getLogger(__name__)


class BadRow(Exception):
    """A line that is not a request; the message says why."""


@dataclass(frozen=True)
class Row:
    """One request: its line number (from 1), its custom_id, and the line itself."""

    line: int
    custom_id: str | None
    text: bytes

    def request(self) -> tuple[str, Mapping[str, Any]]:
        """The URL and the body; raises BadRow."""
        request = _json_object(self.text)
        if not isinstance(request.get("custom_id"), str) or not request["custom_id"]:
            raise BadRow("custom_id must be a text that is not empty")
        if request.get("method") != "POST":
            raise BadRow(f"method must be 'POST', found {request.get('method')!r}")
        if request.get("url") not in ENDPOINT_OF:
            raise BadRow(f"url must be {' or '.join(ENDPOINT_OF)}, found {request.get('url')!r}")
        if not isinstance(request.get("body"), dict):
            raise BadRow(f"body must be an object, found {type(request.get('body')).__name__}")
        if unknown := sorted(request.keys() - {"custom_id", "method", "url", "body"}):
            raise BadRow(f"there is no field {unknown[0]!r} in a row")
        return request["url"], request["body"]


@dataclass(frozen=True)
class Rows:
    """The rows of a file, without blank lines, and the SHA-256 of its bytes."""

    rows: tuple[Row, ...]
    sha256: str


def read_rows(path: Path) -> Rows:
    """Read a file of requests. Duplicate custom_ids are refused; other errors are left to their rows."""
    rows: list[Row] = []
    line_of: dict[str, int] = {}
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                digest.update(text)
                if not text.strip():
                    continue
                custom_id = _custom_id(text)
                if custom_id is not None and line_of.setdefault(custom_id, number) != number:
                    raise InputError(
                        f"{path}: lines {line_of[custom_id]} and {number} have the same custom_id "
                        f"{custom_id!r}: give each row its own."
                    )
                rows.append(Row(number, custom_id, text))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not rows:
        raise InputError(f"{path} holds no requests: write one as JSON on each line.")
    return Rows(tuple(rows), digest.hexdigest())


def is_answered(path: Path, rows: Rows, model: str) -> bool:
    """Whether a file already answers all of these rows, in their order, by a model of this name."""
    try:
        with path.open("rb") as file:
            lines = [_json_object(line) for line in file]
    except (OSError, BadRow):
        return False
    bodies = [(line.get("response") or {}).get("body") or {} for line in lines]
    ids = [f"batch_req_{_row_hash(rows.sha256, index)}" for index in range(len(rows.rows))]
    return [line.get("id") for line in lines] == ids and all(body.get("model", model) == model for body in bodies)


def write_answers(path: Path, journal: Journal, rows: Rows) -> None:
    """Write the answer of every row, in order; the file appears complete or not at all."""
    try:
        with atomic_file(path, sync_folder=True) as partial, partial.open("wb") as file:
            for index in range(len(rows.rows)):
                file.write(journal.answer(index) + b"\n")
    except OSError as error:
        raise failed_write(path, error, f" Every answer is safe in {journal.path}.") from None


@dataclass(frozen=True)
class RowHandler:
    """Turns the rows of one file into requests, and responses into lines; `index` counts rows from 0."""

    sha256: str
    """The hash of the input file."""
    created: int
    """When the batch was started: Unix time."""
    model: ModelInfo
    limits: Limits

    def response_writer(self, index: int, row: Row) -> ResponseWriter:
        """A writer for the row's response, whose `request` has the jobs to run; raises errors of the row."""
        url, body = row.request()
        endpoint = ENDPOINT_OF[url]
        try:
            request = endpoint.to_openai(endpoint.request_type.model_validate(body))
        except ValidationError as error:
            raise validation_error(error.errors()) from None
        self._check_request(request, row)
        return endpoint.writer(to_generation_request(request, self.model, self.limits), self._hash(index), self.created)

    def success_line(self, index: int, row: Row, writer: ResponseWriter) -> bytes:
        """The line of a row whose texts have all finished: without times, with ids that do not change."""
        body: dict[str, Any] = writer.body()
        del body["timings"]
        for name in ("prompt_tokens_details", "completion_tokens_details"):
            del body["usage"][name]
        for choice in body["choices"]:
            for number, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
                call_hash = self._hash(index, f"{choice['index']} {number}")
                is_openai = call["id"].startswith("call_")
                call["id"] = f"call_{call_hash}" if is_openai else call_hash[: len(call["id"])]
        return self._line(index, row, 200, body)

    def error_line(self, index: int, row: Row, error: Exception) -> bytes:
        """The line of a row that caused the error; other errors are raised again."""
        if isinstance(error, BadRow):
            return self._line(index, row, None, None, ("invalid_row", str(error)))
        api_error = to_api_error(error)
        if api_error.status >= 500:
            if isinstance(error, ExlmError):
                raise error
            log.warning("Line %d failed", row.line, exc_info=error)
        reason = (api_error.code or "invalid_request", api_error.message)
        return self._line(index, row, api_error.status, api_error.body, reason)

    def _check_request(self, request: OpenAIRequest, row: Row) -> None:
        """Refuse what a batch does not do, and give a request without a seed one derived from its custom_id."""
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
            custom_id = (row.custom_id or "").encode("utf-8", "surrogatepass")
            request.seed = int.from_bytes(hashlib.sha256(custom_id).digest()[:8], "big") >> 1

    def _line(
        self, index: int, row: Row, status: int | None, body: Any, reason: tuple[str, str] | None = None
    ) -> bytes:
        """A line of the output: a response unless `status` is None, and an error if there is a reason."""
        line: dict[str, Any] = {
            "id": f"batch_req_{self._hash(index)}",
            "custom_id": row.custom_id,
            "response": None,
            "error": None,
        }
        if status is not None:
            request_id = f"req_{self._hash(index)}"
            line["response"] = {"status_code": status, "request_id": request_id, "body": body}
        if reason is not None:
            code, message = reason
            line["error"] = {"code": code, "message": f"Line {row.line}: {message}", "line": row.line}
        return json.dumps(line).encode("ascii")

    def _hash(self, index: int, suffix: str = "") -> str:
        return _row_hash(self.sha256, index, suffix)


def _row_hash(sha256: str, index: int, suffix: str = "") -> str:
    """An id that is unique to the row and the same in every run with the same input file."""
    return hashlib.sha256(f"{sha256} {index} {suffix}".encode()).hexdigest()[:24]


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRow(f"the line must be an object, found {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _custom_id(text: bytes) -> str | None:
    """The custom_id of a line, if it has one."""
    try:
        custom_id = _json_object(text).get("custom_id")
    except BadRow:
        return None
    return custom_id if isinstance(custom_id, str) and custom_id else None
