"""The size of JSON, counted without parsing, agrees with the parsed value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from exlm.serve import APIError, limits
from exlm.serve.limits import MIN_JSON_LIMIT, JsonLimits

ERROR_CODES = {413: "body_too_large", 400: "invalid_json"}
TEXT = st.text(st.sampled_from('ab\\",:[]{}0123456789é\n'), max_size=30)
VALUES = st.recursive(
    st.none() | st.integers(-(10**30), 10**30) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=40,
)


def parts(value: Any) -> Iterator[str]:
    """The commas of a value's JSON, and its nodes: lists, objects and fields."""
    if isinstance(value, list | dict):
        yield "node"
        yield from ["comma"] * max(len(value) - 1, 0)
    if isinstance(value, dict):
        yield from ["node"] * len(value)
        value = [*value.values()]
    for inner in value if isinstance(value, list) else ():
        yield from parts(inner)


def refused(text: bytes, values: int = 10**9, nodes: int = 10**9, status: int = 413) -> str:
    with pytest.raises(APIError) as found:
        JsonLimits(values, nodes).check(text)
    assert (found.value.status, found.value.code) == (status, ERROR_CODES[status])
    return found.value.message


@pytest.mark.parametrize("window", [1, 3, 1 << 18])
@hypothesis.settings(
    max_examples=150, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(VALUES, st.booleans())
def test_counts_agree_with_the_parsed_json(
    monkeypatch: pytest.MonkeyPatch, window: int, value: Any, ascii: bool
) -> None:
    monkeypatch.setattr(limits, "WINDOW_BYTES", window)
    text = json.dumps(value, ensure_ascii=ascii).encode()
    found = [*parts(value)]
    values, nodes = 1 + found.count("comma"), found.count("node")
    JsonLimits(values, nodes).check(text)
    JsonLimits(values, nodes).check(bytearray(text))
    if nodes:
        assert "lists, objects and fields" in refused(text, nodes=nodes - 1)
    if values > 1:
        assert "values" in refused(text, values=values - 1)


def test_several_texts_share_the_limits() -> None:
    JsonLimits(4, 2).check(b"[1,2]", b"[3,4]")
    with pytest.raises(APIError, match=r"^Both has more than 1 lists"):
        JsonLimits(4, 1).check(b"[1,2]", b"[3,4]", what="Both")


def test_long_numbers_are_refused() -> None:
    allowed = JsonLimits(100, 100)
    allowed.check(b"[" + b"7" * 399 + b"]")
    allowed.check(json.dumps(["1" * 5000, '\\"' + "2" * 5000, {"3" * 5000: 1}]).encode())
    for number in (b"7" * 400, b"-" + b"1" * 5000, b"0." + b"3" * 400, b"1e" + b"9" * 400):
        assert "a number of 400 digits or more" in refused(b'["a",' + number + b"]", status=400)


def test_text_that_is_not_json_is_left_to_the_parser() -> None:
    for text in (b"", b'"', b'{"a', b"\\", b'"\\', b"\xff\xfe", b'"a" "b" "c'):
        JsonLimits(100, 100).check(text)


def test_limits_grow_with_the_largest_body() -> None:
    assert JsonLimits.for_body(4 << 20) == JsonLimits(1 << 18, 1 << 16)
    assert JsonLimits.for_body(1 << 10) == JsonLimits(MIN_JSON_LIMIT, MIN_JSON_LIMIT)
    assert JsonLimits.for_body(1 << 30) == JsonLimits(1 << 26, 1 << 24)
