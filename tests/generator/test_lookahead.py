"""The next pass is launched before anybody knows its tokens, and nobody can tell from what is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm import Settings, Tokenizer
from exlm.generator.loop import Loop
from exlm.generator.pages import PageTable
from exlm.generator.results import Tray
from exlm.sampling import Picks, Row, Sampler
from exlm.sampling.rows import TOO_MANY
from tests.generator.loop_walk import Cookbook, LoopWalk, alone, plain_recipe, random_recipe
from tests.generator.scripted import tokenizer
from tests.generator.test_loop import TOKENIZER, Script, alphabet, job, run, streams, tokens
from tests.generator.toy import VOCAB, Eager, ToyRunner

LIVES, STEPS, RECIPES = 12, 250, 120


def loop(script: Script = alphabet, runner: type[ToyRunner] = Eager, **options: Any) -> Loop:
    return Loop(runner(script, 16), PageTable(16), TOKENIZER, VOCAB, **options)


def log(machine: Loop) -> list[tuple[str, int, int]]:
    assert isinstance(machine.runner, ToyRunner)
    return machine.runner.log


def kinds(machine: Loop) -> list[str]:
    return [kind for kind, _, _ in log(machine)]


def said(rounds: list[list[dict[str, Any]]]) -> list[list[tuple[int, str]]]:
    """The text of each job in each round."""
    return [[(one["serial"], one.get("text", "")) for one in streams([results])] for results in rounds]


def test_each_token_costs_one_pass_and_all_but_the_first_are_ahead() -> None:
    machine = loop()
    rounds = run(machine, job("abc", 6))
    assert streams(rounds)[-1]["full_completion"] == "defghi"
    assert log(machine) == [("prefill", 1, 2), ("decode", 1, 1), *[("ahead", 1, 1)] * 5]


def test_a_batch_runs_ahead_together_and_who_leaves_takes_no_pass_with_him() -> None:
    machine = loop()
    rounds = run(machine, job("abc", 6), job("xyz", 3), job("mno", 6))
    assert said(rounds) == said(run(loop(runner=ToyRunner), job("abc", 6), job("xyz", 3), job("mno", 6)))
    passes = [entry for entry in log(machine) if entry[0] != "prefill"]
    # The one that ends is in one pass more than it has tokens: the others' rows of that pass are used.
    assert passes == [("decode", 3, 1), *[("ahead", 3, 1)] * 3, *[("ahead", 2, 1)] * 2]


def test_it_is_launched_before_the_tokens_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = loop()
    fetch = Tray.get

    def logged(tray: Tray, picks: Picks) -> Any:
        log(machine).append(("fetch", 0, 0))
        return fetch(tray, picks)

    monkeypatch.setattr(Tray, "get", logged)
    run(machine, job("abc", 4))
    assert kinds(machine) == ["prefill", "decode", *["ahead", "fetch"] * 3, "fetch"]


@pytest.mark.parametrize("stop", [["g"], tokens("g"), ["fg"]])
def test_a_text_that_ends_leaves_a_pass_that_nobody_looks_at(stop: list[int | str]) -> None:
    """And the pages it wrote to are good for the next one."""
    eager, plain = loop(), loop(runner=ToyRunner)
    told = []
    for machine in (eager, plain):
        rounds = run(machine, job("abc", 20, stop_conditions=stop))
        told.append(said(rounds + run(machine, job("abcdef", 9), job("abcdex", 9))))
    assert told[0] == told[1]
    assert kinds(eager).count("decode") == 2


def test_who_joins_costs_the_others_one_pass() -> None:
    machine = loop()
    machine.enqueue(job("abc", 8))
    rounds = [[dict(result) for result in machine.step()] for _ in range(3)]
    rounds += run(machine, job("xyz", 4))
    whole = {0: "", 1: ""}
    for results in said(rounds):
        for serial, text in results:
            whole[serial] += text
    assert whole == {0: "defghijk", 1: "abcd"}
    assert log(machine) == [
        ("prefill", 1, 2), ("decode", 1, 1), *[("ahead", 1, 1)] * 3,
        ("prefill", 1, 2), ("decode", 2, 1), *[("ahead", 2, 1)] * 4,
    ]  # fmt: skip


def test_who_is_cancelled_costs_nothing() -> None:
    machine = loop()
    first, second = job("abc", 6), job("xyz", 6)
    for one in (first, second):
        machine.enqueue(one)
    machine.step()
    machine.step()
    machine.cancel(first)
    rounds = run(machine)
    assert [text for results in said(rounds) for _, text in results] == ["c", "d", "e", "f"]
    assert kinds(machine).count("decode") == 1


def test_who_takes_the_place_of_another_does_not_take_his_pass() -> None:
    """As many jobs as before, and texts as long as theirs."""
    machine = loop()
    first, second = job("abc", 6), job("xyz", 6)
    for one in (first, second):
        machine.enqueue(one)
    machine.step()
    machine.cancel(first)
    told = streams(run(machine, job("mnop", 5)))
    assert [result["full_completion"] for result in told if result["eos"]] == ["abcdef", "qrstu"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_step_that_is_interrupted_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass behind it is for tokens that nobody has read."""
    machine = loop()
    one = job("abc", 8)
    machine.enqueue(one)
    machine.step()
    with monkeypatch.context() as broken:
        broken.setattr(Tray, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            machine.step()
    assert one.new_tokens == 1
    assert streams(run(machine))[-1]["full_completion"] == "defghijk"


def test_nothing_runs_ahead_of_a_job_that_asks_for_more() -> None:
    machine = loop()
    run(machine, job("abc", 4), job("xyz", 8, banned_strings=["zzz"]))
    assert kinds(machine).count("ahead") == 0
    machine = loop()
    rounds = run(machine, job("abc", 8), job("xyz", 4, return_probs=True))
    assert kinds(machine).count("ahead") == 3
    assert streams(rounds)[-1]["full_completion"] == "defghijk"


def test_no_finished_job_is_held() -> None:
    machine = loop()
    run(machine, job("abc", 20, stop_conditions=["g"]))
    assert machine._ahead._jobs == []
    assert machine._ahead._logits is None


class Failing(Eager):
    """Its logits are no numbers once the text has got to a letter."""

    def _rank(self, prefix: list[int]) -> Tensor:
        row = super()._rank(prefix)
        return row.fill_(torch.nan) if prefix[-1] == tokens("g")[0] else row


def test_a_failure_is_fed_and_harms_nobody() -> None:
    machine = loop(runner=Failing)
    told = streams(run(machine, job("abc", 8), job("lmn", 8)))
    first = [result for result in told if result["serial"] == 0]
    assert [result.get("text") for result in first] == ["d", "e", "f", "g", None]
    assert first[-1]["eos_reason"] == "error"
    assert told[-1]["full_completion"] == "opqrstuv"
    assert kinds(machine).count("decode") == 1


class Hesitant(Sampler):
    """Some rows are too much for its kernel; it picks them again, from the logits as they were."""

    def sample_batch(self, logits: Tensor, rows: Sequence[Row]) -> Picks:
        picks = super().sample_batch(logits, rows)
        for place in range(len(rows)):
            if len(rows[place].state) % 3 == place:
                picks.tokens[place] = TOO_MANY
        picks.again = lambda places: Sampler.sample_batch(self, logits[places], [rows[i] for i in places])
        return picks


def test_what_is_picked_once_more_is_picked_from_the_same_logits() -> None:
    machine = loop()
    machine.sampler = Hesitant(TOKENIZER, VOCAB)
    rounds = run(machine, job("abc", 12), job("xyz", 12))
    assert said(rounds) == said(run(loop(runner=ToyRunner), job("abc", 12), job("xyz", 12)))
    assert kinds(machine).count("decode") > 4


class Stumbling(Eager):
    """Its third pass ahead fails."""

    def ahead(self, sequences: Sequence[Any], past: Sequence[int], tokens: Tensor) -> Tensor:
        answer = super().ahead(sequences, past, tokens)
        if [kind for kind, _, _ in self.log].count("ahead") == 3:
            raise RuntimeError("out of memory")
        return answer


def test_a_pass_that_cannot_be_launched_loses_no_token() -> None:
    machine = loop(runner=Stumbling)
    one = job("abc", 8)
    machine.enqueue(one)
    machine.step()
    machine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        machine.step()
    assert one.new_tokens == 2
    assert streams(run(machine))[-1]["full_completion"] == "defghijk"


def test_settings_that_change_take_effect_at_the_next_token() -> None:
    def both(prefix: list[int]) -> list[int]:
        return [*alphabet(prefix), 3]

    machine = loop(both)
    own = Settings.greedy()
    machine.enqueue(job("abc", 4, settings=own))
    machine.step()
    own.token_bias = torch.zeros(VOCAB).index_fill_(0, torch.tensor([3]), 5.0)
    assert streams(run(machine))[-1]["full_completion"] == "dbbb"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def cookbook(texts: Tokenizer) -> Cookbook:
    """Mostly requests that run ahead, and what each gives alone, on a machine that never does."""
    dice = Random(11)
    recipes = [plain_recipe(dice) for _ in range(RECIPES)] + [random_recipe(dice, texts) for _ in range(4)]
    return [(recipe, alone(recipe, texts)) for recipe in recipes]


def live(dice: Random, steps: int, texts: Tokenizer, cookbook: Cookbook) -> Counter[str]:
    walk = LoopWalk(dice, texts, cookbook, ahead=True)
    runner: Any = walk.loop.runner
    runner.log = []
    for _ in range(steps):
        walk.step()
    walk.drain()
    return walk.seen + Counter(kind for kind, _, _ in runner.log)


def test_many_machines(texts: Tokenizer, cookbook: Cookbook) -> None:
    """Whoever joins, ends, fails or is cancelled: everybody says what he says alone."""
    seen: Counter[str] = Counter()
    for seed in range(LIVES):
        seen += live(Random(seed), STEPS, texts, cookbook)
    at_least = dict.fromkeys(("stop_token", "stop_string", "error", "too large", "cancels"), 10)
    at_least |= {
        "rounds": 2000,
        "finished": 300,
        "max_new_tokens": 100,
        "reused": 100,
        "ahead": 1000,
        "decode": 500,
        "guesses": 50,
    }
    assert {key: seen[key] for key in at_least if seen[key] < at_least[key]} == {}, seen


@settings(max_examples=12)
@given(dice=st.randoms(use_true_random=False), steps=st.integers(1, 30))
def test_machines_that_shrink(texts: Tokenizer, cookbook: Cookbook, dice: Random, steps: int) -> None:
    live(dice, steps, texts, cookbook)
