"""Texts of random allowed tokens match the grammar."""

from __future__ import annotations

import gc
import json
import random
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from exlm.constrained import FilterStack, GrammarFilter, JsonSchemaFilter, RegexFilter, grammar, token_sets
from exlm.errors import InputError, MissingExtra
from exlm.tokenizer import Codec
from tests.constrained.toy_vocabularies import allowed_ids, byte_codec, random_then_closing, run_stack

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "bé", None, 3]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25}, {"const": {"x": [True]}}]},
    {"type": "string", "pattern": "^[a-f]{2,5}(é|🦙)$"},
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
    {"type": "string", "format": "date"},
    {},
]
PATTERNS = [r"\d{3}-[a-z]+", "(yes|no|perhaps not)", "é*x?", "[^a-z]{3}", "^a+?b$", r"(?i)select [a-z]{1,5}"]
LARK = [
    ('start: expr\nexpr: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" expr ")"', r"[-+0-9()]+"),
    (
        'start: greeting " " NAME\ngreeting: "Hello" | "Hallöchen"\nNAME: /[A-Z][a-z]{2,4}/',
        r"Hall?.*|Hello.*",
    ),
]


def generate_text(stack: FilterStack, codec: Codec, seed: int, after: int = 30) -> str | None:
    """A text of random allowed tokens, or None if it did not end by itself."""
    ids, ended = run_stack(stack, random_then_closing(random.Random(seed), codec, after))
    return codec.decode(ids, continues=True) if ended else None


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_json_is_valid(codec: Codec, schema: dict[str, Any]) -> None:
    stack = FilterStack([JsonSchemaFilter(codec, schema)], codec)
    texts = [text for seed in range(10) if (text := generate_text(stack, codec, seed)) is not None]
    assert len(texts) >= 5
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_compact_json_has_no_space_in_between(trained: Codec) -> None:
    for schema in SCHEMAS:
        stack = FilterStack([JsonSchemaFilter(trained, schema, compact=True)], trained)
        texts = [text for seed in range(6) if (text := generate_text(stack, trained, seed)) is not None]
        assert texts
        for text in texts:
            jsonschema.validate(json.loads(text), schema)
            assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', '""', text)), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_text_matches_from_start_to_end(codec: Codec, pattern: str) -> None:
    stack = FilterStack([RegexFilter(codec, pattern)], codec)
    texts = [text for seed in range(20) if (text := generate_text(stack, codec, seed)) is not None]
    assert len(texts) >= 15
    for text in texts:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(("source", "shape"), LARK)
def test_text_matches_the_grammar(codec: Codec, source: str, shape: str) -> None:
    stack = FilterStack([GrammarFilter(codec, source)], codec)
    texts = [text for seed in range(20) if (text := generate_text(stack, codec, seed)) is not None]
    assert len(texts) >= 5
    for text in texts:
        assert re.fullmatch(shape, text), text
        assert text.count("(") == text.count(")")


def test_all_tokens_of_the_same_bytes_are_allowed(byte_fallback: Codec) -> None:
    stack = FilterStack([RegexFilter(byte_fallback, "[ab]")], byte_fallback)
    stack.begin()
    ids = byte_fallback.vocab.piece_to_id()
    assert allowed_ids(stack) == {3 + ord("a"), 3 + ord("b"), ids["a"], ids["b"]}


def test_special_tokens_are_allowed_only_where_the_grammar_names_them(tmp_path: Path) -> None:
    codec = byte_codec(tmp_path, [b"</s>", b"<|call|>", *(bytes([n]) for n in range(256))])
    stack = FilterStack([GrammarFilter(codec, 'start: "a" <|call|>')], codec)
    stack.begin()
    stack.feed(2 + ord("a"))
    assert stack.allowed().forced_id == 1
    stack = FilterStack([RegexFilter(codec, ".*")], codec)
    stack.begin()
    assert 1 not in allowed_ids(stack)


