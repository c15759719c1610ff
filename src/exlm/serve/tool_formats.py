"""How families of models write tool calls, and which family a chat template belongs to. Data, no parsing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls.

    `opens` announces them and `closes` ends each; where it may be left out (`bare`), calls are recognised by
    being JSON at the very beginning. `key` is what the arguments are called. `primer` is
    what a prompt ends with so that nothing but a call can follow.
    """

    name: Literal["hermes", "llama3", "mistral", "generic"]
    start_marker: str = ""
    end_marker: str = ""
    bare_json: bool = False
    arguments_key: str = "arguments"
    forced_prefix: str = ""
    is_list: bool = False
    """Whether a call is written as an element of a list."""


CALL_WHITESPACE = r"[\x20\x0A]"
"""Whitespace in a call that is forced: what models are used to, but not endlessly."""

OPEN_SCHEMA_KEYWORDS = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")
)
"""What says, at the top of a tool's schema, which arguments there may be besides `properties`."""

JSON_WHITESPACE = r"[\x20\x0A]{1,100}"
"""Whitespace in a JSON text that may be indented, but not endlessly."""

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", forced_prefix="<tool_call>\n")
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", bare_json=True, arguments_key="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", forced_prefix="[TOOL_CALLS]", is_list=True)
GENERIC = ToolFormat("generic", bare_json=True)


def detect_tool_format(template: str) -> ToolFormat:
    """The way a chat template's model writes calls."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or "Environment: ipython" in template:
        return LLAMA3
    return GENERIC


def supports_tools(template: str) -> bool:
    """Whether a chat template tells its model of the tools it is given."""
    return re.search(r"\{[%{][^}]*\btools\b", template) is not None


def call_schema(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> dict[str, Any]:
    """What a call of one of these tools looks like, as a JSON schema.

    A tool's own schema keeps its references (`#/$defs/…`), which are told from where it begins.
    """
    calls: list[dict[str, Any]] = []
    for place, tool in enumerate(tools):
        function = tool["function"]
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    tool_format.arguments_key: {
                        "$id": f"exlm:/tools/{place}",
                        **_arguments(function.get("parameters")),
                    },
                },
                "required": ["name", tool_format.arguments_key],
                "additionalProperties": False,
            }
        )
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    whole = {"type": "array", "items": one, "minItems": 1, "maxItems": 1} if tool_format.is_list else one
    return {**whole, "x-guidance": {"whitespace_pattern": CALL_WHITESPACE}}


def answer_or_call_grammar(
    answer: Mapping[str, Any],
    call: Mapping[str, Any],
    tool_format: ToolFormat,
    special: Mapping[str, int],
    several: bool = True,
) -> str:
    """A grammar for answers that are a JSON text of one schema, or a call of another, perhaps several.

    `special` has the ids of special tokens: where a marker is one, it cannot be spelled.
    """

    spacing = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    if (
        tool_format.bare_json
    ):  # both begin alike: one schema for them, as a grammar knows only one JSON text at a place
        kinds = [{"$id": "exlm:/answer", **answer}, call]
        plain = [{name: value for name, value in kind.items() if name != "x-guidance"} for kind in kinds]
        return f"start: %json {json.dumps({'anyOf': plain, **spacing})}\n"
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
    """What a function's arguments look like: those it names, unless it says that it takes others, too.

    To JSON schema anything else would do as well, and a model that must write a call makes something up.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" not in parameters or OPEN_SCHEMA_KEYWORDS & parameters.keys():
        return parameters
    return {**parameters, "additionalProperties": False}
