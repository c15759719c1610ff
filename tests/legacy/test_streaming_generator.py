"""StreamingGenerator: stop conditions, chunks, token healing, prefix reuse and filters."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import (
    Cache,
    CacheQ4,
    CacheQ6,
    CacheQ8,
    Config,
    Generator,
    InputError,
    Job,
    JsonSchemaFilter,
    Model,
    SelectFilter,
    Settings,
    Tokenizer,
)
from exlm.legacy import StreamingGenerator
from tests.generator.scripted import ID, ids
from tests.legacy.scripted import (
    begin_stream,
    chunk_text,
    make_streaming_generator,
    passes,
    scripted,
    take_chunks,
)

GREEDY = Settings.greedy()
ABC = ids("abc")


def test_the_constructor(model: Model, tokenizer: Tokenizer) -> None:
    from exllamav2.generator import ExLlamaV2StreamingGenerator

    cache = Cache(model, max_seq_len=256)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer, None, None, 3)
    assert generator.num_speculative_tokens == 3
    parameters = inspect.signature(ExLlamaV2StreamingGenerator).parameters
    assert {name: one.default for name, one in list(parameters.items())[3:]} == {
        "draft_model": None,
        "draft_cache": None,
        "num_speculative_tokens": 5,
    }
    assert generator.stop_tokens == set(tokenizer.eos_token_ids)
    assert generator.stop_strings == set()
    assert generator.sequence_ids is None
    assert generator.speculative_ngram is False
    with pytest.raises(InputError, match="begin_stream_ex"):
        generator.stream_ex()


@pytest.mark.parametrize("kind", [Cache, CacheQ4, CacheQ6, CacheQ8])
def test_cache_types(kind: Any, model: Model, tokenizer: Tokenizer) -> None:
    generator = StreamingGenerator(model, kind(model, max_seq_len=300), tokenizer)
    generator.set_stop_conditions([])
    begin_stream(generator, tokenizer.encode("The history of"))
    said = chunk_text(take_chunks(generator, 16))
    whole = Generator(model, kind(model, max_seq_len=512), tokenizer)
    assert said == whole.generate("The history of", 16, gen_settings=GREEDY, completion_only=True)


def test_stop_conditions(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    generator.set_stop_conditions([ID["h"], "fg"])
    begin_stream(generator, ABC)
    assert chunk_text(take_chunks(generator)) == "de"
    generator.set_stop_conditions({ID["h"]})
    begin_stream(generator, ABC)
    chunks = take_chunks(generator)
    assert chunk_text(chunks) == "defg"
    assert chunks[-1]["chunk_token_ids"].shape == (1, 0)
    generator.set_stop_conditions(())
    begin_stream(generator, ABC)
    assert len(take_chunks(generator, 60)) == 60
    for wrong in ([None], [1.5], [ABC]):
        with pytest.raises(ValueError, match="Unsupported type in stop_conditions"):
            generator.set_stop_conditions(wrong)  # type: ignore[arg-type]
    for wrong in (3, None, "g"):
        with pytest.raises(InputError, match="must be a list"):
            generator.set_stop_conditions(wrong)  # type: ignore[arg-type]


def test_a_stream_needs_settings(toy: Tokenizer) -> None:
    with pytest.raises(InputError, match="gen_settings must be Settings, found NoneType"):
        make_streaming_generator(toy).begin_stream_ex(ABC, None)  # type: ignore[arg-type]


def test_stop_conditions_take_effect_with_the_next_token(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    begin_stream(generator, ABC)
    generator.set_stop_conditions(["ef"])
    assert chunk_text(take_chunks(generator)) == "d"
    begin_stream(generator, ABC)
    assert [generator.stream_ex()["chunk"] for _ in range(2)] == ["d", ""]
    generator.set_stop_conditions([ID["i"], "hz"])  # "e" is still held for "ef", which is resolved first
    assert [chunk["chunk"] for chunk in take_chunks(generator)] == [""]
    generator.set_stop_conditions([])
    begin_stream(generator, ABC)
    generator.stream_ex()
    generator.stop_tokens.add(ID["g"])
    generator.stop_strings.add("z")
    assert chunk_text(take_chunks(generator)) == "ef"


def test_one_token_each_call(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, scripted(5, 6, 7, 0))
    begin_stream(generator, ABC)
    chunks = take_chunks(generator)
    assert [(chunk["chunk"], chunk["eos"]) for chunk in chunks] == [
        ("d", False),
        ("e", False),
        ("f", False),
        ("", True),
    ]
    assert [chunk["chunk_token_ids"].tolist() for chunk in chunks] == [[[5]], [[6]], [[7]], [[]]]
    assert set(chunks[0]) == {"chunk", "eos", "chunk_token_ids"}
    assert chunks[0]["chunk_token_ids"].dtype == torch.long
    after = generator.stream_ex()
    assert (after["chunk"], after["eos"], after["chunk_token_ids"].shape) == ("", True, (1, 0))


def test_held_text(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, scripted(5, 6, 7, 0))
    generator.set_stop_conditions(["fz", 0])
    begin_stream(generator, ABC)
    chunks = take_chunks(generator)
    assert [chunk["chunk"] for chunk in chunks] == ["d", "e", "", "f"]
    assert chunks[2]["chunk_token_ids"].shape == (1, 0)
    assert chunks[3]["eos"]
    assert chunks[3]["chunk_token_ids"].tolist() == [[7]]  # T57: the ids of what is shown are not lost
    generator = make_streaming_generator(toy)
    generator.set_stop_conditions(["fgz", "ghi"])
    begin_stream(generator, ABC)
    chunks = take_chunks(generator)
    assert [chunk["chunk"] for chunk in chunks] == ["d", "e", "", "", "f", ""]
    assert chunks[4]["chunk_token_ids"].tolist() == [[ID["f"]]]
    assert chunks[5]["chunk_token_ids"].shape == (1, 0)
    assert chunks[5]["eos"]


def test_token_healing(toy: Tokenizer) -> None:
    script = {(2, 3): [5, ID["Hello"]], (2, 3, ID["Hello"]): [ID[" world"]]}
    generator = make_streaming_generator(toy, lambda prefix: script.get(tuple(prefix), [ID["."]]))
    begin_stream(generator, torch.tensor([[2, 3, ID["He"]]]), token_healing=True)
    assert passes(generator) == [("prefill", 1, 1)]
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.tolist() == [[2, 3]]
    first = generator.stream_ex()
    assert (first["chunk"], first["chunk_token_ids"].tolist()) == ("llo world", [[ID[" world"]]])
    assert generator.sequence_ids.tolist() == [[2, 3, ID["Hello"], ID[" world"]]]
    assert generator.stream_ex()["chunk"] == "."


def test_token_healing_while_text_is_held(toy: Tokenizer) -> None:
    script = {(2, 3): [ID["Hello"]], (2, 3, ID["Hello"]): [ID[" world"]]}
    generator = make_streaming_generator(toy, lambda prefix: script.get(tuple(prefix), [ID["."]]))
    generator.set_stop_conditions(["o world!"])
    begin_stream(generator, torch.tensor([[2, 3, ID["He"]]]), token_healing=True, return_probabilities=True)
    first, second = generator.stream_ex(), generator.stream_ex()
    assert (first["chunk"], first["chunk_token_ids"].tolist()) == ("", [[]])
    assert second["chunk"] == "llo world."
    assert second["chunk_token_ids"].tolist() == [[ID[" world"], ID["."]]]
    assert second["probs"].shape == (1, 2)


def test_a_common_prefix_is_reused(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy)
    prompt = ids("abcdefgh" * 5)
    begin_stream(generator, prompt)
    assert passes(generator) == [("prefill", 1, 39)]
    take_chunks(generator, 2)
    assert passes(generator) == [("decode", 1, 1)] * 2
    assert generator.sequence_ids is not None
    begin_stream(generator, torch.cat((generator.sequence_ids, ids("bacba")), 1))
    assert passes(generator) == [("prefill", 1, 5)]
    take_chunks(generator, 1)
    begin_stream(generator, prompt[:, :20])
    assert passes(generator) == [("decode", 1, 1)]
    begin_stream(generator, torch.cat((prompt[:, :12], ids("zzzz")), 1))
    assert passes(generator) == [("prefill", 1, 3)]


def test_prefix_reuse_over_several_pages(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, length=1000)
    prompt = ids("abcdefgh" * 80)
    begin_stream(generator, prompt)
    assert chunk_text(take_chunks(generator, 5)) == "ijklm"
    passes(generator)
    begin_stream(generator, torch.cat((prompt, ids("ijklm"), ids("az")), 1))
    assert passes(generator) == [("prefill", 1, 2)]
    assert chunk_text(take_chunks(generator, 2)) == "ab"
    passes(generator)
    begin_stream(generator, prompt[:, :400])
    assert passes(generator) == []
    assert chunk_text(take_chunks(generator, 2)) == "ij"


@pytest.mark.parametrize("how", ["reset", "forward", "other", "dynamic"])
def test_a_prompt_is_recomputed_after_another_caller_wrote_to_the_cache(
    how: str, model: Model, tokenizer: Tokenizer
) -> None:
    cache = Cache(model, max_seq_len=512)
    generator = StreamingGenerator(model, cache, tokenizer)
    prompt = tokenizer.encode("The history of the city of")

    def logits() -> torch.Tensor:
        begin_stream(generator, prompt, return_logits=True)
        return generator.stream_ex()["logits"]

    expected = logits()
    other = torch.flip(prompt, (1,)).repeat(1, 40)  # in both pages
    if how == "reset":
        cache.current_seq_len = 0
    elif how == "forward":
        length, cache.current_seq_len = cache.current_seq_len, 0
        model.forward(other, cache)
        cache.current_seq_len = length
    elif how == "dynamic":
        third = Generator(model, cache, tokenizer)
        third.enqueue(Job(other, 2))
        while third.num_remaining_jobs():
            third.iterate()
    else:
        second = StreamingGenerator(model, cache, tokenizer)
        begin_stream(second, other)
        take_chunks(second, 8)
    torch.testing.assert_close(logits(), expected, rtol=0, atol=1e-4)
    generator.generate_simple("In", GREEDY, 4)
    torch.testing.assert_close(logits(), expected, rtol=0, atol=1e-4)


def test_lazy_caches_and_a_chat_loop(fixtures_dir: Path) -> None:
    config = Config(fixtures_dir / "tiny-lm")
    config.prepare()
    model = Model(config)
    cache = Cache(model, lazy=True)
    generator = StreamingGenerator(model, cache, Tokenizer(config))
    model.load_autosplit(cache)
    begin_stream(generator, generator.tokenizer.encode("User: Hello!\nAssistant:", add_bos=True), max_new_tokens=20)
    assert len(take_chunks(generator)) == 20


def test_filters(model: Model, tokenizer: Tokenizer) -> None:
    generator = StreamingGenerator(model, Cache(model, max_seq_len=300), tokenizer)
    begin_stream(generator, tokenizer.encode("It is a "), filters=[SelectFilter(model, tokenizer, ["dog", "cat"])])
    chunks = take_chunks(generator)
    assert chunk_text(chunks) in ("dog", "cat")
    assert chunks[-1]["eos"]
    assert chunks[-1]["chunk_token_ids"].shape[1] > 0
    number = JsonSchemaFilter(tokenizer, {"type": "integer", "minimum": 1000, "maximum": 99999})
    begin_stream(generator, tokenizer.encode("n ="), filters=[number], filter_prefer_eos=True)
    assert len(chunk_text(take_chunks(generator))) == 4
    begin_stream(
        generator,
        tokenizer.encode("It is a "),
        token_healing=True,
        filters=[SelectFilter(model, tokenizer, ["dog", "cat"])],
    )
    assert chunk_text(take_chunks(generator)) in ("dog", "cat")


def test_banned_strings(toy: Tokenizer) -> None:
    generator = make_streaming_generator(toy, lambda prefix: [prefix[-1] + 1, ID["l"]])
    begin_stream(generator, ABC, banned_strings=["EF"])
    chunks = take_chunks(generator, 5)
    assert [chunk["chunk"] for chunk in chunks] == ["d", "", "", "l", "m"]
    assert [chunk.get("suppressed") for chunk in chunks] == [None, None, "ef", None, None]
    assert chunks[2]["chunk_token_ids"].shape == (1, 0)
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.tolist() == [[2, 3, 4, 5, ID["l"], ID["m"]]]
