"""Calls that must be made: what their arguments may be, with schemas as clients write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exlm import JsonSchemaFilter
from exlm.serve.styles import GENERIC, HERMES, LLAMA3, MISTRAL, call_schema
from tests.serve.house import Served

HI = [{"role": "user", "content": "hi"}]
STOP = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {"Stop": STOP},
    "type": "object",
    "properties": {"via": {"$ref": "#/$defs/Stop"}},
    "required": ["via"],
}
"""As pydantic writes a model inside a model."""
SELF = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"next": {"$ref": "#"}},
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def called(server: Served, tools: list[dict[str, Any]], name: str | None = None, **more: Any) -> Any:
    """The arguments of a call that had to be made."""
    choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
    asked = {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 200, **more}
    status, reply = server.post("/v1/chat/completions", **asked)
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    return json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_schemas_refer_to_their_own_definitions(server: Served) -> None:
    tools = [tool("f", parameters=NESTED), tool("g", parameters=NESTED)]
    for name in ("f", "g", None):
        assert called(server, tools, name)["via"]["city"] in ("Rome", "Oslo")
    tokenizer = server.engine.find(None).host.tokenizer
    for style in (HERMES, LLAMA3, MISTRAL, GENERIC):
        JsonSchemaFilter(tokenizer, call_schema([*tools, tool("h", parameters=SELF)], style))


@pytest.mark.parametrize(
    "parameters", [{}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}]
)
def test_what_takes_no_arguments_gets_none(server: Served, parameters: dict[str, Any]) -> None:
    for seed in range(4):
        assert called(server, [tool("now", **parameters)], seed=seed) == {}


def test_nothing_is_made_up_besides_the_arguments_that_are_named(server: Served) -> None:
    named = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    for seed in range(4):
        assert called(server, [tool("f", parameters=named)], seed=seed) == {"city": "Rome"}
