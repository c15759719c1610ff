"""Untrusted grammars are compiled or refused within a second, and never end this process."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from exlm.constrained import FilterStack, GrammarFilter, JsonSchemaFilter, MaskFilter, RegexFilter
from exlm.errors import InputError
from exlm.tokenizer import Codec
from tests.constrained.toy_vocabularies import random_then_closing, run_stack

pytest.importorskip("llguidance")

Make = Callable[[Codec], MaskFilter]


def regex(pattern: Any) -> Make:
    return lambda codec: RegexFilter(codec, pattern)


def schema(source: Any) -> Make:
    return lambda codec: JsonSchemaFilter(codec, source)


def lark(source: Any) -> Make:
    return lambda codec: GrammarFilter(codec, source)


def nested(depth: int) -> Any:
    inner: Any = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def chain(kind: Callable[[str], dict[str, Any]], length: int) -> dict[str, Any]:
    """Definitions that each refer to the next."""
    rest = {f"d{n}": kind(f"#/$defs/d{n + 1}") for n in range(length)}
    return {"$defs": {**rest, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def circular() -> Any:
    loop: dict[str, Any] = {"type": "object"}
    loop["properties"] = {"a": loop}
    return loop


REFUSED: dict[str, Make] = {
    "open group": regex("a("),
    "looks ahead": regex("(?=a)a"),
    "refers back": regex(r"(a)\1"),
    "no text": regex(None),
    "surrogate": regex("[\ud800]"),
    "deep groups": regex("(" * 10_000 + "a" + ")" * 10_000),
    "very deep groups": regex("(" * 500_000 + "a" + ")" * 500_000),
    "two million letters": regex("a" * 2_000_000),
    "not json": schema("{bad"),
    "nan": schema('{"const": NaN}'),
    "huge integer": schema('{"const": ' + "9" * 10_000 + "}"),
    "wrong type": schema({"type": "foo"}),
    "a list": schema([]),
    "a number": schema(3),
    "nothing": schema(None),
    "false": schema(False),
    "not serialisable": schema({"const": {1, 2}}),
    "a loop of objects": schema(circular()),
    "unknown format": schema({"type": "string", "format": "zzz"}),
    "unsupported keyword": schema({"not": {"type": "string"}}),
    "a remote reference": schema({"$ref": "http://example.com/x.json"}),
    "itself": schema({"$ref": "#"}),
    "circular references": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "half a character": schema('{"const": "\\ud800"}'),
    "half a character in a name": schema({"properties": {"\ud800": {}}}),
    "deep": schema(nested(300)),
    "too deep for Python": schema(nested(100_000)),
    "deep text": schema('{"items":' * 50_000 + "{}" + "}" * 50_000),
    "ten megabytes": schema({"enum": ["x" * 10_000 + str(n) for n in range(1000)]}),
    "ten megabytes of text": schema('{"const": "' + "x" * 10_000_000 + '"}'),
    "a hundred thousand words": schema({"enum": [f"w{n}" for n in range(90_000)]}),
    "ten thousand properties": schema({"properties": {f"p{n}": {"type": "string"} for n in range(10_000)}}),
    "a product of choices": schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]}
    ),
    "long references": schema(chain(lambda ref: {"properties": {"a": {"$ref": ref}}}, 5000)),
    "long allOf": schema(chain(lambda ref: {"allOf": [{"$ref": ref}, {"type": "string"}]}, 5000)),
    "long anyOf": schema(chain(lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]}, 5000)),
    "unknown rule": lark("start: b"),
    "no start": lark('a: "x"'),
    "endless rule": lark("start: start"),
    "not Lark": lark("{}"),
    "json in disguise": lark('{"grammars": [{"json_schema": {}}]}'),
    "no grammar": lark(None),
    "deep parentheses": lark("start: " + "(" * 10_000 + '"x"' + ")" * 10_000),
    "exploding terminals": lark("start: R0\n" + "".join(f"R{n}: R{n + 1} R{n + 1}\n" for n in range(30)) + 'R30: "x"'),
    "fifty thousand rules": lark(
        "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(40_000)) + 'r40000: "x"'
    ),
}
SERVED: dict[str, Make] = {
    "nested counts": regex("(a{1,1000}){1,1000}"),
    "thrice nested counts": regex("((a{1,1000}){1,1000}){1,1000}"),
    "exponential states": regex("(a|b)*a(a|b){500}"),
    "slow in other engines": regex("(a*)*b"),
    "empty repeats": regex("((a?){50}){50}"),
    "forced letters": regex("a{30000}"),
    "many letters": regex(r"(\p{L}\p{N}){500}"),
    "long counts": regex(r"(.*a.{30}.*b.{30}.*c)"),
    "many words": schema({"enum": [f"word{n}" for n in range(5000)]}),
    "a billion items": schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
    "a billion letters": schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "exponential references": schema(
        chain(lambda ref: {"properties": {key: {"$ref": ref} for key in "abcdefghij"}}, 20)
    ),
    "exponential choices": schema(chain(lambda ref: {"anyOf": [{"$ref": ref}, {"$ref": ref}]}, 20)),
    "slow pattern": schema({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
    "recursion": schema({"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
    "left recursion": lark('start: a\na: a "x" | "x"'),
    "ambiguity": lark('start: a\na: a a | "x" | '),
    "exploding rules": lark("start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(30)) + 'r30: "x"'),
}


@pytest.fixture(scope="module")
def time_limit(every_byte: Codec) -> float:
    """One second, and on a busy machine the time of a trivial pattern on top."""
    RegexFilter(every_byte, "warm")
    started = time.perf_counter()
    RegexFilter(every_byte, "trivial")
    return 1.0 + max(0.0, time.perf_counter() - started - 0.2)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_within_a_second(trained: Codec, time_limit: float, name: str) -> None:
    started = time.perf_counter()
    with pytest.raises(InputError) as caught:
        REFUSED[name](trained)
    assert time.perf_counter() - started < time_limit
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", SERVED)
def test_served_within_bounds(trained: Codec, time_limit: float, name: str) -> None:
    """A filter compiles in time, every step is fast, and decoding ends with a text or an InputError."""
    started = time.perf_counter()
    stack = FilterStack([SERVED[name](trained)], trained)
    assert time.perf_counter() - started < time_limit
    choose = random_then_closing(random.Random(2), trained, 40)
    started = time.perf_counter()
    with suppress(InputError):
        assert run_stack(stack, choose, limit=80)[0]
    assert time.perf_counter() - started < 80 * 0.05 * time_limit


def test_grammars_at_the_limit_end_in_time(trained: Codec, time_limit: float) -> None:
    for number, make in enumerate((regex("a{1000000000}"), regex("b{200000}"), schema({"multipleOf": 99991}))):
        started = time.perf_counter()
        with suppress(InputError):
            FilterStack([make(trained)], trained).begin()
        assert time.perf_counter() - started < 1.2 * time_limit, number


def test_a_valid_filter_still_works_after_refused_ones(trained: Codec) -> None:
    for make in (REFUSED["fifty thousand rules"], REFUSED["ten thousand properties"]):
        with pytest.raises(InputError):
            make(trained)
    stack = FilterStack([JsonSchemaFilter(trained, {"const": [1]}, compact=True)], trained)
    ids, ended = run_stack(stack, lambda allowed, _: allowed[0])
    assert ended
    assert json.loads(trained.decode(ids, continues=True)) == [1]


def test_errors_name_the_mistake(trained: Codec) -> None:
    for name, reason in (
        ("open group", "unclosed group"),
        ("unsupported keyword", "not"),
        ("itself", "matches no text"),
        ("half a character", r"lone surrogate \(U\+D800\)"),
        ("ten megabytes", "too large"),
        ("ten thousand properties", "too complex"),
        ("fifty thousand rules", "too complex|nests too deep"),
        ("unknown rule", "unknown name"),
    ):
        with pytest.raises(InputError, match=reason):
            REFUSED[name](trained)
