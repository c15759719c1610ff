"""Answers constrained by a JSON schema, from a small trained model: complete with every seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from tests.serve.running_server import RunningServer, preloaded, running_server

PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "indoor": {"type": "boolean"},
    },
    "required": ["name", "age", "kind", "indoor"],
    "additionalProperties": False,
}
ENOUGH = 1950
"""Enough for 18 places with at most 100 characters of whitespace, and the values."""

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Describe a pet as JSON: "}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Describe a pet as JSON."}]}),
]


@pytest.fixture(scope="module")
def server(fixtures_dir: Path) -> Iterator[RunningServer]:
    with running_server(preloaded(fixtures_dir / "tiny-lm")) as running:
        yield running


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("path", "asked"), ASKED)
def test_a_json_schema_is_answered_in_full(server: RunningServer, path: str, asked: dict[str, Any], seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}
    status, reply = server.post(path, **asked, response_format=form, max_tokens=ENOUGH, seed=seed)
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    validate(json.loads(choice.get("text") or choice["message"]["content"]), PET)
