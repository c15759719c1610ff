"""Guessing ahead changes how many passes a text takes, and nothing else: not the text, not its length."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm.errors import BadLogits
from exlm.generator.engine import EngineCore
from exlm.generator.job import Job
from exlm.generator.page_table import PageTable
from exlm.generator.speculative import (
    MAX_PAUSE,
    AdaptiveDraftLength,
    Drafter,
    ModelDrafter,
    NgramDrafter,
    round_draft_length,
)
from exlm.generator.token_sequence import TokenSequence
from exlm.sampling import PendingOutput, Sampler, SamplingRequest, Settings
from tests.generator.test_engine import TOKENIZER, Script, alphabet, job, make_engine, run, streaming_results
from tests.generator.toy_model import VOCAB, AsyncToyRunner, ToyRunner

DRAFTS = 4


def repetitive_script(prefix: list[int]) -> list[int]:
    """A text that often repeats itself, with second thoughts at every word."""
    chooser = random.Random(sum(prefix[-2:]) % 7)
    return chooser.sample(range(2, VOCAB), 5)


class NoisyDraftRunner:
    """A small model that is right most of the time; its cache is not looked at."""

    def __init__(self, script: Script, wrong: float) -> None:
        self.script, self.wrong = script, wrong
        self.rng = random.Random(1)

    def copy_pages(self, orders: Iterable[Any]) -> None: ...

    def prefill(self, sequence: Any, start: int, stop: int) -> None: ...

    def decode(
        self, sequences: Sequence[Any], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        out = []
        for sequence, start, fed in zip(sequences, past, tokens, strict=True):
            best = self.script([*sequence.ids[:start], *fed])[0]
            if self.rng.random() < self.wrong:
                best = 2
            out.append(torch.zeros(len(fed), VOCAB).index_fill_(1, torch.tensor([best]), 1.0))
        return out


class CountingDrafter:
    """Any drafter, with its guesses counted."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.num_drafted = 0
        self.copy_pages, self.prefill, self.release = inner.copy_pages, inner.prefill, inner.release
        self.has_candidate, self.truncate = inner.has_candidate, inner.truncate

    def propose(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        found = self.inner.propose(sequences, counts)
        assert all(len(guess) <= count for guess, count in zip(found, counts, strict=True))
        self.num_drafted += sum(map(len, found))
        return found


def drafters(script: Script) -> list[Drafter]:
    return [
        NgramDrafter(4),
        ModelDrafter(NoisyDraftRunner(script, 0.3)),
        ModelDrafter(NoisyDraftRunner(script, 0.0)),
    ]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "settings",
    [
        Settings(temperature=1.5, top_k=0, top_p=0.0),
        Settings(temperature=0.7, top_k=4, token_repetition_penalty=1.3, mirostat=True),
        Settings(temperature=1.5, top_k=0, top_p=0.0, top_n_sigma=1.5),
        Settings(temperature=1.5, top_k=8, adaptive_target=0.3, adaptive_decay=0.7),
        Settings.greedy(dry_multiplier=1.0),
    ],
)
def test_sampled_text_is_the_same_token_by_token(which: int, settings: Settings) -> None:
    """Random numbers belong to positions, so with one seed the very text is the same, not only its odds."""
    passes = [0, 0]
    for seed in range(12):

        def fresh(seed: int = seed) -> list[Job]:
            prompts = [[2 + (seed + i) % 9] * (1 + i) for i in range(3)]
            return [
                job(ids, 24, settings=settings, seed=seed, stop_conditions=["xyz", 30], banned_strings=banned)
                for ids, banned in zip(prompts, (None, ["a"], None), strict=True)
            ]

        plain, drafted = fresh(), fresh()
        machines = [
            make_engine(repetitive_script),
            make_engine(repetitive_script, drafter=drafters(repetitive_script)[which], num_draft_tokens=DRAFTS),
        ]
        for n, (machine, jobs) in enumerate(zip(machines, (plain, drafted), strict=True)):
            run(machine, *jobs)
            assert isinstance(machine.runner, ToyRunner)
            passes[n] += len(machine.runner.log)
        for one, two in zip(plain, drafted, strict=True):
            assert one.sequences[0].ids == two.sequences[0].ids
            assert one.full_completion == two.full_completion
            assert one.new_tokens == two.new_tokens
    hopeless = which == 0 and settings.token_repetition_penalty > 1  # what was said before is not said again
    assert passes[1] < passes[0] + hopeless


@pytest.mark.parametrize("new", [*range(1, 8), 20, 253])
@pytest.mark.parametrize("which", range(3))
def test_exactly_as_many_tokens_as_asked_for(new: int, which: int) -> None:
    """Also where the prompt ends next to a page's end: a guess never needs a page more."""
    machine = make_engine(drafter=drafters(alphabet)[which], num_draft_tokens=DRAFTS)
    results = streaming_results(run(machine, *[job([2 + i % 26 for i in range(n)], new) for n in (3, 254, 256)]))
    assert [result["new_tokens"] for result in results if result["eos"]] == [new] * 3
    assert len(results) == 3 * new


