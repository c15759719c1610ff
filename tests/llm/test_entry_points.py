"""One request through every door (base, streaming, dynamic, async, LLM) gives the same greedy tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from exlm import LLM, AsyncGenerator, AsyncJob, Cache, InputError, Job, Lora, MMEmbedding, Settings, Tokenizer
from exlm.legacy.base_generator import BaseGenerator
from exlm.legacy.streaming_generator import StreamingGenerator
from tests.docs.path_substitutions import write_random_lora

PROMPT = "The history of the city"
COUNT = 8
GREEDY = Settings.greedy()


class GenerationCase(NamedTuple):
    """A request: what to go on from, what ends it besides EOS, and whether the seam is healed."""

    prompt: str
    stop: str | None = None
    by_token: bool = False
    healing: bool = False

    def stops(self, tokenizer: Tokenizer) -> list[int | str]:
        if self.stop is None:
            return []
        found = tokenizer.single_id(self.stop) if self.by_token else self.stop
        assert found is not None
        return [found]


class GenerationOutput(NamedTuple):
    """What came of it: the tokens behind the prompt, those of a stop string included, and the text shown."""

    ids: list[int]
    text: str


CASES = [
    GenerationCase(PROMPT),
    GenerationCase("Once upon a time", " girl", by_token=True),
    GenerationCase("Once upon a time", "a littl"),
    GenerationCase("import os\n\nde", healing=True),
    GenerationCase("Once upon a t", "little gi", healing=True),
]


@pytest.fixture(scope="module", params=["tiny-lm", "tiny-lm-exl2-4.0bpw"])
def llm(request: pytest.FixtureRequest, fixtures_dir: Path) -> Iterator[LLM]:
    with LLM(fixtures_dir / request.param, max_seq_len=512) as loaded:
        yield loaded


@pytest.fixture
def cache(llm: LLM) -> Cache:
    return Cache(llm.model, max_seq_len=512)


def check_against_forward(llm: LLM, wish: GenerationCase, said: GenerationOutput) -> None:
    """By one plain forward pass: each token is the likeliest after those before it, and the end is right."""
    ids, pieces = llm.tokenizer.encode(wish.prompt)[0].tolist(), llm.tokenizer.get_id_to_piece_list()
    kept = ids[:-1] if wish.healing else ids
    logits = llm.model.forward(torch.tensor([kept + said.ids]))[0, len(kept) - 1 :]
    if wish.healing:
        fits = [piece.startswith(pieces[ids[-1]]) for piece in pieces]
        logits[0, : len(fits)][~torch.tensor(fits)] = -torch.inf
    *likeliest, following = logits.argmax(-1).tolist()
    assert said.ids == likeliest
    whole, shorter = (llm.tokenizer.decode(torch.tensor([kept + said.ids[:end]]))[0] for end in (len(said.ids), -1))
    if wish.stop is None:
        assert len(said.ids) == COUNT + wish.healing
        assert wish.prompt + said.text == whole
    elif wish.by_token:
        assert following == llm.tokenizer.single_id(wish.stop)
        assert wish.prompt + said.text == whole
    else:
        assert wish.stop in whole
        assert wish.stop not in shorter
        assert wish.prompt + said.text == whole[: whole.index(wish.stop)]


def via_base_generator(llm: LLM, cache: Cache, wish: GenerationCase) -> GenerationOutput:
    """It has no stop strings, and counts a healed token."""
    generator = BaseGenerator(llm.model, cache, llm.tokenizer)
    (stop,) = wish.stops(llm.tokenizer) if wish.by_token else [-1]
    text = generator.generate_simple(
        wish.prompt,
        GREEDY,
        COUNT + wish.healing,
        token_healing=wish.healing,
        stop_token=int(stop),
        completion_only=True,
    )
    assert isinstance(text, str)
    return GenerationOutput(tokens_after_prompt(wish, llm, generator), text)


def via_streaming_generator(llm: LLM, cache: Cache, wish: GenerationCase) -> GenerationOutput:
    """Its chunks name neither a healed token nor those of a stop string; `sequence_ids` has them all."""
    generator = StreamingGenerator(llm.model, cache, llm.tokenizer)
    generator.set_stop_conditions([*llm.tokenizer.eos_token_ids, *wish.stops(llm.tokenizer)])
    ids = llm.tokenizer.encode(wish.prompt)
    generator.begin_stream_ex(ids, GREEDY, token_healing=wish.healing, max_new_tokens=COUNT)
    text, named, ended = "", [], False
    while not ended:
        chunk = generator.stream_ex()
        text, ended = text + chunk["chunk"], chunk["eos"]
        named += chunk["chunk_token_ids"][0].tolist()
    said = tokens_after_prompt(wish, llm, generator)
    if said[-1:] == wish.stops(llm.tokenizer):
        said.pop()
    assert named == said[wish.healing :][: len(named)]
    assert len(named) == len(said) - wish.healing or (wish.stop and not wish.by_token)
    return GenerationOutput(said, text)


def tokens_after_prompt(wish: GenerationCase, llm: LLM, generator: BaseGenerator) -> list[int]:
    """What the only row has behind the prompt."""
    assert generator.sequence_ids is not None
    start = llm.tokenizer.num_tokens(wish.prompt) - wish.healing
    found: list[int] = generator.sequence_ids[0, start:].tolist()
    return found


def output_from_results(results: list[Any]) -> GenerationOutput:
    ids = [n for result in results if "token_ids" in result for n in result["token_ids"][0].tolist()]
    text = "".join(result.get("text", "") for result in results)
    assert text == results[-1]["full_completion"]
    return GenerationOutput(ids, text)


def job_options(llm: LLM, wish: GenerationCase) -> dict[str, Any]:
    stops = [*llm.tokenizer.eos_token_ids, *wish.stops(llm.tokenizer)]
    return {"gen_settings": GREEDY, "token_healing": wish.healing, "stop_conditions": stops}


def via_generator(llm: LLM, cache: Cache, wish: GenerationCase) -> GenerationOutput:
    llm.generator.enqueue(Job(llm.tokenizer.encode(wish.prompt), COUNT, **job_options(llm, wish)))
    results = []
    while llm.generator.num_remaining_jobs():
        results += llm.generator.iterate()
    return output_from_results(results)


def via_async_generator(llm: LLM, cache: Cache, wish: GenerationCase) -> GenerationOutput:
    async def ask() -> GenerationOutput:
        generator = AsyncGenerator(llm.model, cache, llm.tokenizer)
        job = AsyncJob(generator, llm.tokenizer.encode(wish.prompt), COUNT, **job_options(llm, wish))
        results = [result async for result in job]
        await generator.close()
        return output_from_results(results)

    return asyncio.run(ask())


def via_llm(llm: LLM, cache: Cache, wish: GenerationCase) -> GenerationOutput:
    answer = llm.generate(
        wish.prompt,
        max_new_tokens=COUNT,
        settings=GREEDY,
        stop=wish.stops(llm.tokenizer),
        add_bos=False,
        token_healing=wish.healing,
    )
    return GenerationOutput(list(answer.token_ids), answer.text)


@pytest.mark.parametrize("wish", CASES, ids=lambda wish: repr(wish.prompt))
def test_every_entry_point_gives_the_same_tokens(llm: LLM, cache: Cache, wish: GenerationCase) -> None:
    expected = via_llm(llm, cache, wish)
    check_against_forward(llm, wish, expected)
    for entry_point in (via_streaming_generator, via_generator, via_async_generator):
        assert entry_point(llm, cache, wish) == expected, entry_point.__name__
    found = via_base_generator(llm, cache, wish)
    if wish.stop is None or wish.by_token:
        assert found == expected
    else:
        assert found.ids[: len(expected.ids)] == expected.ids
        assert found.text.startswith(expected.text + wish.stop)


@pytest.mark.parametrize("llm", ["tiny-lm"], indirect=True)
def test_adapters_are_passed_on(llm: LLM, fixtures_dir: Path, tmp_path: Path) -> None:
    lora = Lora.from_directory(llm.model, write_random_lora(fixtures_dir / "tiny-lm", tmp_path, 3))
    plain, changed = (llm.generate(PROMPT, max_new_tokens=8, settings=GREEDY, loras=used).text for used in ([], lora))
    assert plain != changed
    assert llm.generate(PROMPT, max_new_tokens=8, settings=GREEDY).text == plain
    assert "".join(llm.stream(PROMPT, max_new_tokens=8, settings=GREEDY, loras=lora)) == changed
    lora.unload()


@pytest.mark.parametrize("llm", ["tiny-lm"], indirect=True)
def test_embeddings_go_where_their_alias_stands(llm: LLM) -> None:
    table = torch.randn(2, 5, llm.config.hidden_size)
    one, two = (MMEmbedding(llm.model, vectors) for vectors in table)
    around = llm.tokenizer.num_tokens("Look: ") + llm.tokenizer.num_tokens(" there")
    prompts = [f"Look: {picture.text_alias} there" for picture in (one, two)]
    answers = llm.generate(prompts, embeddings=[[one], [two]], max_new_tokens=4, settings=GREEDY)
    assert [answer.prompt_tokens for answer in answers] == [around + 5] * 2
    alone = llm.stream(prompts[1], embeddings=[two], max_new_tokens=4, settings=GREEDY)
    assert "".join(alone) == answers[1].text
    said = llm.chat(f"{one.text_alias}?", embeddings=[one], max_new_tokens=1)
    assert said.prompt_tokens == llm.chat("?", max_new_tokens=1).prompt_tokens + 5


def test_an_own_job_runs_during_an_llm_call_and_keeps_its_results(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    llm.generator.enqueue(Job(ids, COUNT, gen_settings=GREEDY, identifier="mine"))
    llm.generate("Once upon a time", max_new_tokens=COUNT // 2, settings=GREEDY)
    results: list[Any] = []
    while more := llm.generator.iterate():
        results += more
    assert [one["stage"] for one in results[:1]] == ["started"]
    assert "".join(one.get("text", "") for one in results) == results[-1]["full_completion"]
    assert results[-1]["new_tokens"] == COUNT
    assert llm.generator.num_remaining_jobs() == 0


def test_bare_vectors_stand_where_the_prompt_says(llm: LLM) -> None:
    vectors = torch.randn(6, llm.config.hidden_size) * 0.3
    named = MMEmbedding(llm.model, vectors)
    options: dict[str, Any] = {"settings": GREEDY, "max_new_tokens": COUNT}

    def said(place: str, one: Any) -> list[str]:
        prompt = f"See {place} and"
        texts = [
            llm.generate(prompt, embeddings=[one], **options).text,
            "".join(llm.stream(prompt, embeddings=[one], **options)),
            llm.chat(prompt, embeddings=[one], **options).text,
            llm.generate([prompt], embeddings=[[one]], **options)[0].text,
        ]
        assert texts[0] == texts[1] == texts[3]
        return texts

    assert said("{{EMBED_HERE}}", vectors) == said(named.text_alias, named)
    with pytest.raises(InputError, match="embeddings must be MMEmbedding or vectors, found str"):
        llm.generate("See", embeddings=["picture"], **options)