def test_eos_is_allowed_when_the_text_may_end_and_forced_when_it_must(every_byte: Codec) -> None:
    first = every_byte.encode("a")[0]
    stack = FilterStack([RegexFilter(every_byte, "a{1,2}")], every_byte)
    stack.begin()
    assert stack.allowed().forced_id == first
    assert stack.allowed().end_ids == frozenset()
    stack.feed(first)
    assert allowed_ids(stack) == {first, every_byte.eos_ids[0]}
    assert stack.allowed().end_ids == set(every_byte.eos_ids)
    stack.feed(first)
    assert stack.allowed().forced_id == every_byte.eos_ids[0]
    assert stack.allowed().end_ids == set(every_byte.eos_ids)
    stack.feed(every_byte.eos_ids[0])
    assert stack.allowed().forced_id == every_byte.eos_ids[0]


def test_every_eos_is_allowed_and_the_first_is_forced(tmp_path: Path) -> None:
    codec = byte_codec(tmp_path, [b"</s>", b"<|im_end|>", *(bytes([n]) for n in range(256))], eos=[1, 0])
    stack = FilterStack([RegexFilter(codec, "a?")], codec)
    stack.begin()
    assert allowed_ids(stack) == {0, 1, 2 + ord("a")}
    assert stack.allowed().end_ids == {0, 1}
    stack.feed(2 + ord("a"))
    assert stack.allowed().forced_id == 1


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    codec = byte_codec(tmp_path, [b"<a>", b"<b>", *(bytes([n]) for n in range(256))], eos=[])
    assert not codec.eos_ids
    with pytest.raises(InputError, match="no EOS"):
        RegexFilter(codec, "a")


def test_a_text_that_cannot_be_tokenized_as_written_still_ends(tmp_path: Path) -> None:
    pieces = [b"</s>", b"<s>", *(bytes([n]) for n in range(256)), b"HEL", b"LO"]
    codec = byte_codec(tmp_path, pieces, lower=True)
    assert codec.decode(codec.encode("HELLO")) == "hello"
    stack = FilterStack([RegexFilter(codec, "HELLO WORLD")], codec)
    ids, ended = run_stack(stack, lambda allowed, _: allowed[0])
    assert ended
    assert codec.decode(ids, continues=True) == "HELLO WORLD"
    assert ids[:2] == [258, 259]


def test_the_healed_prompt_prefix_comes_first(codec: Codec) -> None:
    for made in (
        JsonSchemaFilter(codec, {"const": "x"}),
        RegexFilter(codec, '"x"'),
        GrammarFilter(codec, 'start: "\\"x\\""'),
    ):
        made.begin('a"')
        raw = b""
        while not made.next_mask().end_ids:
            number = sorted(made.next()[0] or ())[0]
            raw += grammar.token_trie_of(codec).token_bytes[number]
            made.feed(number)
        assert raw == b'a""x"'
        made.begin("")
        assert not made.next_mask().end_ids


def test_pydantic_models_and_texts_are_schemas(codec: Codec) -> None:
    pydantic = pytest.importorskip("pydantic")
    made = pydantic.create_model("Person", name=(str, ...), age=(int, 3))
    for schema in (made, json.dumps(made.model_json_schema()), True, "true", "{}"):
        stack = FilterStack([JsonSchemaFilter(codec, schema)], codec)
        texts = [text for seed in range(4) if (text := generate_text(stack, codec, seed)) is not None]
        assert all(json.loads(text) is not ... for text in texts)
        if schema is made:
            assert all(made.model_validate_json(text) for text in texts)


def test_a_schema_may_set_its_own_whitespace(every_byte: Codec) -> None:
    schema = {"const": [1, 2], "x-guidance": {"whitespace_flexible": False, "item_separator": " ;"}}
    text = generate_text(FilterStack([JsonSchemaFilter(every_byte, schema)], every_byte), every_byte, 0)
    assert text == "[1 ;2]"


def test_whitespace_is_bounded(every_byte: Codec) -> None:
    stack = FilterStack([JsonSchemaFilter(every_byte, {"const": [1]})], every_byte)
    space = every_byte.encode(" ")[0]
    ids, ended = run_stack(stack, lambda allowed, _: space if space in allowed else allowed[0], limit=500)
    assert ended
    assert json.loads(every_byte.decode(ids, continues=True)) == [1]
    assert ids.count(space) == 200