@pytest.mark.parametrize("which", range(3))
def test_every_draft_is_accepted_or_rejected(which: int) -> None:
    counting = CountingDrafter(drafters(repetitive_script)[which])
    machine = make_engine(repetitive_script, drafter=counting, num_draft_tokens=DRAFTS)
    jobs = [
        job([3, 4, 5], 40),
        job([6], 17, stop_conditions=[31]),
        job([7, 8], 30, banned_strings=["b", "h"]),
        job([9, 9], 25, token_healing=True),
    ]
    last = [result for result in streaming_results(run(machine, *jobs)) if result["eos"]]
    assert counting.num_drafted > 0
    told = sum(result["accepted_draft_tokens"] + result["rejected_draft_tokens"] for result in last)
    assert told == counting.num_drafted
    for result in last:
        assert result["accepted_draft_tokens"] == result["job"].accepted_draft_tokens
        assert result["rejected_draft_tokens"] == result["job"].rejected_draft_tokens


def test_g12_a_text_that_repeats_itself() -> None:
    """Twenty letters in four passes and a few more to learn them, none rejected once they repeat."""
    machine = make_engine(lambda prefix: [2 + (prefix[-1] - 1) % 4], drafter=NgramDrafter(4), num_draft_tokens=DRAFTS)
    last = streaming_results(run(machine, job([2, 3, 4, 5] * 3, 20)))[-1]
    assert (last["new_tokens"], last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (20, 16, 0)


def test_g13_a_drafter_that_is_always_right_or_always_wrong() -> None:
    right = make_engine(drafter=ModelDrafter(NoisyDraftRunner(alphabet, 0.0)), num_draft_tokens=DRAFTS)
    last = streaming_results(run(right, job("abc", 10)))[-1]
    assert (last["new_tokens"], last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (10, 8, 0)
    assert isinstance(right.runner, ToyRunner)
    assert right.runner.log == [("prefill", 1, 2), ("decode", 1, 5), ("decode", 1, 5)]
    wrong = make_engine(drafter=ModelDrafter(NoisyDraftRunner(lambda _: [28], 0.0)), num_draft_tokens=DRAFTS)
    last = streaming_results(run(wrong, job("abc", 8)))[-1]
    assert last["full_completion"] == "defghijk"
    assert last["accepted_draft_tokens"] == 0
    assert 0 < last["rejected_draft_tokens"] < 8 * DRAFTS  # it soon guesses less far


def test_without_drafts_no_counts_are_reported() -> None:
    assert "accepted_draft_tokens" not in streaming_results(run(make_engine(), job("abc", 3)))[-1]


@pytest.mark.parametrize("banned", [None, ["efg"]])
def test_the_draft_cache_covers_what_later_jobs_reuse(banned: list[str] | None) -> None:
    """Both models look at every row they use: a text goes on where another ended, and no row is missing."""
    small = ToyRunner(alphabet, 16)
    machine = make_engine(drafter=ModelDrafter(small), num_draft_tokens=DRAFTS)
    ids = [2 + i % 26 for i in range(250)]
    for round in range(6):
        one = job(ids, 7 + round, banned_strings=banned, min_new_tokens=1)
        last = streaming_results(run(machine, one))[-1]
        assert last["accepted_draft_tokens"] > 0
        ids = [*one.sequences[0].ids, *[28] * round]
    cancelled = job([*ids, 28], 50)
    machine.enqueue(cancelled)
    machine.step()
    machine.step()
    machine.cancel(cancelled)
    assert streaming_results(run(machine, job(cancelled.sequences[0].ids, 9)))[-1]["cached_tokens"] > 256


@given(st.integers(0, 99), st.integers(1, 40))
def test_draft_lengths_take_few_values(count: int, most: int) -> None:
    size = round_draft_length(count, most)
    assert size in (0, 1, 3, 7, 15, 31, most)
    assert size <= min(count, most) < 2 * size + 2
    assert (size == 0) == (count == 0)


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 15), st.integers(1, 200))
def test_adaptive_draft_length_stays_in_bounds_and_resumes(shares: list[float], most: int, left: int) -> None:
    """Whatever became of its guesses."""
    pace, made = AdaptiveDraftLength(most), 0
    for share in shares:
        reach = pace.num_draft_tokens(made, left)
        assert 0 <= reach <= min(most, left)
        right = round(share * reach)
        made += right + 1
        if reach:
            pace.update(right, reach, made)
    assert any(pace.num_draft_tokens(made + i, left) for i in range(MAX_PAUSE + 1))


def test_adaptive_draft_length_grows_and_pauses() -> None:
    pace, made = AdaptiveDraftLength(15), 0
    sizes = []
    for right in (2, 3, 7, 15, 15):
        sizes.append(pace.num_draft_tokens(made, 99))
        pace.update(right, sizes[-1], made)
    assert sizes == [15, 3, 7, 15, 15]
    tries = []
    for made in range(60):
        if reach := pace.num_draft_tokens(made, 99):
            tries.append(made)
            pace.update(0, reach, made + 1)
    assert tries == [0, 1, 2, 5, 10, 19, 36]


