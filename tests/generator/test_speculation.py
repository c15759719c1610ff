"""Guessing ahead changes how many passes a text takes, and nothing else: not the text, not its length."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from exlm.generator.draft import Drafter, ModelDraft, NgramDraft
from exlm.generator.job import Job
from exlm.sampling import Settings
from tests.generator.test_loop import Script, alphabet, job, loop, run, streams
from tests.generator.toy import VOCAB, ToyRunner

DRAFTS = 4


def wandering(prefix: list[int]) -> list[int]:
    """A text that often repeats itself, with second thoughts at every word."""
    chooser = random.Random(sum(prefix[-2:]) % 7)
    return chooser.sample(range(2, VOCAB), 5)


class Guesser:
    """A small model that is right most of the time; its cache is not looked at."""

    def __init__(self, script: Script, wrong: float) -> None:
        self.script, self.wrong = script, wrong
        self.rng = random.Random(1)

    def copy(self, orders: Iterable[Any]) -> None: ...

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


class Counting:
    """Any drafter, with its guesses counted."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.guessed = 0
        self.copy, self.prefill, self.forget = inner.copy, inner.prefill, inner.forget

    def propose(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        found = self.inner.propose(sequences, counts)
        assert all(len(guess) <= count for guess, count in zip(found, counts, strict=True))
        self.guessed += sum(map(len, found))
        return found


def drafters(script: Script) -> list[Drafter]:
    return [NgramDraft(4), ModelDraft(Guesser(script, 0.3)), ModelDraft(Guesser(script, 0.0))]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    "settings",
    [
        Settings(temperature=1.5, top_k=0, top_p=0.0),
        Settings(temperature=0.7, top_k=4, token_repetition_penalty=1.3, mirostat=True),
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
        machines = [loop(wandering), loop(wandering, drafter=drafters(wandering)[which], draft_tokens=DRAFTS)]
        for n, (machine, jobs) in enumerate(zip(machines, (plain, drafted), strict=True)):
            run(machine, *jobs)
            assert isinstance(machine.runner, ToyRunner)
            passes[n] += len(machine.runner.log)
        for one, two in zip(plain, drafted, strict=True):
            assert one.sequences[0].ids == two.sequences[0].ids
            assert one.full_completion == two.full_completion
            assert one.new_tokens == two.new_tokens
    assert passes[1] < passes[0]


@pytest.mark.parametrize("new", [*range(1, 8), 20, 253])
@pytest.mark.parametrize("which", range(3))
def test_exactly_as_many_tokens_as_asked_for(new: int, which: int) -> None:
    """Also where the prompt ends next to a page's end: a guess never needs a page more."""
    machine = loop(drafter=drafters(alphabet)[which], draft_tokens=DRAFTS)
    results = streams(run(machine, *[job([2 + i % 26 for i in range(n)], new) for n in (3, 254, 256)]))
    assert [result["new_tokens"] for result in results if result["eos"]] == [new] * 3
    assert len(results) == 3 * new


@pytest.mark.parametrize("which", range(3))
def test_every_guess_is_accepted_or_rejected(which: int) -> None:
    counting = Counting(drafters(wandering)[which])
    machine = loop(wandering, drafter=counting, draft_tokens=DRAFTS)
    jobs = [
        job([3, 4, 5], 40),
        job([6], 17, stop_conditions=[31]),
        job([7, 8], 30, banned_strings=["b", "h"]),
        job([9, 9], 25, token_healing=True),
    ]
    last = [result for result in streams(run(machine, *jobs)) if result["eos"]]
    assert counting.guessed > 0
    told = sum(result["accepted_draft_tokens"] + result["rejected_draft_tokens"] for result in last)
    assert told == counting.guessed
    for result in last:
        assert result["accepted_draft_tokens"] == result["job"].accepted_draft_tokens
        assert result["rejected_draft_tokens"] == result["job"].rejected_draft_tokens


def test_g12_a_text_that_repeats_itself() -> None:
    """Twenty letters in four passes and a few more to learn them, none rejected once they repeat."""
    machine = loop(lambda prefix: [2 + (prefix[-1] - 1) % 4], drafter=NgramDraft(4), draft_tokens=DRAFTS)
    last = streams(run(machine, job([2, 3, 4, 5] * 3, 20)))[-1]
    assert (last["new_tokens"], last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (20, 16, 0)


def test_g13_a_guesser_that_is_always_right_or_always_wrong() -> None:
    right = loop(drafter=ModelDraft(Guesser(alphabet, 0.0)), draft_tokens=DRAFTS)
    last = streams(run(right, job("abc", 10)))[-1]
    assert (last["new_tokens"], last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (10, 8, 0)
    assert isinstance(right.runner, ToyRunner)
    assert right.runner.log == [("prefill", 1, 2), ("decode", 1, 5), ("decode", 1, 5)]
    wrong = loop(drafter=ModelDraft(Guesser(lambda _: [28], 0.0)), draft_tokens=DRAFTS)
    last = streams(run(wrong, job("abc", 8)))[-1]
    assert last["full_completion"] == "defghijk"
    assert last["accepted_draft_tokens"] == 0
    assert 0 < last["rejected_draft_tokens"] < 8 * DRAFTS  # it soon guesses less far


def test_without_drafting_nobody_counts() -> None:
    assert "accepted_draft_tokens" not in streams(run(loop(), job("abc", 3)))[-1]


@pytest.mark.parametrize("banned", [None, ["efg"]])
def test_the_small_model_has_read_what_later_jobs_find(banned: list[str] | None) -> None:
    """Both models look at every row they use: a text goes on where another ended, and no row is missing."""
    small = ToyRunner(alphabet, 16)
    machine = loop(drafter=ModelDraft(small), draft_tokens=DRAFTS)
    ids = [2 + i % 26 for i in range(250)]
    for round in range(6):
        one = job(ids, 7 + round, banned_strings=banned, min_new_tokens=1)
        last = streams(run(machine, one))[-1]
        assert last["accepted_draft_tokens"] > 0
        ids = [*one.sequences[0].ids, *[28] * round]
    cancelled = job([*ids, 28], 50)
    machine.enqueue(cancelled)
    machine.step()
    machine.step()
    machine.cancel(cancelled)
    assert streams(run(machine, job(cancelled.sequences[0].ids, 9)))[-1]["cached_tokens"] > 256
