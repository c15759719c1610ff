"""Speculative decoding: the same text, the same count, fewer passes, with any drafter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm import Cache, Generator, Model, Settings, Tokenizer
from exlm.legacy import StreamingGenerator
from exlm.legacy.speculative import ModelDraftFunction, NgramCounts, NgramDraftFunction
from tests.generator.scripted import ID, ids
from tests.legacy.scripted import (
    CacheShape,
    Scripted,
    begin_stream,
    chunk_text,
    make_streaming_generator,
    passes,
    take_chunks,
)

GREEDY = Settings.greedy()


def cycle(prefix: list[int]) -> list[int]:
    """a b c d e, again and again."""
    return [(prefix[-1] - 2 + 1) % 5 + 2, ID["z"]]


def wrong(prefix: list[int]) -> list[int]:
    """Never what `cycle` says."""
    return [ID["x"]]


def confident(model: Scripted, gap: float = 30.0) -> Any:
    """A scripted model that is certain of its first choice."""

    class Sure:
        config = model.config
        max_seq_len = model.max_seq_len

        def runner(self, cache: Any) -> Any:
            runner = model.runner(cache)
            rank = runner._logits
            runner._logits = lambda prefix: rank(prefix) * gap  # type: ignore[method-assign]
            return runner

    return Sure()


def make_drafting_generator(toy: Tokenizer, guesses: Any = cycle, count: int = 5, **options: Any) -> StreamingGenerator:
    return make_streaming_generator(
        toy,
        cycle,
        draft_model=confident(Scripted(guesses)),
        draft_cache=CacheShape(),
        num_speculative_tokens=count,
        **options,
    )


def decode_lengths(machine: Any) -> list[int]:
    """How many tokens each decoding pass fed."""
    return [count for kind, _, count in passes(machine) if kind == "decode"]


def test_88_89_a_draft_that_is_right(toy: Tokenizer) -> None:
    machine = make_drafting_generator(toy, count=4)
    begin_stream(machine, ids("abcde" * 3), max_new_tokens=12)
    assert chunk_text(take_chunks(machine)) == ("abcde" * 3)[:12]
    assert decode_lengths(machine) == [5, 5, 2]
    efficiency, accuracy, asked, guessed, right = machine.get_sd_stats()
    assert (asked, guessed, right, accuracy) == (12, 9, 9, 1.0)
    assert efficiency == 9 / 12
    assert (machine.total_tokens, machine.total_draft_tokens, machine.accepted_draft_tokens) == (12, 9, 9)
    machine.reset_sd_stats()
    assert machine.get_sd_stats() == (0.0, 0.0, 0, 0, 0)


def test_88_a_draft_that_is_wrong(toy: Tokenizer) -> None:
    machine = make_drafting_generator(toy, wrong, count=3)
    begin_stream(machine, ids("abcde"), max_new_tokens=5)
    assert chunk_text(take_chunks(machine)) == "abcde"
    assert decode_lengths(machine) == [4, 4, 3, 2, 1]
    assert machine.accepted_draft_tokens == 0


def test_t55_a_draft_cache_has_no_gaps(toy: Tokenizer) -> None:
    """The draft's runner fails at rows that were never computed; its last guess is fed next time."""
    machine = make_drafting_generator(toy, count=3)
    for count in (9, 17):
        begin_stream(machine, ids("abcde" * 2), max_new_tokens=count)
        take_chunks(machine)
    assert machine.get_sd_stats()[1] == 1.0


def test_a_draft_that_is_unsure_stops_guessing(toy: Tokenizer) -> None:
    machine = make_drafting_generator(toy)
    machine.draft_model = Scripted(cycle)  # type: ignore[assignment]
    machine.speculative_prob_threshold = 0.9999
    begin_stream(machine, ids("abcde"), max_new_tokens=4)
    assert chunk_text(take_chunks(machine)) == "abcd"
    assert machine.total_draft_tokens < 3
    machine.speculative_prob_threshold = 0.0
    begin_stream(machine, ids("abcde"), max_new_tokens=4)
    take_chunks(machine)
    assert machine.total_draft_tokens >= 3


def test_a_draft_may_be_smaller_than_the_text(toy: Tokenizer) -> None:
    machine = make_streaming_generator(
        toy, cycle, length=400, draft_model=confident(Scripted(cycle)), draft_cache=CacheShape(300)
    )
    begin_stream(machine, ids("abcde" * 58), max_new_tokens=60)
    assert chunk_text(take_chunks(machine)) == "abcde" * 12
    assert 0 < machine.accepted_draft_tokens <= 10
    begin_stream(machine, ids("abcde" * 70), max_new_tokens=10)
    assert chunk_text(take_chunks(machine)) == "abcde" * 2


