"""Requests as an attacker would write them: a path, the expected status, and the body."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SIZE = 4_100_000
"""Nearly as many bytes as a body may have."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Hostile(NamedTuple):
    """A hostile request; `make` builds the body, which is too large to keep."""

    path: str
    status: int
    make: Callable[[], bytes]


def repeated(item: str, start: str, end: str, separator: str = ",") -> Callable[[], bytes]:
    """A body between `start` and `end`, filled with an item as often as fits."""

    def make() -> bytes:
        count = (SIZE - len(start) - len(end)) // len((item + separator).encode())
        return (start + separator.join([item] * count) + end).encode()

    return make


def numbered(item: str, start: str, end: str, width: int = 7) -> Callable[[], bytes]:
    """The same, with the number of each item in place of `#`."""

    def make() -> bytes:
        count = (SIZE - len(start) - len(end)) // (len(item) + width)
        return (start + ",".join(item.replace("#", f"{i:0{width}}") for i in range(count)) + end).encode()

    return make


def written(**fields: Any) -> Callable[[], bytes]:
    """A body of these fields."""
    return lambda: json.dumps(fields).encode()


def phrases(count: int, length: int) -> list[str]:
    """Texts with few common prefixes."""
    return ["".join(chr(97 + (i * j * 7 + j * j + i) % 26) for j in range(length)) for i in range(count)]


def messages(items: Sequence[str]) -> Callable[[], bytes]:
    """A conversation of these messages, given as JSON."""
    return lambda: ('{"messages":[' + ",".join(items) + "]}").encode()


def earlier_call(arguments: str) -> Callable[[], bytes]:
    """A conversation in which the assistant called a function."""
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    return written(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])


RULES = 200
GRAMMAR = "start: (" + " | ".join(f"R{i}" for i in range(RULES)) + ")*\n"
GRAMMAR += "".join(f"R{i}: /[a-z{i % 10}]{{1,20}}x{i}/\n" for i in range(RULES))
USER = '{"role":"user","content":"a"}'
TOOL = '{"messages":[' + USER + '],"tools":[{"type":"function","function":{"name":"f",'
FORM = '{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{'

