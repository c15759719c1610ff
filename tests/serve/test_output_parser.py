"""Reasoning, content and tool calls are parsed back from known messages, however these are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exlm.serve.output_parser import (
    ContentDelta,
    OutputParser,
    ReasoningDelta,
    ResponseEvent,
    ToolCallArgsDelta,
    ToolCallStart,
)
from exlm.serve.tool_formats import (
    GENERIC,
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    call_schema,
    detect_tool_format,
    supports_tools,
)

STYLES = [HERMES, LLAMA3, MISTRAL, GENERIC]
NAMES = frozenset({"f", "get_weather"})

Message = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and calls as names and arguments."""


def joined(parts: list[ResponseEvent]) -> Message:
    thought, said, calls = "", "", []
    for part in parts:
        match part:
            case ContentDelta(text):
                said += text
            case ReasoningDelta(text):
                assert not said
                assert not calls
                thought += text
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolCallArgsDelta(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return thought, said, calls


def read(text: str, style: ToolFormat | None, cuts: tuple[int, ...] = (), **options: Any) -> Message:
    """Parse a text in deltas that end at these offsets."""
    parser = OutputParser(style, NAMES, **options)
    parts: list[ResponseEvent] = []
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, stop in pairwise(places):
        parts += parser.feed(text[start:stop])
    return joined(parts + parser.end())


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    '{"name": "f", "arguments": {"a": [1, {"b": "}]"}]}}', '{"name": "f", "parameters": {}}',
    '{"arguments": {"x": "\\"\\\\"}, "name": "get_weather"}', '{"name": "other", "arguments": "{}"}',
    '[{"name": "f"}, {"name": "get_weather", "arguments": null}]', "f", "; ", "\n", " ",
    "<", "{", '"', "[", "}", '{"name": "f", "arguments": {"a": 1', "hello", "é😀", ",", ":", "\\", '{"x": 1}',
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)


@given(
    texts,
    st.sampled_from([None, *STYLES]),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_events_do_not_depend_on_the_deltas(
    text: str, style: ToolFormat | None, cuts: list[int], thinking: bool, forced: bool, most: int | None
) -> None:
    options: dict[str, Any] = {"in_reasoning": thinking, "forced_call": forced, "max_calls": most}
    whole = read(text, style, **options)
    assert read(text, style, tuple(cuts), **options) == whole
    assert read(text, style, tuple(range(len(text))), **options) == whole
    assert most is None or len(whole[2]) <= most


@given(texts, st.sampled_from([None, HERMES, MISTRAL]))
def test_text_without_markers_is_content(text: str, style: ToolFormat | None) -> None:
    markers = ["<think>"] + ([style.start_marker] if style else [])
    if not any(marker in text for marker in markers):
        assert read(text, style) == ("", text, [])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=4), values, max_size=3)),
    min_size=1,
    max_size=3,
)
words = st.text("abc .,{", min_size=1, max_size=12).map(str.strip).filter(bool)


def written(style: ToolFormat, made: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of that family writes them."""
    objects = [json.dumps({"name": name, style.arguments_key: arguments}) for name, arguments in made]
    match style.name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "llama3":
            return "; ".join(objects)
        case "generic":
            return f"[{','.join(objects)}]"


@given(
    st.sampled_from(STYLES),
    st.none() | words,
    st.none() | words,
    calls,
    st.lists(st.integers(0, 400), max_size=6),
)
def test_written_messages_are_parsed_back(
    style: ToolFormat,
    thought: str | None,
    said: str | None,
    made: list[tuple[str, dict[str, Any]]],
    cuts: list[int],
) -> None:
    if style.bare_json:
        said = None  # text in front makes the rest content as well
    text = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    text += f"{said}\n" if said else ""
    found = read(text + written(style, made), style, tuple(cuts))
    assert found[:2] == (thought or "", said or "")
    assert [(name, json.loads(arguments)) for name, arguments in found[2]] == made


@pytest.mark.parametrize(
    ("text", "style", "message"),
    [
        ("<think>a</think>b", None, ("a", "b", [])),
        ("  <think>a", None, ("a", "", [])),
        ("b <think>a</think>", None, ("", "b <think>a</think>", [])),
        ('<tool_call>{"name": 3}</tool_call>', HERMES, ("", '<tool_call>{"name": 3}</tool_call>', [])),
        ('<tool_call>{"name": "f"', HERMES, ("", '<tool_call>{"name": "f"', [])),
        ('a <tool_call>{"name": "f", "arguments": {"x": 1', HERMES, ("", "a", [("f", '{"x": 1')])),
        (
            '<tool_call>{"name": "f", "arguments": {"x": <}}</tool_call> b',
            HERMES,
            ("", "b", [("f", '{"x": ')]),
        ),
        ('{"name": "unknown", "arguments": {}}', GENERIC, ("", '{"name": "unknown", "arguments": {}}', [])),
        ('{"temperature": 3}', LLAMA3, ("", '{"temperature": 3}', [])),
        ('<|python_tag|>{"name": "g", "parameters": {}}', LLAMA3, ("", "", [("g", "{}")])),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', MISTRAL, ("", "", [("f", '{"a": 1}'), ("g", "{}")])),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', GENERIC, ("", "", [("f", '{"a": 1}')])),
    ],
)
def test_malformed_calls(text: str, style: ToolFormat | None, message: Message) -> None:
    assert read(text, style) == message


def test_a_prompt_may_end_inside_reasoning_or_a_call() -> None:
    assert read("a</think> b", None, in_reasoning=True) == ("a", "b", [])
    assert read('{"name": "f", "arguments": {}}', HERMES, forced_call=True) == ("", "", [("f", "{}")])
    assert read('[{"name": "f", "arguments": {}}]', MISTRAL, forced_call=True) == ("", "", [("f", "{}")])


def test_the_tool_format_of_templates() -> None:
    assert detect_tool_format("…<tool_call>…") is HERMES
    assert detect_tool_format("…[TOOL_CALLS]…") is MISTRAL
    assert detect_tool_format("…<|python_tag|>…") is LLAMA3
    assert detect_tool_format("{{ messages }}") is GENERIC
    assert supports_tools("{%- if tools %}x{% endif %}")
    assert not supports_tools("{% for m in messages %}tools{% endfor %}")


def test_a_forced_call_has_a_schema() -> None:
    tools = [{"function": {"name": "f", "parameters": {"type": "object"}}}, {"function": {"name": "g"}}]
    assert len(call_schema(tools, HERMES)["anyOf"]) == 2
    assert call_schema(tools[:1], LLAMA3)["required"] == ["name", "parameters"]
    assert call_schema(tools, MISTRAL)["maxItems"] == 1
