"""Released integrations for exllamav2 (lm-format-enforcer, formatron) produce valid JSON with exlm."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from formatron.formatter import FormatterBuilder
from formatron.integrations.exllamav2 import (
    FormatterFilter,
    create_engine_vocabulary,
    create_formatter_filter,
)
from formatron.schemas.json_schema import create_schema
from formatron.schemas.pydantic import ClassSchema
from jsonschema import validate
from lmformatenforcer import JsonSchemaParser
from lmformatenforcer.integrations.exllamav2 import (
    ExLlamaV2TokenEnforcerFilter,
    build_token_enforcer_tokenizer_data,
)

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exllamav2.generator.filters import ExLlamaV2PrefixFilter


class Hero(ClassSchema):
    """The schema of the generated JSON."""

    strong: bool
    kind: Literal["wizard", "warrior"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "[A-Z][a-z]{1,8}"},
        "strong": {"type": "boolean"},
        "kind": {"enum": ["wizard", "warrior"]},
    },
    "required": ["name", "strong", "kind"],
    "additionalProperties": False,
}


@pytest.fixture
def generator(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2DynamicGenerator:
    return ExLlamaV2DynamicGenerator(model, cache, tokenizer)


@pytest.fixture
def settings(tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2Sampler.Settings:
    """Settings that exclude spaces, which both libraries allow nearly everywhere."""
    made = ExLlamaV2Sampler.Settings(temperature=0.9, top_p=0.95)
    pieces = tokenizer.get_id_to_piece_list()
    made.disallow_tokens(tokenizer, [n for n, piece in enumerate(pieces) if piece[:1].isspace()])
    return made


@pytest.fixture
def enforcer(tokenizer: ExLlamaV2Tokenizer) -> Callable[[], Any]:
    """Returns a new lm-format-enforcer filter at each call."""
    data = build_token_enforcer_tokenizer_data(tokenizer)
    return lambda: ExLlamaV2TokenEnforcerFilter(JsonSchemaParser(SCHEMA), data)


@pytest.fixture
def formatter(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> Callable[[], Any]:
    """Returns a new formatron filter at each call."""

    def make() -> Any:
        builder = FormatterBuilder()
        builder.append_str(f"{builder.json(Hero, capture_name='hero')}")
        return create_formatter_filter(model, tokenizer, builder)

    return make


def test_lm_format_enforcer(
    generator: ExLlamaV2DynamicGenerator,
    tokenizer: ExLlamaV2Tokenizer,
    settings: ExLlamaV2Sampler.Settings,
    enforcer: Callable[[], Any],
) -> None:
    prompts = ["A hero: ", "Once upon a time", "{"]
    filters = [
        [enforcer(), ExLlamaV2PrefixFilter(generator.model, tokenizer, ["{", " {"])],
        None,
        [enforcer()],
    ]
    texts = generator.generate(
        prompts,
        max_new_tokens=120,
        gen_settings=settings,
        filters=filters,
        filter_prefer_eos=True,
        stop_conditions=[tokenizer.eos_token_id],
        completion_only=True,
        seed=1,
    )
    validate(json.loads(texts[0]), SCHEMA)
    validate(json.loads(texts[2]), SCHEMA)


def test_lm_format_enforcer_builds_its_own_tokenizer_data(
    generator: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    made = ExLlamaV2TokenEnforcerFilter(JsonSchemaParser({"enum": ["yes", "no"]}), tokenizer)
    text = generator.generate("Well: ", 20, filters=[made], filter_prefer_eos=True, completion_only=True)
    assert json.loads(text) in ("yes", "no")


@pytest.mark.parametrize("seed", [1, 2])
def test_formatron(
    generator: ExLlamaV2DynamicGenerator,
    tokenizer: ExLlamaV2Tokenizer,
    settings: ExLlamaV2Sampler.Settings,
    formatter: Callable[[], Any],
    seed: int,
) -> None:
    filters = [formatter(), formatter()]
    texts, results = generator.generate(
        ["A hero: ", "Another: "],
        max_new_tokens=100,
        filters=[[made] for made in filters],
        stop_conditions=[tokenizer.eos_token_id],
        gen_settings=settings,
        completion_only=True,
        return_last_results=True,
        seed=seed,
    )
    for text, made, result in zip(texts, filters, results, strict=True):
        found = json.loads(text)
        assert set(found) == {"strong", "kind"}
        assert made.is_completed()
        assert made.formatter_captures["hero"] == Hero(**found)
        assert result["new_tokens"] > 5
        assert result["time_generate"] > 0


def test_both_in_one_batch(
    generator: ExLlamaV2DynamicGenerator,
    tokenizer: ExLlamaV2Tokenizer,
    settings: ExLlamaV2Sampler.Settings,
    enforcer: Callable[[], Any],
    formatter: Callable[[], Any],
) -> None:
    ids = tokenizer.encode("A hero: ")
    for name, made in (("enforcer", enforcer()), ("formatter", formatter())):
        generator.enqueue(
            ExLlamaV2DynamicJob(
                ids,
                max_new_tokens=120,
                gen_settings=settings,
                filters=[made],
                filter_prefer_eos=True,
                stop_conditions=[tokenizer.eos_token_id],
                identifier=name,
            )
        )
    texts = {"enforcer": "", "formatter": ""}
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            texts[str(result["identifier"])] += result.get("text", "")
    validate(json.loads(texts["enforcer"]), SCHEMA)
    Hero(**json.loads(texts["formatter"]))


def test_filters_in_the_settings_of_the_base_and_streaming_generators(
    model: ExLlamaV2,
    cache: ExLlamaV2Cache,
    tokenizer: ExLlamaV2Tokenizer,
    settings: ExLlamaV2Sampler.Settings,
    enforcer: Callable[[], Any],
    formatter: Callable[[], Any],
) -> None:
    settings.filter_prefer_eos = True
    settings.filters = [enforcer()]
    base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    text = base.generate_simple("A hero: ", settings, 120, seed=1, completion_only=True)
    assert isinstance(text, str)
    validate(json.loads(text), SCHEMA)
    settings.filters = [formatter()]
    streaming = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    streaming.begin_stream_ex(tokenizer.encode("A hero: "), settings, max_new_tokens=120, seed=1)
    text, ended = "", False
    while not ended:
        result = streaming.stream_ex()
        text, ended = text + result["chunk"], result["eos"]
    Hero(**json.loads(text))


PET = {
    "$id": "https://example.com/pet.json",
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "home": {
            "type": "object",
            "properties": {"indoor": {"type": "boolean"}, "rooms": {"type": "integer"}},
            "required": ["indoor", "rooms"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "home"],
    "additionalProperties": False,
}


@pytest.fixture
def tabby_formatter(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> Callable[[], Any]:
    """Creates filters from a request's `json_schema`, as TabbyAPI does."""

    def make() -> Any:
        builder = FormatterBuilder()
        builder.append_line(f"{builder.json(create_schema(PET))}")
        engine = builder.build(create_engine_vocabulary(tokenizer), lambda ids: tokenizer.decode(torch.tensor(ids)))
        return FormatterFilter(model, tokenizer, engine)

    return make


@pytest.mark.parametrize(("made_by", "schema"), [("tabby_formatter", PET), ("enforcer", SCHEMA)])
@pytest.mark.parametrize("seed", range(4))
def test_a_json_schema_of_tabbyapi(
    generator: ExLlamaV2DynamicGenerator,
    tokenizer: ExLlamaV2Tokenizer,
    request: pytest.FixtureRequest,
    made_by: str,
    schema: dict[str, Any],
    seed: int,
) -> None:
    """The text is complete JSON, although whitespace is allowed and EOS is preferred."""
    settings = ExLlamaV2Sampler.Settings(temperature=1.0, top_k=0, top_p=1.0, token_repetition_penalty=1.0)
    generator.enqueue(
        ExLlamaV2DynamicJob(
            tokenizer.encode("Describe a pet as JSON: ", encode_special_tokens=True),
            max_new_tokens=960,
            gen_settings=settings,
            filters=[request.getfixturevalue(made_by)()],
            filter_prefer_eos=True,
            stop_conditions=[tokenizer.eos_token_id],
            seed=seed,
        )
    )
    text, reason = "", None
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            text += result.get("text", "")
            reason = result.get("eos_reason", reason)
    assert reason == "stop_token"
    validate(json.loads(text), schema)