def test_a_draft_of_another_vocabulary(toy: Tokenizer) -> None:
    small = confident(Scripted(lambda prefix: [min(prefix[-1] + 1, ID["d"])], vocab=ID["e"]))  # knows a to d
    machine = make_streaming_generator(toy, cycle, draft_model=small, draft_cache=CacheShape())
    begin_stream(machine, ids("abcd"), max_new_tokens=10)
    assert chunk_text(take_chunks(machine)) == "eabcdeabcd"


def test_92_a_draft_cache_is_made(model: Model, draft: Model, tokenizer: Tokenizer) -> None:
    machine = StreamingGenerator(model, Cache(model, max_seq_len=300, batch_size=1), tokenizer, draft)
    assert isinstance(machine.draft_cache, Cache)
    assert (machine.draft_cache.max_seq_len, machine.draft_cache.batch_size) == (300, 1)
    assert StreamingGenerator(model, machine.cache, tokenizer).draft_cache is None


@pytest.mark.parametrize("how", ["draft", "itself", "ngram", "plain"])
def test_88_greedy_text_is_the_same(how: str, model: Model, draft: Model, tokenizer: Tokenizer) -> None:
    prompts = ["The history of the city", "import os\n\ndef main("]
    whole = Generator(model, Cache(model, max_seq_len=2048), tokenizer)
    options: dict[str, Any] = {"draft": {"draft_model": draft}, "itself": {"draft_model": model}}.get(how, {})
    machine = StreamingGenerator(model, Cache(model, max_seq_len=333), tokenizer, **options)
    machine.speculative_ngram = how == "ngram"
    machine.set_stop_conditions([])
    calls: Counter[str] = Counter()
    runner = machine._runner.runner
    decode = runner.decode

    def counted(*arguments: Any) -> Any:
        calls["decode"] += 1
        return decode(*arguments)

    runner.decode = counted  # type: ignore[method-assign]
    for prompt in prompts:
        begin_stream(machine, tokenizer.encode(prompt), max_new_tokens=24)
        chunks = take_chunks(machine, 1000)
        assert sum(chunk["chunk_token_ids"].shape[1] for chunk in chunks) == len(chunks) == 24
        assert prompt + chunk_text(chunks) == whole.generate(prompt, 24, gen_settings=GREEDY)
    assert calls["decode"] == 48 - machine.accepted_draft_tokens
    assert (machine.accepted_draft_tokens > 4) == (how != "plain")


def test_sampled_text_is_the_same_too(model: Model, draft: Model, tokenizer: Tokenizer) -> None:
    warm = Settings(temperature=1.0, top_k=20, top_p=0.0)
    said = []
    for options in ({}, {"draft_model": draft}):
        machine = StreamingGenerator(model, Cache(model, max_seq_len=333), tokenizer, **options)  # type: ignore[arg-type]
        begin_stream(machine, tokenizer.encode("The history of the city"), warm, seed=5, max_new_tokens=24)
        said.append(chunk_text(take_chunks(machine)))
    assert said[0] == said[1]


def test_ngrams(toy: Tokenizer) -> None:
    machine = make_streaming_generator(toy, cycle)
    machine.speculative_ngram = True
    begin_stream(machine, ids("abcde" * 4), max_new_tokens=20)
    assert chunk_text(take_chunks(machine)) == "abcde" * 4
    fed = decode_lengths(machine)
    assert max(fed) == 3  # the token itself and two guesses: max_inf
    assert len(fed) < 10
    machine.speculative_ngram_max_inf = 6
    begin_stream(machine, ids("abcde" * 8), max_new_tokens=20)
    assert chunk_text(take_chunks(machine)) == "abcde" * 4
    assert max(decode_lengths(machine)) == 6
    machine.speculative_ngram_threshold = 100
    begin_stream(machine, ids("abcde" * 8), max_new_tokens=20)
    take_chunks(machine)
    assert max(decode_lengths(machine)) == 1
    machine.speculative_ngram = False
    begin_stream(machine, ids("abcde" * 8), max_new_tokens=20)
    take_chunks(machine)
    assert max(decode_lengths(machine)) == 1


@pytest.mark.parametrize("kind", ["table", "row", "list"])
def test_ngrams_may_be_preloaded(toy: Tokenizer, kind: str) -> None:
    machine = make_streaming_generator(toy, cycle)
    machine.speculative_ngram = True
    begin_stream(machine, ids("abcde"), max_new_tokens=5)
    take_chunks(machine)
    without = machine.accepted_draft_tokens
    machine.reset_sd_stats()
    known = ids("abcde" * 6)
    machine.ngram_preload({"table": known, "row": known[0], "list": known[0].tolist()}[kind])
    begin_stream(machine, ids("abcde"), max_new_tokens=5)
    take_chunks(machine)
    assert machine.accepted_draft_tokens == 3 > without