def test_a_token_that_does_not_fit_is_an_error(every_byte: Codec) -> None:
    found = RegexFilter(every_byte, "abc")
    with pytest.raises(InputError, match=r"RegexFilter cannot go on with token \d+: .*doesn't satisfy"):
        found.feed(every_byte.encode("x")[0])
    with pytest.raises(InputError, match="cannot go on"):
        found.next()
    found.begin("")
    assert found.next()[0] == {every_byte.encode("a")[0]}


def test_jobs_and_clones_do_not_share_state(codec: Codec) -> None:
    made = RegexFilter(codec, "[ab]c*")
    stacks = [FilterStack([made], codec) for _ in range(2)]
    for stack in stacks:
        stack.begin()
    before = allowed_ids(stacks[1])
    stacks[0].feed(min(allowed_ids(stacks[0])))
    assert allowed_ids(stacks[1]) == before
    assert made.next()[0] == before
    other = made.clone()
    other.feed(min(before))
    assert made.next()[0] == before
    assert other.next()[0] != before


def test_a_parser_at_its_limit_does_not_affect_other_jobs(every_byte: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar.PARSER_LIMITS, "max_lexer_states", 3000)
    made = RegexFilter(every_byte, "(.*a.{30}.*b.{30}.*c)+")
    source = random.Random(1)
    letters = [every_byte.encode(letter)[0] for letter in "abcxyz"]

    def run() -> int:
        stack = FilterStack([made], every_byte)
        stack.begin()
        for step in range(5000):
            try:
                stack.allowed()
                stack.feed(source.choice(letters))
            except InputError as error:
                reasons.append(str(error))
                return step
        return -1

    reasons: list[str] = []
    steps = [run() for _ in range(2)]
    assert all("too many states" in reason for reason in reasons)
    assert min(steps) > 20
    made.begin("")
    assert made.next()[0]


def test_masks_are_the_same_from_many_threads(trained: Codec) -> None:
    made = JsonSchemaFilter(trained, SCHEMAS[0])

    def run(seed: int) -> list[int]:
        return run_stack(FilterStack([made], trained), random_then_closing(random.Random(seed), trained, 20))[0]

    expected = [run(seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(16))) == expected


def test_background_threads_give_the_same_masks(trained: Codec) -> None:
    made = JsonSchemaFilter(trained, SCHEMAS[0])
    plain, ahead = (FilterStack([made], trained) for _ in range(2))
    choose = random_then_closing(random.Random(3), trained, 20)
    with ThreadPoolExecutor(2) as pool:
        for stack in (plain, ahead):
            stack.begin()
        for step in range(60):
            ahead.start_background(pool)
            one, two = plain.allowed(), ahead.allowed()
            assert one.mask is not None
            assert two.mask is not None
            assert (one.mask == two.mask).all()
            assert (one.end_ids, one.forced_id) == (two.end_ids, two.forced_id)
            number = choose(token_sets.bitmask_ids(one.mask).tolist(), step)
            if number in one.end_ids:
                break
            for stack in (plain, ahead):
                stack.feed(number)


def test_cached_tables_are_freed_with_the_tokenizer(tmp_path: Path) -> None:
    codec = byte_codec(tmp_path, [b"</s>", b"<s>", *(bytes([n]) for n in range(256))])
    made = RegexFilter(codec, "a")
    watched = weakref.ref(codec)
    del codec, made
    gc.collect()
    assert watched() is None


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, every_byte: Codec) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (
        lambda: RegexFilter(every_byte, "never seen before"),
        lambda: GrammarFilter(every_byte, 'start: "never seen before"'),
        lambda: JsonSchemaFilter(every_byte, {"const": "never seen before"}),
    ):
        with pytest.raises(MissingExtra, match=r"pip install 'exlm\[grammar\]'"):
            make()


def test_one_tokenizer_is_built_for_all_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    built = []
    original = llguidance.LLTokenizer
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *a, **k: built.append(1) or original(*a, **k))
    codec = byte_codec(tmp_path, [b"</s>", b"<s>", *(bytes([n]) for n in range(256))])
    threads = [threading.Thread(target=RegexFilter, args=(codec, "a|b")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
