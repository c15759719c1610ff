"""The formats in which model families write tool calls, and which of them a chat template uses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: Literal["hermes", "llama3", "mistral", "generic"]
    start_marker: str = ""
    """Announces calls."""
    end_marker: str = ""
    """Ends each call."""
    bare_json: bool = False
    """Whether the start marker may be left out: a call is then recognised as JSON at the beginning of the answer."""
    arguments_key: str = "arguments"
    """The field of a call that has its arguments."""
    forced_prefix: str = ""
    """What the prompt ends with where the answer must be a call."""
    is_list: bool = False
    """Whether calls are written as elements of a list."""


CALL_WHITESPACE = r"[\x20\x0A]"
"""Whitespace in a forced call: a single character, as models write it."""

OPEN_SCHEMA_KEYWORDS = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")
)
"""Keywords at the top of a tool's schema that allow arguments besides its `properties`."""

JSON_WHITESPACE = r"[\x20\x0A]{1,100}"
"""Whitespace in JSON that may be indented; bounded, because some models never stop writing it."""

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", forced_prefix="<tool_call>\n")
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", bare_json=True, arguments_key="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", forced_prefix="[TOOL_CALLS]", is_list=True)
GENERIC = ToolFormat("generic", bare_json=True)


def detect_tool_format(template: str) -> ToolFormat:
    """The format in which a chat template's model writes calls."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or "Environment: ipython" in template:
        return LLAMA3
    return GENERIC


def supports_tools(template: str) -> bool:
    """Whether a chat template renders the tools it is given."""
    return re.search(r"\{[%{][^}]*\btools\b", template) is not None


def call_schema(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> dict[str, Any]:
    """The JSON schema of a call of one of these tools.

    Each tool's own schema gets an `$id`, so that its references (`#/$defs/…`) still resolve inside of it.
    """
    calls: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    tool_format.arguments_key: {
                        "$id": f"exlm:/tools/{index}",
                        **_arguments(function.get("parameters")),
                    },
                },
                "required": ["name", tool_format.arguments_key],
                "additionalProperties": False,
            }
        )
    call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if tool_format.is_list:
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": 1}
    return {**call, "x-guidance": {"whitespace_pattern": CALL_WHITESPACE}}


def answer_or_call_grammar(
    answer: Mapping[str, Any],
    call: Mapping[str, Any],
    tool_format: ToolFormat,
    special: Mapping[str, int],
    several: bool = True,
) -> str:
    """A grammar for an answer of one JSON schema or a call of another; with `several`, one or more calls.

    `special` has the ids of special tokens: a marker that is one of them is matched by its id, not as text.
    """
    spacing = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    if tool_format.bare_json:  # both begin with `{`, and a grammar can have only one JSON schema at a position
        schemas = [{"$id": "exlm:/answer", **answer}, {**call}]
        for schema in schemas:
            schema.pop("x-guidance", None)
        return f"start: %json {json.dumps({'anyOf': schemas, **spacing})}\n"
    closes = f" blank? {marker(tool_format.end_marker)}" if tool_format.end_marker else ""
    more = " (blank? call)*" if several and tool_format.end_marker else ""
    return (
        f"start: answer | call{more}\n"
        f"answer: %json {json.dumps({**spacing, **answer})}\n"
        f"call: {marker(tool_format.start_marker)} blank? body{closes}\n"
        f"body: %json {json.dumps(call)}\n"
        "blank: /[ \\n]{1,4}/\n"
    )


def _arguments(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a function's arguments: only those it names, unless it says that there may be others.

    JSON Schema would allow any others, and a model that is forced to write a call would invent some.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" not in parameters or OPEN_SCHEMA_KEYWORDS & parameters.keys():
        return parameters
    return {**parameters, "additionalProperties": False}