def test_bans_and_settings_count_when_a_token_is_asked_for(toy: Tokenizer) -> None:
    """The model has looked ahead, but nothing was decided yet."""
    machine = make_drafting_generator(toy, count=8)
    begin_stream(machine, ids("abcde"))
    assert [machine.stream_ex()["chunk"] for _ in range(2)] == ["a", "b"]
    assert machine.stream_ex(ban_tokens=[ID["c"]])["chunk"] == "z"
    assert machine.stream_ex()["chunk"] == "b"
    machine.set_stop_conditions([ID["e"]])
    assert chunk_text(take_chunks(machine)) == "cd"


@given(st.data())
@settings(max_examples=40)
def test_no_draft_changes_the_text(toy: Tokenizer, data: Any) -> None:
    """Banned strings, bans, stop strings and new streams, with guesses that are sometimes right."""
    seed = data.draw(st.integers(0, 2**20), label="the model")
    luck = data.draw(st.sampled_from([0, 2, 5, 10]), label="right guesses of ten")

    def script(prefix: list[int]) -> list[int]:
        first = hash((seed, *prefix[-2:])) % 4 + 2
        return [first, (first - 1) % 4 + 2, ID["z"]]

    def guesser(prefix: list[int]) -> list[int]:
        good = hash((seed, len(prefix), prefix[-1], "luck")) % 10 < luck
        return script(prefix) if good else [ID["y"]]

    machines = [
        make_streaming_generator(toy, script, length=300),
        make_streaming_generator(
            toy, script, 300, draft_model=confident(Scripted(guesser)), draft_cache=CacheShape(270)
        ),
        make_streaming_generator(toy, script, length=300),
    ]
    machines[2].speculative_ngram = True
    for _ in range(data.draw(st.integers(1, 3), label="streams")):
        prompt = ids(data.draw(st.text("abcd", min_size=1, max_size=290), label="prompt"))
        banned = data.draw(st.lists(st.text("abcd", min_size=1, max_size=4), max_size=2), label="banned")
        stops = data.draw(st.lists(st.text("abcd", min_size=3, max_size=6), max_size=1), label="stops")
        most = data.draw(st.integers(1, 20), label="max_new_tokens")
        bans = data.draw(st.lists(st.sampled_from([(), (ID["a"],), (ID["b"], ID["c"])]), max_size=30))
        told = []
        for machine in machines:
            machine.set_stop_conditions(stops)
            begin_stream(machine, prompt, banned_strings=banned, max_new_tokens=most)
            chunks = []
            for ban in [*bans, *[()] * 200]:
                chunks.append(machine.stream_ex(ban_tokens=ban))
                if chunks[-1]["eos"]:
                    break
            shown = [(c["chunk"], c["chunk_token_ids"].tolist(), c.get("suppressed"), c["eos"]) for c in chunks]
            assert machine.sequence_ids is not None
            told.append((shown, machine.sequence_ids.tolist()))
        assert told[0] == told[1] == told[2]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=60)
def test_an_ngram_table_counts_what_a_slow_one_counts(text: list[int], least: int, more: int) -> None:
    longest = least + more
    table = NgramCounts(least, longest)
    guess = NgramDraftFunction(table)
    guess.max_tokens = 1
    for end in (len(text) // 2, len(text) // 3 + 1, len(text)):  # goes back in between
        guess(text[:end], 1)
    expected = None
    for size in range(longest, least - 1, -1):
        run = text[len(text) - size :]
        after = Counter(
            text[i + size] for i in range(len(text) - size) if text[i : i + size] == run and size <= len(text)
        )
        if after and expected is None:
            expected = max(after.values())
            assert table.most_frequent(text, 1) in [token for token, n in after.items() if n == expected]
    if expected is None:
        assert table.most_frequent(text, 1) is None


def test_a_draft_reads_only_what_is_new() -> None:
    model = Scripted(cycle)
    guess = ModelDraftFunction(confident(model), CacheShape(), vocab_size=36)
    guess.max_tokens = 2
    prompt = ids("abcde" * 20)[0].tolist()
    assert guess(prompt, 5) == [2, 3]
    assert model.passes == [("prefill", 1, 99), ("decode", 1, 1), ("decode", 1, 1)]
    assert guess([*prompt, 2, 3, 4], 1) == [5]
    assert model.passes == [("decode", 1, 2)]
    assert guess([*prompt, ID["c"]], 1) == [5]
    assert model.passes == [("decode", 1, 1)]
    assert guess(prompt[:50], 0) == []
    assert guess([10**9], 2) == []
    assert torch.tensor(guess(prompt[:50], 2)).tolist() == [2, 3]