def slow_ngram_search(ids: list[int], longest: int) -> int | None:
    """Where a text went on when it last was where it is now: the longest run that was there, and its end."""
    for size in range(min(longest - 1, len(ids)), 0, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                return end
    return None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40), st.integers(2, 5))
def test_ngrams_are_what_a_search_finds(changes: list[tuple[int, int]], longest: int) -> None:
    """While a text grows, and is now and then taken back; guesses go on in circles."""
    guesser, sequence = NgramDrafter(longest), TokenSequence(ids=[0], max_length=99)
    for token, back in changes:
        if back == 5:
            del sequence.ids[max(1, len(sequence.ids) - 3) :]
        else:
            sequence.ids.append(token)
        at = slow_ngram_search(sequence.ids, longest)
        assert guesser.has_candidate(sequence) == (at is not None)
        (guess,) = guesser.propose([sequence], [7])
        assert len(guess) == (0 if at is None else 7)
        whole = [*sequence.ids, *guess]
        if at is not None:
            assert guess == [whole[at + i] for i in range(7)]
    guesser.release(sequence)
    assert not guesser._indexes


def make_async_engine(script: Script = alphabet, **options: Any) -> EngineCore:
    return EngineCore(AsyncToyRunner(script, 16), PageTable(16), TOKENIZER, VOCAB, **options)


def passes(machine: EngineCore) -> list[tuple[str, int, int]]:
    assert isinstance(machine.runner, ToyRunner)
    return [entry for entry in machine.runner.log if entry[0] != "prefill"]


def test_a_job_without_a_draft_runs_ahead() -> None:
    """Nothing repeats itself but for the alphabet, after its end: then its tokens are known beforehand."""
    machine = make_async_engine(drafter=NgramDrafter(4), num_draft_tokens=7)
    last = streaming_results(run(machine, job("abc", 61)))[-1]
    assert (last["new_tokens"], last["rejected_draft_tokens"]) == (61, 0)
    assert passes(machine) == [
        ("decode", 1, 1), *[("ahead", 1, 1)] * 24, *[("decode", 1, 8)] * 4, ("decode", 1, 4)
    ]  # fmt: skip


def test_a_job_with_rejected_drafts_runs_ahead_again() -> None:
    machine = make_async_engine(
        lambda prefix: [2 + len(prefix) ** 2 % 11 % 7], drafter=NgramDrafter(2), num_draft_tokens=3
    )
    one = job("a", 150)
    last = streaming_results(run(machine, one))[-1]
    assert one.sequences[0].ids[1:] == [2 + n**2 % 11 % 7 for n in range(1, 151)]
    assert last["rejected_draft_tokens"] > last["accepted_draft_tokens"]
    kinds = [kind for kind, _, _ in passes(machine)]
    assert kinds.count("ahead") > kinds.count("decode")


class CountingSampler(Sampler):
    """How many rows each batch has."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sizes: list[int] = []

    def launch(self, logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> PendingOutput:
        self.sizes.append(len(requests))
        return super().launch(logits, requests)


def test_greedy_drafts_are_verified_in_one_call() -> None:
    machine = make_engine(drafter=NgramDrafter(4), num_draft_tokens=7)
    machine.sampler = counting = CountingSampler(TOKENIZER, VOCAB)
    letters = [2 + i % 26 for i in range(30)]
    results = streaming_results(run(machine, job(letters, 24), job(letters[:-1], 24)))
    assert [result["new_tokens"] for result in results if result["eos"]] == [24, 24]
    assert counting.sizes == [16, 16, 16]
    settings = Settings.greedy(token_repetition_penalty=1.1)
    run(machine, job(letters, 24, settings=settings))
    assert {*counting.sizes[3:]} == {1}


class Broken(ToyRunner):
    """After an o the logits are no numbers."""

    def _logits(self, prefix: list[int]) -> torch.Tensor:
        return super()._logits(prefix) * (torch.nan if LETTER_O in prefix[-1:] else 1.0)


LETTER_O = 2 + 14


@pytest.mark.parametrize("stop", [None, ["m"]])
def test_a_failure_at_a_draft_position_fails_only_jobs_that_reach_it(stop: list[str] | None) -> None:
    """Two jobs: of one the guesses reach a position that fails; who stops before never hears of it."""
    machine = EngineCore(
        Broken(alphabet, 16), PageTable(16), TOKENIZER, VOCAB, drafter=NgramDrafter(4), num_draft_tokens=7
    )
    prompt = [*(2 + i for i in range(26)), *(2 + i for i in range(10))]
    first, second = job(prompt, 12, stop_conditions=stop), job(prompt[:-5], 4)
    last = {one["serial"]: one for one in streaming_results(run(machine, first, second)) if one["eos"]}
    assert last[1]["full_completion"] == "fghi"
    if stop is None:
        assert isinstance(last[0]["error"], BadLogits)
        assert last[0]["full_completion"] == "klmno"
    else:
        assert (last[0]["full_completion"], last[0]["eos_reason"]) == ("kl", "stop_string")
