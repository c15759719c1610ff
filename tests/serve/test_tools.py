"""Forced tool calls: the arguments that they may have, with schemas as clients write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exlm import GrammarFilter, InputError, JsonSchemaFilter, Tokenizer
from exlm.serve.tool_formats import (
    GENERIC,
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    answer_or_call_grammar,
    call_schema,
)
from tests.serve.running_server import RunningServer

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
"""A nested model as pydantic writes it."""
SELF = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"next": {"$ref": "#"}},
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def called(server: RunningServer, tools: list[dict[str, Any]], name: str | None = None, **more: Any) -> Any:
    """The arguments of a forced call."""
    choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
    asked = {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 200, **more}
    status, reply = server.post("/v1/chat/completions", **asked)
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    return json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_schemas_refer_to_their_own_definitions(server: RunningServer) -> None:
    tools = [tool("f", parameters=NESTED), tool("g", parameters=NESTED)]
    for name in ("f", "g", None):
        assert called(server, tools, name)["via"]["city"] in ("Rome", "Oslo")
    tokenizer = server.engine.find(None).info.tokenizer
    for style in (HERMES, LLAMA3, MISTRAL, GENERIC):
        JsonSchemaFilter(tokenizer, call_schema([*tools, tool("h", parameters=SELF)], style))


@pytest.mark.parametrize("parameters", [{}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}])
def test_a_tool_without_parameters_gets_no_arguments(server: RunningServer, parameters: dict[str, Any]) -> None:
    for seed in range(4):
        assert called(server, [tool("now", **parameters)], seed=seed) == {}


def test_only_named_arguments_are_generated(server: RunningServer) -> None:
    named = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    for seed in range(4):
        assert called(server, [tool("f", parameters=named)], seed=seed) == {"city": "Rome"}


ANSWER = {
    "type": "object",
    "properties": {"yes": {"const": 1}},
    "required": ["yes"],
    "additionalProperties": False,
}
CALLS = {
    HERMES: '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    LLAMA3: '{"name": "f", "parameters": {}}',
    MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    GENERIC: '{"name": "f", "arguments": {}}',
}


def passes(fits: GrammarFilter, tokenizer: Tokenizer, text: str, **options: Any) -> bool:
    """Whether a filter accepts a text as complete."""
    fits.begin()
    try:
        for number in tokenizer.encode(text, **options)[0].tolist():
            fits.feed(number)
    except InputError:
        return False
    return bool(fits.next_mask().end_ids)


def test_a_json_answer_may_be_a_call_instead(server: RunningServer) -> None:
    """Agents with tools and an output type send such requests."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
    more = {"response_format": form, "parallel_tool_calls": False, "max_tokens": 400}
    for first, reason in (("<", "tool_calls"), ("{", "stop")):
        (token,) = server.post("/tokenize", text=first)[1]["tokens"]
        asked = {"messages": HI, "tools": [tool("f")], "logit_bias": {str(token): 100}, **more}
        (choice,) = server.post("/v1/chat/completions", **asked)[1]["choices"]
        assert choice["finish_reason"] == reason
        if reason == "stop":
            assert json.loads(choice["message"]["content"]) == {"yes": 1}
        else:
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert called(server, [tool("f")], **more) == {}


@pytest.mark.parametrize("style", CALLS)
@pytest.mark.parametrize("several", [True, False])
def test_the_grammar_of_answers_and_calls(server: RunningServer, style: ToolFormat, several: bool) -> None:
    tokenizer = server.engine.find(None).info.tokenizer
    grammar = answer_or_call_grammar(ANSWER, call_schema([tool("f")], style), style, {}, several)
    fits = GrammarFilter(tokenizer, grammar)
    assert passes(fits, tokenizer, '{\n  "yes": 1\n}')
    assert passes(fits, tokenizer, CALLS[style])
    assert passes(fits, tokenizer, f"{CALLS[style]}\n{CALLS[style]}") == (several and style is HERMES)
    assert not passes(fits, tokenizer, '{"no": 1}')


def test_a_marker_that_is_a_special_token_is_matched_by_id(server: RunningServer) -> None:
    tokenizer = server.engine.find(None).info.tokenizer
    special = {text: number for number, text in tokenizer.extended_id_to_piece.items()}
    opens = next(text for text, number in special.items() if number not in tokenizer.eos_token_ids)
    marked = ToolFormat("hermes", opens, "</end>")
    fits = GrammarFilter(tokenizer, answer_or_call_grammar(ANSWER, call_schema([tool("f")], marked), marked, special))
    spelled = f'{marked.start_marker}{{"name": "f", "arguments": {{}}}}{marked.end_marker}'
    assert passes(fits, tokenizer, spelled, encode_special_tokens=True)
    assert not passes(fits, tokenizer, spelled)
