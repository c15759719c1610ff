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
from exlm.generator.draft import LONGEST_REST, Drafter, ModelDraft, NgramDraft, Pace, round_down
from exlm.generator.job import Job
from exlm.generator.loop import Loop
from exlm.generator.pages import PageTable
from exlm.generator.sequence import Sequence as Tokens
from exlm.sampling import Picks, Row, Sampler, Settings
from tests.generator.test_loop import TOKENIZER, Script, alphabet, job, loop, run, streams
from tests.generator.toy import VOCAB, Eager, ToyRunner

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
        self.expects, self.truncate = inner.expects, inner.truncate

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
    hopeless = which == 0 and settings.token_repetition_penalty > 1  # what was said before is not said again
    assert passes[1] < passes[0] + hopeless


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


@given(st.integers(0, 99), st.integers(1, 40))
def test_guesses_come_in_few_sizes(count: int, most: int) -> None:
    size = round_down(count, most)
    assert size in (0, 1, 3, 7, 15, 31, most)
    assert size <= min(count, most) < 2 * size + 2
    assert (size == 0) == (count == 0)


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 15), st.integers(1, 200))
def test_a_pace_keeps_to_its_limits_and_never_gives_up(shares: list[float], most: int, left: int) -> None:
    """Whatever became of its guesses."""
    pace, made = Pace(most), 0
    for share in shares:
        reach = pace.reach(made, left)
        assert 0 <= reach <= min(most, left)
        right = round(share * reach)
        made += right + 1
        if reach:
            pace.learn(right, reach, made)
    assert any(pace.reach(made + i, left) for i in range(LONGEST_REST + 1))


def test_a_pace_grows_with_success_and_rests_without() -> None:
    pace, made = Pace(15), 0
    sizes = []
    for right in (2, 3, 7, 15, 15):
        sizes.append(pace.reach(made, 99))
        pace.learn(right, sizes[-1], made)
    assert sizes == [15, 3, 7, 15, 15]
    tries = []
    for made in range(60):
        if reach := pace.reach(made, 99):
            tries.append(made)
            pace.learn(0, reach, made + 1)
    assert tries == [0, 1, 2, 5, 10, 19, 36]


def slowly(ids: list[int], longest: int) -> int | None:
    """Where a text went on when it last was where it is now: the longest run that was there, and its end."""
    for size in range(min(longest - 1, len(ids)), 0, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                return end
    return None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40), st.integers(2, 5))
def test_ngrams_are_what_a_search_finds(changes: list[tuple[int, int]], longest: int) -> None:
    """While a text grows, and is now and then taken back; guesses go on in circles."""
    guesser, sequence = NgramDraft(longest), Tokens(ids=[0], limit=99)
    for token, back in changes:
        if back == 5:
            del sequence.ids[max(1, len(sequence.ids) - 3) :]
        else:
            sequence.ids.append(token)
        at = slowly(sequence.ids, longest)
        assert guesser.expects(sequence) == (at is not None)
        (guess,) = guesser.propose([sequence], [7])
        assert len(guess) == (0 if at is None else 7)
        whole = [*sequence.ids, *guess]
        if at is not None:
            assert guess == [whole[at + i] for i in range(7)]
    guesser.forget(sequence)
    assert not guesser._indexes


def eager(script: Script = alphabet, **options: Any) -> Loop:
    return Loop(Eager(script, 16), PageTable(16), TOKENIZER, VOCAB, **options)


def passes(machine: Loop) -> list[tuple[str, int, int]]:
    assert isinstance(machine.runner, ToyRunner)
    return [entry for entry in machine.runner.log if entry[0] != "prefill"]


def test_who_has_no_guess_runs_ahead() -> None:
    """Nothing repeats itself but for the alphabet, after its end: then its tokens are known beforehand."""
    machine = eager(drafter=NgramDraft(4), draft_tokens=7)
    last = streams(run(machine, job("abc", 61)))[-1]
    assert (last["new_tokens"], last["rejected_draft_tokens"]) == (61, 0)
    assert passes(machine) == [
        ("decode", 1, 1), *[("ahead", 1, 1)] * 24, *[("decode", 1, 8)] * 4, ("decode", 1, 4)
    ]  # fmt: skip


def test_who_guesses_in_vain_runs_ahead_again() -> None:
    machine = eager(lambda prefix: [2 + len(prefix) ** 2 % 11 % 7], drafter=NgramDraft(2), draft_tokens=3)
    one = job("a", 150)
    last = streams(run(machine, one))[-1]
    assert one.sequences[0].ids[1:] == [2 + n**2 % 11 % 7 for n in range(1, 151)]
    assert last["rejected_draft_tokens"] > last["accepted_draft_tokens"]
    kinds = [kind for kind, _, _ in passes(machine)]
    assert kinds.count("ahead") > kinds.count("decode")


class CountingSampler(Sampler):
    """How many rows each batch has."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sizes: list[int] = []

    def sample_batch(self, logits: torch.Tensor, rows: Sequence[Row]) -> Picks:
        self.sizes.append(len(rows))
        return super().sample_batch(logits, rows)


def test_greedy_guesses_are_checked_in_one_go() -> None:
    machine = loop(drafter=NgramDraft(4), draft_tokens=7)
    machine.sampler = counting = CountingSampler(TOKENIZER, VOCAB)
    letters = [2 + i % 26 for i in range(30)]
    results = streams(run(machine, job(letters, 24), job(letters[:-1], 24)))
    assert [result["new_tokens"] for result in results if result["eos"]] == [24, 24]
    assert counting.sizes == [16, 16, 16]
    settings = Settings.greedy(token_repetition_penalty=1.1)
    run(machine, job(letters, 24, settings=settings))
    assert {*counting.sizes[3:]} == {1}


class Broken(ToyRunner):
    """After an o the logits are no numbers."""

    def _rank(self, prefix: list[int]) -> torch.Tensor:
        return super()._rank(prefix) * (torch.nan if LETTER_O in prefix[-1:] else 1.0)


LETTER_O = 2 + 14


@pytest.mark.parametrize("stop", [None, ["m"]])
def test_a_failure_at_a_guess_matters_only_to_who_gets_there(stop: list[str] | None) -> None:
    """Two jobs: of one the guesses reach a position that fails; who stops before never hears of it."""
    machine = Loop(
        Broken(alphabet, 16), PageTable(16), TOKENIZER, VOCAB, drafter=NgramDraft(4), draft_tokens=7
    )
    prompt = [*(2 + i for i in range(26)), *(2 + i for i in range(10))]
    first, second = job(prompt, 12, stop_conditions=stop), job(prompt[:-5], 4)
    last = {one["serial"]: one for one in streams(run(machine, first, second)) if one["eos"]}
    assert last[1]["full_completion"] == "fghi"
    if stop is None:
        assert isinstance(last[0]["error"], BadLogits)
        assert last[0]["full_completion"] == "klmno"
    else:
        assert (last[0]["full_completion"], last[0]["eos_reason"]) == ("kl", "stop_string")
