"""Speculative decoding changes the number of passes, but neither the text nor its length."""

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
from tests.generator.test_engine import TOKENIZER, Script, alphabet, make_engine, make_job, run, streaming_results
from tests.generator.toy_model import VOCAB, AsyncToyRunner, ToyRunner

DRAFTS = 4


def repetitive_script(prefix: list[int]) -> list[int]:
    """A text that often repeats itself, with a second candidate at every position."""
    chooser = random.Random(sum(prefix[-2:]) % 7)
    return chooser.sample(range(2, VOCAB), 5)


class NoisyDraftRunner:
    """A draft model with a given error rate; its cache is not checked."""

    def __init__(self, script: Script, error_rate: float) -> None:
        self.script, self.error_rate = script, error_rate
        self.rng = random.Random(1)

    def copy_pages(self, orders: Iterable[Any]) -> None: ...

    def prefill(self, sequence: Any, start: int, stop: int) -> None: ...

    def decode(
        self, sequences: Sequence[Any], past: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        out = []
        for sequence, start, fed in zip(sequences, past, tokens, strict=True):
            best = self.script([*sequence.ids[:start], *fed])[0]
            if self.rng.random() < self.error_rate:
                best = 2
            out.append(torch.zeros(len(fed), VOCAB).index_fill_(1, torch.tensor([best]), 1.0))
        return out


class CountingDrafter:
    """Wraps a drafter and counts its draft tokens."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.num_drafted = 0
        self.copy_pages, self.prefill, self.release = inner.copy_pages, inner.prefill, inner.release
        self.has_candidate, self.truncate = inner.has_candidate, inner.truncate

    def propose(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        drafts = self.inner.propose(sequences, counts)
        assert all(len(draft) <= count for draft, count in zip(drafts, counts, strict=True))
        self.num_drafted += sum(map(len, drafts))
        return drafts


def drafters(script: Script) -> list[Drafter]:
    return [
        NgramDrafter(4),
        ModelDrafter(NoisyDraftRunner(script, 0.3)),
        ModelDrafter(NoisyDraftRunner(script, 0.0)),
    ]


@pytest.mark.parametrize("case", range(3))
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
def test_sampled_text_is_the_same_token_by_token(case: int, settings: Settings) -> None:
    """Random numbers depend on seed and position only, so the text is identical, not just its distribution."""
    passes = [0, 0]
    for seed in range(12):

        def make_jobs(seed: int = seed) -> list[Job]:
            prompts = [[2 + (seed + i) % 9] * (1 + i) for i in range(3)]
            return [
                make_job(ids, 24, settings=settings, seed=seed, stop_conditions=["xyz", 30], banned_strings=banned)
                for ids, banned in zip(prompts, (None, ["a"], None), strict=True)
            ]

        without_drafts, with_drafts = make_jobs(), make_jobs()
        engines = [
            make_engine(repetitive_script),
            make_engine(repetitive_script, drafter=drafters(repetitive_script)[case], num_draft_tokens=DRAFTS),
        ]
        for n, (engine, jobs) in enumerate(zip(engines, (without_drafts, with_drafts), strict=True)):
            run(engine, *jobs)
            assert isinstance(engine.runner, ToyRunner)
            passes[n] += len(engine.runner.log)
        for plain_job, drafted_job in zip(without_drafts, with_drafts, strict=True):
            assert plain_job.sequences[0].ids == drafted_job.sequences[0].ids
            assert plain_job.full_completion == drafted_job.full_completion
            assert plain_job.new_tokens == drafted_job.new_tokens
    never_accepted = case == 0 and settings.token_repetition_penalty > 1  # what was said before is not said again
    assert passes[1] < passes[0] + never_accepted


@pytest.mark.parametrize("new", [*range(1, 8), 20, 253])
@pytest.mark.parametrize("drafter_index", range(3))
def test_drafts_do_not_exceed_max_new_tokens(new: int, drafter_index: int) -> None:
    """Also where the prompt ends near the end of a page: a draft never needs another page."""
    engine = make_engine(drafter=drafters(alphabet)[drafter_index], num_draft_tokens=DRAFTS)
    results = streaming_results(run(engine, *[make_job([2 + i % 26 for i in range(n)], new) for n in (3, 254, 256)]))
    assert [result["new_tokens"] for result in results if result["eos"]] == [new] * 3
    assert len(results) == 3 * new


@pytest.mark.parametrize("drafter_index", range(3))
def test_every_draft_is_accepted_or_rejected(drafter_index: int) -> None:
    counting = CountingDrafter(drafters(repetitive_script)[drafter_index])
    engine = make_engine(repetitive_script, drafter=counting, num_draft_tokens=DRAFTS)
    jobs = [
        make_job([3, 4, 5], 40),
        make_job([6], 17, stop_conditions=[31]),
        make_job([7, 8], 30, banned_strings=["b", "h"]),
        make_job([9, 9], 25, token_healing=True),
    ]
    last = [result for result in streaming_results(run(engine, *jobs)) if result["eos"]]
    assert counting.num_drafted > 0
    num_reported = sum(result["accepted_draft_tokens"] + result["rejected_draft_tokens"] for result in last)
    assert num_reported == counting.num_drafted
    for result in last:
        assert result["accepted_draft_tokens"] == result["job"].accepted_draft_tokens
        assert result["rejected_draft_tokens"] == result["job"].rejected_draft_tokens


def test_g12_a_text_that_repeats_itself() -> None:
    """Twenty tokens in four passes; no draft is rejected, since the prompt repeats already."""
    engine = make_engine(lambda prefix: [2 + (prefix[-1] - 1) % 4], drafter=NgramDrafter(4), num_draft_tokens=DRAFTS)
    last = streaming_results(run(engine, make_job([2, 3, 4, 5] * 3, 20)))[-1]
    assert (last["new_tokens"], last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (20, 16, 0)


def test_g13_a_drafter_that_is_always_right_or_always_wrong() -> None:
    perfect = make_engine(drafter=ModelDrafter(NoisyDraftRunner(alphabet, 0.0)), num_draft_tokens=DRAFTS)
    last = streaming_results(run(perfect, make_job("abc", 10)))[-1]
    assert (last["new_tokens"], last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (10, 8, 0)
    assert isinstance(perfect.runner, ToyRunner)
    assert perfect.runner.log == [("prefill", 1, 2), ("decode", 1, 5), ("decode", 1, 5)]
    never_right = make_engine(drafter=ModelDrafter(NoisyDraftRunner(lambda _: [28], 0.0)), num_draft_tokens=DRAFTS)
    last = streaming_results(run(never_right, make_job("abc", 8)))[-1]
    assert last["full_completion"] == "defghijk"
    assert last["accepted_draft_tokens"] == 0
    assert 0 < last["rejected_draft_tokens"] < 8 * DRAFTS  # it soon guesses less far


def test_without_drafts_no_counts_are_reported() -> None:
    assert "accepted_draft_tokens" not in streaming_results(run(make_engine(), make_job("abc", 3)))[-1]


@pytest.mark.parametrize("banned", [None, ["efg"]])
def test_the_draft_cache_covers_what_later_jobs_reuse(banned: list[str] | None) -> None:
    """Both models check every row they read: a job continues the text of another, and no row is missing."""
    small = ToyRunner(alphabet, 16)
    engine = make_engine(drafter=ModelDrafter(small), num_draft_tokens=DRAFTS)
    ids = [2 + i % 26 for i in range(250)]
    for round in range(6):
        job = make_job(ids, 7 + round, banned_strings=banned, min_new_tokens=1)
        last = streaming_results(run(engine, job))[-1]
        assert last["accepted_draft_tokens"] > 0
        ids = [*job.sequences[0].ids, *[28] * round]
    cancelled = make_job([*ids, 28], 50)
    engine.enqueue(cancelled)
    engine.step()
    engine.step()
    engine.cancel(cancelled)
    assert streaming_results(run(engine, make_job(cancelled.sequences[0].ids, 9)))[-1]["cached_tokens"] > 256


@given(st.integers(0, 99), st.integers(1, 40))
def test_draft_lengths_take_few_values(count: int, max_length: int) -> None:
    size = round_draft_length(count, max_length)
    assert size in (0, 1, 3, 7, 15, 31, max_length)
    assert size <= min(count, max_length) < 2 * size + 2
    assert (size == 0) == (count == 0)


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 15), st.integers(1, 200))
def test_adaptive_draft_length_stays_in_bounds_and_resumes(
    shares: list[float], max_length: int, remaining: int
) -> None:
    """Whatever share of its drafts is accepted."""
    draft_length, num_steps = AdaptiveDraftLength(max_length), 0
    for share in shares:
        reach = draft_length.num_draft_tokens(num_steps, remaining)
        assert 0 <= reach <= min(max_length, remaining)
        right = round(share * reach)
        num_steps += right + 1
        if reach:
            draft_length.update(right, reach, num_steps)
    assert any(draft_length.num_draft_tokens(num_steps + i, remaining) for i in range(MAX_PAUSE + 1))


def test_adaptive_draft_length_grows_and_pauses() -> None:
    draft_length, num_steps = AdaptiveDraftLength(15), 0
    sizes = []
    for right in (2, 3, 7, 15, 15):
        sizes.append(draft_length.num_draft_tokens(num_steps, 99))
        draft_length.update(right, sizes[-1], num_steps)
    assert sizes == [15, 3, 7, 15, 15]
    attempts = []
    for num_steps in range(60):
        if reach := draft_length.num_draft_tokens(num_steps, 99):
            attempts.append(num_steps)
            draft_length.update(0, reach, num_steps + 1)
    assert attempts == [0, 1, 2, 5, 10, 19, 36]


def slow_ngram_search(ids: list[int], longest: int) -> int | None:
    """The position after the latest earlier occurrence of the longest suffix of these ids that occurs earlier.

    A suffix has at least two tokens, if `longest` allows it.
    """
    for size in range(min(longest - 1, len(ids)), min(2, longest - 1) - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                return end
    return None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40), st.integers(2, 5))
def test_ngrams_are_what_a_search_finds(changes: list[tuple[int, int]], longest: int) -> None:
    """A text grows and is sometimes rewound; a draft that reaches the end of the text continues periodically."""
    guesser, sequence = NgramDrafter(longest), TokenSequence(ids=[0], max_length=99)
    for token, back in changes:
        if back == 5:
            del sequence.ids[max(1, len(sequence.ids) - 3) :]
        else:
            sequence.ids.append(token)
        position = slow_ngram_search(sequence.ids, longest)
        assert guesser.has_candidate(sequence) == (position is not None)
        (draft,) = guesser.propose([sequence], [7])
        assert len(draft) == (0 if position is None else 7)
        ids = [*sequence.ids, *draft]
        if position is not None:
            assert draft == [ids[position + i] for i in range(7)]
    guesser.release(sequence)
    assert not guesser._indexes


def make_async_engine(script: Script = alphabet, **options: Any) -> EngineCore:
    return EngineCore(AsyncToyRunner(script, 16), PageTable(16), TOKENIZER, VOCAB, **options)


def passes(engine: EngineCore) -> list[tuple[str, int, int]]:
    assert isinstance(engine.runner, ToyRunner)
    return [entry for entry in engine.runner.log if entry[0] != "prefill"]


def test_a_job_without_a_draft_runs_ahead() -> None:
    """Only the alphabet repeats; drafts come when two of its letters have come again."""
    engine = make_async_engine(drafter=NgramDrafter(4), num_draft_tokens=7)
    last = streaming_results(run(engine, make_job("abc", 61)))[-1]
    assert (last["new_tokens"], last["rejected_draft_tokens"]) == (61, 0)
    assert passes(engine) == [
        ("decode", 1, 1), *[("ahead", 1, 1)] * 25, *[("decode", 1, 8)] * 4, ("decode", 1, 2), ("decode", 1, 1)
    ]  # fmt: skip


def test_nothing_is_drafted_while_too_many_jobs_decode() -> None:
    engine = make_engine(drafter=NgramDrafter(4), num_draft_tokens=7, max_draft_batch_size=1)
    letters = [2 + i % 26 for i in range(30)]
    results = streaming_results(run(engine, make_job(letters, 20), make_job(letters, 60)))
    short, long = [result for result in results if result["eos"]]
    assert (short["new_tokens"], short["accepted_draft_tokens"], short["rejected_draft_tokens"]) == (20, 0, 0)
    assert (long["new_tokens"], long["accepted_draft_tokens"]) == (60, 35)


def test_a_job_with_rejected_drafts_runs_ahead_again() -> None:
    engine = make_async_engine(
        lambda prefix: [2 + len(prefix) ** 2 % 11 % 7], drafter=NgramDrafter(2), num_draft_tokens=3
    )
    job = make_job("a", 150)
    last = streaming_results(run(engine, job))[-1]
    assert job.sequences[0].ids[1:] == [2 + n**2 % 11 % 7 for n in range(1, 151)]
    assert last["rejected_draft_tokens"] > last["accepted_draft_tokens"]
    kinds = [kind for kind, _, _ in passes(engine)]
    assert kinds.count("ahead") > kinds.count("decode")


class CountingSampler(Sampler):
    """Records the number of rows of each batch."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sizes: list[int] = []

    def launch(self, logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> PendingOutput:
        self.sizes.append(len(requests))
        return super().launch(logits, requests)


def test_greedy_drafts_are_verified_in_one_call() -> None:
    engine = make_engine(drafter=NgramDrafter(4), num_draft_tokens=7)
    engine.sampler = counting = CountingSampler(TOKENIZER, VOCAB)
    letters = [2 + i % 26 for i in range(30)]
    results = streaming_results(run(engine, make_job(letters, 24), make_job(letters[:-1], 24)))
    assert [result["new_tokens"] for result in results if result["eos"]] == [24, 24]
    assert counting.sizes == [16, 16, 16]
    settings = Settings.greedy(token_repetition_penalty=1.1)
    run(engine, make_job(letters, 24, settings=settings))
    assert {*counting.sizes[3:]} == {1}


class Broken(ToyRunner):
    """The logits after an o are NaN."""

    def _logits(self, prefix: list[int]) -> torch.Tensor:
        return super()._logits(prefix) * (torch.nan if LETTER_O in prefix[-1:] else 1.0)


LETTER_O = 2 + 14


@pytest.mark.parametrize("stop", [None, ["m"]])
def test_a_failure_at_a_draft_position_fails_only_jobs_that_reach_it(stop: list[str] | None) -> None:
    """The drafts of both jobs reach a position that fails; the job that stops before it is unaffected."""
    engine = EngineCore(
        Broken(alphabet, 16), PageTable(16), TOKENIZER, VOCAB, drafter=NgramDrafter(4), num_draft_tokens=7
    )
    prompt = [*(2 + i for i in range(26)), *(2 + i for i in range(10))]
    first, second = make_job(prompt, 12, stop_conditions=stop), make_job(prompt[:-5], 4)
    last = {result["serial"]: result for result in streaming_results(run(engine, first, second)) if result["eos"]}
    assert last[1]["full_completion"] == "fghi"
    if stop is None:
        assert isinstance(last[0]["error"], BadLogits)
        assert last[0]["full_completion"] == "klmno"
    else:
        assert (last[0]["full_completion"], last[0]["eos_reason"]) == ("kl", "stop_string")