BODIES: dict[str, Hostile] = {
    "negative token ids": Hostile(COMPLETIONS, 413, repeated("-1", '{"prompt":[', "]}")),
    "token ids": Hostile(COMPLETIONS, 413, repeated("60", '{"prompt":[', "]}")),
    "long token ids": Hostile(COMPLETIONS, 413, repeated("1000000", '{"prompt":[', "]}")),
    "many token ids": Hostile(COMPLETIONS, 400, written(prompt=[60] * 250_000)),
    "many token ids, a negative one at last": Hostile(COMPLETIONS, 422, written(prompt=[*[60] * 250_000, -1])),
    "many token ids, a text at last": Hostile(COMPLETIONS, 422, written(prompt=[*[60] * 250_000, "x"])),
    "prompts of a token": Hostile(COMPLETIONS, 413, repeated("[1]", '{"prompt":[', "]}")),
    "many prompts of a token": Hostile(COMPLETIONS, 422, written(prompt=[[1]] * 65_000)),
    "empty prompts": Hostile(COMPLETIONS, 413, repeated("[]", '{"prompt":[', "]}")),
    "prompts of a letter": Hostile(COMPLETIONS, 413, repeated('"a"', '{"prompt":[', "]}")),
    "many prompts of digits": Hostile(COMPLETIONS, 422, written(prompt=["60"] * 250_000)),
    "a long prompt": Hostile(COMPLETIONS, 400, repeated("word ", '{"prompt":"', '"}', "")),
    "a long prompt of one letter": Hostile(COMPLETIONS, 400, repeated("a", '{"prompt":"', '"}', "")),
    "a long prompt of spaces": Hostile(COMPLETIONS, 400, repeated(" ", '{"prompt":"', '"}', "")),
    "a long prompt of escapes": Hostile(COMPLETIONS, 400, repeated("\\u00e9\\n", '{"prompt":"', '"}', "")),
    "a long prompt of brackets": Hostile(COMPLETIONS, 400, repeated('[,{:\\"', '{"prompt":"', '"}', "")),
    "a long prompt of large letters": Hostile(COMPLETIONS, 400, repeated("語", '{"prompt":"', '"}', "")),
    "a long negative prompt": Hostile(
        COMPLETIONS, 400, repeated("a", '{"prompt":"a","cfg_scale":2,"n":16,"negative_prompt":"', '"}', "")
    ),
    "messages without content": Hostile(CHAT, 413, repeated('{"role":"x"}', '{"messages":[', "]}")),
    "messages": Hostile(CHAT, 413, repeated('{"role":"user","content":""}', '{"messages":[', "]}")),
    "ten thousand messages": Hostile(CHAT, 400, messages([USER] * 10_000)),
    "ten thousand messages, the last one wrong": Hostile(CHAT, 422, messages([*[USER] * 9_999, '{"role":"user"}'])),
    "more messages than are taken": Hostile(CHAT, 422, messages([USER] * 20_000)),
    "parts of a message": Hostile(
        CHAT, 413, repeated('{"type":"text","text":""}', '{"messages":[{"role":"user","content":[', "]}]}")
    ),
    "a long message": Hostile(CHAT, 400, repeated("word ", '{"messages":[{"role":"user","content":"', '"}]}', "")),
    "a long role": Hostile(CHAT, 422, repeated("r", '{"messages":[{"role":"', '","content":"a"}]}', "")),
    "arguments of an earlier call": Hostile(CHAT, 413, earlier_call("[" + "[]," * (SIZE // 3 - 100) + "0]")),
    "tools": Hostile(
        CHAT, 413, repeated('{"type":"function","function":{"name":"f"}}', '{"messages":[],"tools":[', "]}")
    ),
    "parameters of a tool": Hostile(CHAT, 413, numbered('"#":{}', TOOL + '"parameters":{', "}}}]}")),
    "a long description": Hostile(CHAT, 400, repeated("d", TOOL + '"description":"', '"}}]}', "")),
    "unknown fields": Hostile(COMPLETIONS, 413, numbered('"#":1', "{", "}")),
    "many unknown fields": Hostile(COMPLETIONS, 400, written(**{f"x{i}": 1 for i in range(65_000)})),
    "the same field again": Hostile(COMPLETIONS, 413, repeated('"prompt":"a"', "{", "}")),
    "a long name": Hostile(COMPLETIONS, 400, repeated("k", '{"prompt":"a","', '":1}', "")),
    "lists in lists": Hostile(
        COMPLETIONS, 413, repeated("[" * 150 + "]" * 150, '{"prompt":"a","metadata":{"a":[', "]}}")
    ),
    "brackets": Hostile(COMPLETIONS, 413, lambda: b"[" * SIZE),
    "objects": Hostile(COMPLETIONS, 413, repeated('{"a":1}', '{"prompt":"a","metadata":{"a":[', "]}}")),
    "numbers of four thousand digits": Hostile(COMPLETIONS, 400, repeated("9" * 4000, '{"prompt":[', "]}")),
    "numbers of four hundred digits": Hostile(COMPLETIONS, 422, repeated("9" * 399, '{"prompt":[', "]}")),
    "a number of four million digits": Hostile(COMPLETIONS, 400, repeated("9", '{"prompt":"a","seed":', "}", "")),
    "biases": Hostile(COMPLETIONS, 413, numbered('"#":"x"', '{"prompt":"a","logit_bias":{', "}}")),
    "stop strings": Hostile(COMPLETIONS, 413, repeated('"x"', '{"prompt":"a","stop":[', "]}")),
    "banned strings": Hostile(COMPLETIONS, 422, written(prompt="a", n=16, banned_strings=phrases(256, 1000))),
    "as many banned strings as are taken": Hostile(
        COMPLETIONS, 200, written(prompt="a", n=16, max_tokens=4, banned_strings=phrases(2, 1000))
    ),
    "adapters": Hostile(COMPLETIONS, 413, numbered('"#":1', '{"prompt":"a","lora":{', "}}")),
    "a costly grammar for sixteen texts": Hostile(
        COMPLETIONS, 200, written(prompt="a", n=16, max_tokens=2, grammar=GRAMMAR)
    ),
    "a long grammar": Hostile(COMPLETIONS, 422, repeated("a", '{"prompt":"a","grammar":"', '"}', "")),
    "a schema of many properties": Hostile(COMPLETIONS, 413, numbered('"#":{}', FORM, "}}}}}")),
    "a long text to tokenise": Hostile("/tokenize", 422, repeated("ab ", '{"text":"', '"}', "")),
    "a long conversation to tokenise": Hostile(
        "/tokenize", 422, repeated("ab ", '{"messages":[{"role":"user","content":"', '"}]}', "")
    ),
    "many tokens to spell": Hostile("/detokenize", 422, written(tokens=[60] * 250_000)),
    "a model to load": Hostile("/v1/admin/models/load", 422, repeated("m", '{"model":"', '"}', "")),
    "embeddings": Hostile("/v1/embeddings", 501, written(input=["a"] * 250_000)),
    "no JSON": Hostile(COMPLETIONS, 400, lambda: b"\xff" * SIZE),
    "blanks": Hostile(COMPLETIONS, 400, lambda: b" " * SIZE),
}
