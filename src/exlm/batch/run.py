"""Running rows: each a request to one generator, all of them in one continuous batch.

What a row's request means, and how its answer is worded, is the server's business (`exlm.serve`); which rows
are done is the journal's. A row that is at fault is answered with an error. What is not a row's fault ends
the run, and the next run goes on from there. Nothing in an answer says when, or in which run, it was made.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from exlm import ExlmError, Generator, Job
from exlm.serve import Answer, Bounds, ChatRequest, CompletionRequest, Host, Problem, order_of, piece_of
from exlm.serve.problems import invalid, problem_of
from exlm.serve.schema import Asking

from .files import BadRow, Row, Rows
from .journal import Journal

REQUESTS: dict[str, type[Asking]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
AHEAD = 2
"""Jobs that run or wait, for each that can run: a place that falls free is filled at once."""

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come."""

    done: int = 0
    """Rows with an answer, those of earlier runs included."""
    errors: int = 0
    """Rows that this run answered with an error."""
    new_tokens: int = 0
    """Tokens that this run has generated."""


def run_rows(
    rows: Rows,
    journal: Journal,
    generator: Generator,
    host: Host,
    bounds: Bounds | None = None,
    told: Callable[[Progress], object] = lambda progress: None,
) -> Progress:
    """Answer every row that the journal does not have yet; `told` is called after every step."""
    return _Running(rows, journal, generator, host, bounds or Bounds(), told).finish()


@dataclass
class _Running:
    rows: Rows
    journal: Journal
    generator: Generator
    host: Host
    bounds: Bounds
    told: Callable[[Progress], object]
    progress: Progress = field(default_factory=Progress)
    finished: list[tuple[int, bytes]] = field(default_factory=list)
    """Answers that are not in the journal yet."""
    under_way: dict[int, tuple[Answer, list[Job]]] = field(default_factory=dict)

    def finish(self) -> Progress:
        waiting = iter([place for place in range(len(self.rows.rows)) if place not in self.journal.done])
        try:
            more = True
            while more or self.under_way:
                more = self._fill(waiting)
                for result in self.generator.iterate():
                    self._take(result)
                self._store()
            return self.progress
        finally:
            for _, jobs in self.under_way.values():
                self._drop(jobs)

    def _fill(self, waiting: Iterator[int]) -> bool:
        """Begin rows until there is work enough, refusals aside; whether more may be waiting."""
        while self.generator.num_remaining_jobs() < AHEAD * self.generator.max_batch_size:
            place = next(waiting, None)
            if place is None:
                return False
            row = self.rows.rows[place]
            try:
                self._begin(place, row)
            except BadRow as error:
                self._refuse(place, "invalid_row", str(error))
            except Exception as error:
                self._fail(place, error)
        return True

    def _begin(self, place: int, row: Row) -> None:
        url, body = row.request()
        order = order_of(self._request(row, url, body), self.host, self.bounds)
        prefix = "chatcmpl-" if order.kind == "chat" else "cmpl-"
        answer = Answer(order, prefix + self._identity(place), self.journal.created)
        jobs = [Job(**arguments, identifier=(place, text)) for text, arguments in enumerate(order.jobs)]
        try:
            self.generator.enqueue(jobs)
        except Exception:
            self._drop(jobs)
            raise
        self.under_way[place] = (answer, jobs)

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

    def _take(self, result: Any) -> None:
        place, text = result["identifier"]
        if place not in self.under_way:  # another text of the row has failed
            return
        answer, jobs = self.under_way[place]
        try:
            piece = piece_of(result, answer.order)
        except Exception as error:
            del self.under_way[place]
            self._drop(jobs)
            self._fail(place, error)
            return
        if piece is None:
            return
        answer.push(text, piece)
        if piece.end is not None:
            self.progress.new_tokens += piece.end.new_tokens
        if answer.done:
            del self.under_way[place]
            self._answer(place, response=self._response(place, 200, self._body(place, answer)))

    def _fail(self, place: int, error: Exception) -> None:
        """Answer a row with an error if the row is at fault; else the run is over."""
        problem = problem_of(error)
        if problem.status >= 500:
            if isinstance(error, ExlmError):
                raise error
            log.warning("Line %d failed", self.rows.rows[place].line, exc_info=error)
        response = self._response(place, problem.status, problem.body)
        self._refuse(place, problem.code or "invalid_request", problem.message, response)

    def _refuse(self, place: int, code: str, reason: str, response: dict[str, Any] | None = None) -> None:
        line = self.rows.rows[place].line
        told = {"code": code, "message": f"Line {line}: {reason}", "line": line}
        self.progress.errors += 1
        self._answer(place, response=response, error=told)

    def _answer(
        self, place: int, *, response: dict[str, Any] | None, error: dict[str, Any] | None = None
    ) -> None:
        whole = {
            "id": f"batch_req_{self._identity(place)}",
            "custom_id": self.rows.rows[place].custom_id,
            "response": response,
            "error": error,
        }
        self.finished.append((place, json.dumps(whole).encode("ascii")))

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
        """A name that is the row's alone, and the same in every run."""
        return hashlib.sha256(f"{self.rows.digest} {place} {what}".encode()).hexdigest()[:24]

    def _store(self) -> None:
        self.journal.add(self.finished)
        self.finished.clear()
        self.progress.done = len(self.journal.done)
        self.told(self.progress)

    def _drop(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.generator.cancel(job)
