"""Seed 003: ExLlamaV2StreamingGenerator, one test for each item of the checklist.

Items 90 to 93 are the document's own examples: see test_code_blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Tokenizer,
)
from exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from exllamav2.generator.filters import ExLlamaV2SelectFilter
from tests.seeds.conftest import PROMPT

Answer = Callable[..., str]
Settings = ExLlamaV2Sampler.Settings


@pytest.fixture
def streaming(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2StreamingGenerator:
    """The generator of this document."""
    return ExLlamaV2StreamingGenerator(model, cache, tokenizer)


def begin(made: ExLlamaV2StreamingGenerator, prompt: str = PROMPT, **options: Any) -> None:
    made.begin_stream_ex(made.tokenizer.encode(prompt), Settings.greedy(), **options)


def chunks(made: ExLlamaV2StreamingGenerator, limit: int) -> list[dict[str, Any]]:
    """Results until the end, at most so many."""
    results: list[dict[str, Any]] = []
    while len(results) < limit and not (results and results[-1]["eos"]):
        results.append(dict(made.stream_ex()))
    return results


def text(results: list[dict[str, Any]]) -> str:
    return "".join(result["chunk"] for result in results)


def test_item_079_the_name_resolves() -> None:
    import exllamav2.generator

    assert exllamav2.generator.ExLlamaV2StreamingGenerator is ExLlamaV2StreamingGenerator


def test_item_080_the_constructor(
    model: ExLlamaV2, draft_model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer
) -> None:
    plain = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    assert (plain.draft_model, plain.draft_cache, plain.num_speculative_tokens) == (None, None, 5)
    draft_cache = ExLlamaV2Cache(draft_model, max_seq_len=2048)
    by_place = ExLlamaV2StreamingGenerator(model, cache, tokenizer, draft_model, draft_cache, 3)
    by_name = ExLlamaV2StreamingGenerator(
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        draft_model=draft_model,
        draft_cache=draft_cache,
        num_speculative_tokens=3,
    )
    for made in (by_place, by_name):
        assert (made.draft_model, made.draft_cache, made.num_speculative_tokens) == (
            draft_model,
            draft_cache,
            3,
        )


@pytest.mark.parametrize("kind", [ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8])
def test_item_081_each_kind_of_cache(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, kind: type[ExLlamaV2Cache], answer: Answer
) -> None:
    made = ExLlamaV2StreamingGenerator(model, kind(model, max_seq_len=512), tokenizer)
    begin(made)
    assert text(chunks(made, 8)) == answer(PROMPT, 8)


def test_item_082_stop_conditions(streaming: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    for condition in (tokenizer.single_id("."), "."):
        streaming.set_stop_conditions([condition])
        begin(streaming)
        results = chunks(streaming, 30)
        assert results[-1]["eos"]
        assert text(results) == ", there was a little girl named Tim"
    for wrong in ([None], [1.5], [["x"]]):
        with pytest.raises(ValueError, match="Unsupported type in stop_conditions"):
            streaming.set_stop_conditions(wrong)


def test_item_083_options_of_a_stream(streaming: ExLlamaV2StreamingGenerator) -> None:
    begin(streaming, token_healing=True, filters=[], banned_strings=[])
    assert streaming.stream_ex()["chunk"]
    hot = Settings(temperature=50.0, top_k=0, top_p=1.0)
    streaming.begin_stream_ex(streaming.tokenizer.encode(PROMPT), hot)
    assert not text(chunks(streaming, 6)).startswith(", there was")


def test_item_084_one_token_a_call(streaming: ExLlamaV2StreamingGenerator) -> None:
    begin(streaming)
    for result in chunks(streaming, 5):
        assert isinstance(result["chunk"], str)
        assert result["eos"] is False
        assert result["chunk_token_ids"].shape == (1, 1)


def test_item_085_the_chunks_are_the_reply(streaming: ExLlamaV2StreamingGenerator, answer: Answer) -> None:
    begin(streaming)
    assert text(chunks(streaming, 20)) == answer(PROMPT, 20)
    streaming.set_stop_conditions(["Tim"])
    begin(streaming)
    assert text(chunks(streaming, 30)) == ", there was a little girl named "


def test_item_086_a_stop_string_over_several_calls(streaming: ExLlamaV2StreamingGenerator) -> None:
    streaming.set_stop_conditions(["little girl named"])
    begin(streaming)
    results = chunks(streaming, 30)
    assert text(results) == ", there was a "
    assert results[-1]["eos"]
    assert any(result["chunk"] == "" and not result["eos"] for result in results)  # it held its breath


def test_item_087_a_common_prefix_is_not_computed_again(
    streaming: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer, passes: list[int]
) -> None:
    ids = (torch.arange(60) * 7 % 1900 + 10)[None]
    streaming.begin_stream_ex(ids, Settings.greedy())
    chunks(streaming, 3)
    assert passes == [59, 1, 1, 1]
    said = streaming.sequence_ids
    assert said is not None
    passes.clear()
    streaming.begin_stream_ex(torch.cat([said, tokenizer.encode(" And then he")], 1), Settings.greedy())
    streaming.stream_ex()
    assert sum(passes) <= 2 + tokenizer.encode(" And then he").shape[1]


def test_item_088_speculation_gives_the_same_text_with_fewer_passes(
    model: ExLlamaV2,
    draft_model: ExLlamaV2,
    cache: ExLlamaV2Cache,
    tokenizer: ExLlamaV2Tokenizer,
    answer: Answer,
    passes: list[int],
) -> None:
    whole = answer(PROMPT, 24)
    made = ExLlamaV2StreamingGenerator(model, cache, tokenizer, draft_model)
    passes.clear()
    begin(made)
    assert text(chunks(made, 24)) == whole
    assert len(passes) < 20
    assert made.get_sd_stats()[4] > 5


def test_item_089_the_number_of_guesses_is_bounded(
    model: ExLlamaV2,
    draft_model: ExLlamaV2,
    cache: ExLlamaV2Cache,
    tokenizer: ExLlamaV2Tokenizer,
    passes: list[int],
) -> None:
    for most in (1, 3):
        made = ExLlamaV2StreamingGenerator(model, cache, tokenizer, draft_model, num_speculative_tokens=most)
        made.speculative_prob_threshold = 0.0
        begin(made)
        passes.clear()
        chunks(made, 12)
        assert max(passes) == 1 + most


def test_item_094_healing_filters_and_banned_strings(
    streaming: ExLlamaV2StreamingGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    begin(streaming, "Once upon a ", token_healing=True)
    assert text(chunks(streaming, 4)).startswith("time, there")
    begin(streaming, filters=[ExLlamaV2SelectFilter(model, tokenizer, [" yes", " no"])])
    results = chunks(streaming, 10)
    assert results[-1]["eos"]
    assert text(results) in (" yes", " no")
    begin(streaming, banned_strings=["LITTLE girl"])
    results = chunks(streaming, 20)
    assert "little girl" not in text(results)
    assert any("little girl" in result.get("suppressed", "") for result in results)
