"""The input and output files of a batch: one request a line, and the responses in the same order.

What a row's request means is decided in `adapter`. A line that is not even a row is answered with an error in
its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exlm import InputError
from exlm.atomic import atomic_file
from exlm.serve.dialects import ENDPOINTS

from .journal import Journal, unwritable

URLS = tuple(endpoint.path for endpoint in ENDPOINTS)


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
        request = _object(self.text)
        if not isinstance(request.get("custom_id"), str) or not request["custom_id"]:
            raise BadRow("custom_id must be a text that is not empty")
        if request.get("method") != "POST":
            raise BadRow(f"method must be 'POST', found {request.get('method')!r}")
        if request.get("url") not in URLS:
            raise BadRow(f"url must be {' or '.join(URLS)}, found {request.get('url')!r}")
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
    lines: dict[str, int] = {}
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                digest.update(text)
                if not text.strip():
                    continue
                name = _custom_id(text)
                if name is not None and lines.setdefault(name, number) != number:
                    raise InputError(
                        f"{path}: lines {lines[name]} and {number} have the same custom_id {name!r}: give "
                        "each row its own."
                    )
                rows.append(Row(number, name, text))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not rows:
        raise InputError(f"{path} holds no requests: write one as JSON on each line.")
    return Rows(tuple(rows), digest.hexdigest())


def is_answered(path: Path, rows: Rows, model: str) -> bool:
    """Whether a file already answers all of these rows, in their order, by a model of this name."""
    try:
        with path.open("rb") as file:
            found = [_object(line) for line in file]
    except (OSError, BadRow):
        return False
    ids = [one.get("id") for one in found]
    bodies = [(one.get("response") or {}).get("body") or {} for one in found]
    models = {body.get("model", model) for body in bodies}
    wanted = [f"batch_req_{row_hash(rows.sha256, index)}" for index in range(len(rows.rows))]
    return ids == wanted and models <= {model}


def row_hash(sha256: str, index: int, what: str = "") -> str:
    """An id that is unique to the row and the same in every run with the same input file."""
    return hashlib.sha256(f"{sha256} {index} {what}".encode()).hexdigest()[:24]


def write_answers(path: Path, journal: Journal, rows: Rows) -> None:
    """Write the response of every row, in order; the file appears whole or not at all."""
    try:
        with atomic_file(path, sync_folder=True) as partial, partial.open("wb") as file:
            for row in range(len(rows.rows)):
                file.write(journal.answer(row) + b"\n")
    except OSError as error:
        raise unwritable(path, error, f" Every answer is safe in {journal.path}.") from None


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"the line is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRow(f"the line must be an object, found {type(found).__name__}")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _custom_id(text: bytes) -> str | None:
    """The custom_id of a line, if it has one."""
    try:
        name = _object(text).get("custom_id")
    except BadRow:
        return None
    return name if isinstance(name, str) and name else None
