"""The next pass is launched before the host has read its tokens, and the text is the same."""

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
from exlm.generator.engine import EngineCore
from exlm.generator.page_table import PageTable
from exlm.kernels.sampling_layout import TOO_MANY_CANDIDATES
from exlm.sampling import PendingOutput, Sampler, SamplerOutput, SamplingRequest
from tests.generator.engine_fuzz import (
    EngineFuzz,
    SpecsWithResults,
    random_job_spec,
    run_alone,
    simple_job_spec,
)
from tests.generator.scripted import make_tokenizer
from tests.generator.test_engine import TOKENIZER, Script, alphabet, job, run, streaming_results, tokens
from tests.generator.toy_model import VOCAB, AsyncToyRunner, ToyRunner

RUNS, STEPS, SPECS = 12, 250, 120


def make_engine(script: Script = alphabet, runner: type[ToyRunner] = AsyncToyRunner, **options: Any) -> EngineCore:
    return EngineCore(runner(script, 16), PageTable(16), TOKENIZER, VOCAB, **options)


def pass_log(machine: EngineCore) -> list[tuple[str, int, int]]:
    assert isinstance(machine.runner, ToyRunner)
    return machine.runner.log


def pass_kinds(machine: EngineCore) -> list[str]:
    return [kind for kind, _, _ in pass_log(machine)]


def texts_by_step(rounds: list[list[dict[str, Any]]]) -> list[list[tuple[int, str]]]:
    """The text of each job in each round."""
    return [[(one["serial"], one.get("text", "")) for one in streaming_results([results])] for results in rounds]


def test_each_token_costs_one_pass_and_all_but_the_first_are_ahead() -> None:
    machine = make_engine()
    rounds = run(machine, job("abc", 6))
    assert streaming_results(rounds)[-1]["full_completion"] == "defghi"
    assert pass_log(machine) == [("prefill", 1, 2), ("decode", 1, 1), *[("ahead", 1, 1)] * 5]


def test_a_batch_runs_ahead_and_a_finished_job_costs_no_pass() -> None:
    machine = make_engine()
    rounds = run(machine, job("abc", 6), job("xyz", 3), job("mno", 6))
    assert texts_by_step(rounds) == texts_by_step(
        run(make_engine(runner=ToyRunner), job("abc", 6), job("xyz", 3), job("mno", 6))
    )
    passes = [entry for entry in pass_log(machine) if entry[0] != "prefill"]
    # The one that ends is in one pass more than it has tokens: the others' rows of that pass are used.
    assert passes == [("decode", 3, 1), *[("ahead", 3, 1)] * 3, *[("ahead", 2, 1)] * 2]


def test_the_next_pass_is_launched_before_the_tokens_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make_engine()
    wait = PendingOutput.wait

    def logged(pending: PendingOutput) -> SamplerOutput:
        pass_log(machine).append(("fetch", 0, 0))
        return wait(pending)

    monkeypatch.setattr(PendingOutput, "wait", logged)
    run(machine, job("abc", 4))
    assert pass_kinds(machine) == ["prefill", "decode", *["ahead", "fetch"] * 3, "fetch"]


@pytest.mark.parametrize("stop", [["g"], tokens("g"), ["fg"]])
def test_the_pass_in_flight_of_a_finished_job_is_dropped(stop: list[int | str]) -> None:
    """And the pages it wrote to are good for the next one."""
    eager, plain = make_engine(), make_engine(runner=ToyRunner)
    told = []
    for machine in (eager, plain):
        rounds = run(machine, job("abc", 20, stop_conditions=stop))
        told.append(texts_by_step(rounds + run(machine, job("abcdef", 9), job("abcdex", 9))))
    assert told[0] == told[1]
    assert pass_kinds(eager).count("decode") == 2


def test_a_joining_job_costs_one_pass() -> None:
    machine = make_engine()
    machine.enqueue(job("abc", 8))
    rounds = [[dict(result) for result in machine.step()] for _ in range(3)]
    rounds += run(machine, job("xyz", 4))
    whole = {0: "", 1: ""}
    for results in texts_by_step(rounds):
        for serial, text in results:
            whole[serial] += text
    assert whole == {0: "defghijk", 1: "abcd"}
    assert pass_log(machine) == [
        ("prefill", 1, 2), ("decode", 1, 1), *[("ahead", 1, 1)] * 3,
        ("prefill", 1, 2), ("decode", 2, 1), *[("ahead", 2, 1)] * 4,
    ]  # fmt: skip


def test_a_cancelled_job_costs_no_pass() -> None:
    machine = make_engine()
    first, second = job("abc", 6), job("xyz", 6)
    for one in (first, second):
        machine.enqueue(one)
    machine.step()
    machine.step()
    machine.cancel(first)
    rounds = run(machine)
    assert [text for results in texts_by_step(rounds) for _, text in results] == ["c", "d", "e", "f"]
    assert pass_kinds(machine).count("decode") == 1


def test_a_job_in_a_reused_row_does_not_take_the_pass_in_flight() -> None:
    """As many jobs as before, and texts as long as theirs."""
    machine = make_engine()
    first, second = job("abc", 6), job("xyz", 6)
    for one in (first, second):
        machine.enqueue(one)
    machine.step()
    machine.cancel(first)
    told = streaming_results(run(machine, job("mnop", 5)))
    assert [result["full_completion"] for result in told if result["eos"]] == ["abcdef", "qrstu"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_step_that_is_interrupted_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass behind it is for tokens that the host has not read."""
    machine = make_engine()
    one = job("abc", 8)
    machine.enqueue(one)
    machine.step()
    with monkeypatch.context() as broken:
        broken.setattr(PendingOutput, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            machine.step()
    assert one.new_tokens == 1
    assert streaming_results(run(machine))[-1]["full_completion"] == "defghijk"


def test_nothing_runs_ahead_of_a_job_that_asks_for_more() -> None:
    machine = make_engine()
    run(machine, job("abc", 4), job("xyz", 8, banned_strings=["zzz"]))
    assert pass_kinds(machine).count("ahead") == 0
    machine = make_engine()
    rounds = run(machine, job("abc", 8), job("xyz", 4, return_probs=True))
    assert pass_kinds(machine).count("ahead") == 3
    assert streaming_results(rounds)[-1]["full_completion"] == "defghijk"


def test_no_finished_job_is_referenced() -> None:
    machine = make_engine()
    run(machine, job("abc", 20, stop_conditions=["g"]))
    assert machine.in_flight._jobs == []
    assert machine.in_flight._logits is None


class Failing(AsyncToyRunner):
    """Its logits are no numbers once the text has got to a letter."""

    def _logits(self, prefix: list[int]) -> Tensor:
        row = super()._logits(prefix)
        return row.fill_(torch.nan) if prefix[-1] == tokens("g")[0] else row


def test_a_failed_token_in_flight_harms_no_other_job() -> None:
    machine = make_engine(runner=Failing)
    told = streaming_results(run(machine, job("abc", 8), job("lmn", 8)))
    first = [result for result in told if result["serial"] == 0]
    assert [result.get("text") for result in first] == ["d", "e", "f", "g", None]
    assert first[-1]["eos_reason"] == "error"
    assert told[-1]["full_completion"] == "opqrstuv"
    assert pass_kinds(machine).count("decode") == 1


class ResamplingSampler(Sampler):
    """Some rows have too many candidates for its kernel and are drawn again from the same logits."""

    def launch(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> PendingOutput:
        pending = super().launch(logits, requests)
        for row, request in enumerate(requests):
            if len(request.state) % 3 == row:
                pending.tokens[row] = TOO_MANY_CANDIDATES
        pending.saved_logits = logits.clone()
        return pending


def test_a_row_is_resampled_from_the_same_logits() -> None:
    machine = make_engine()
    machine.sampler = ResamplingSampler(TOKENIZER, VOCAB)
    rounds = run(machine, job("abc", 12), job("xyz", 12))
    assert texts_by_step(rounds) == texts_by_step(run(make_engine(runner=ToyRunner), job("abc", 12), job("xyz", 12)))
    assert pass_kinds(machine).count("decode") > 4


class RunnerWithoutDecodeNext(AsyncToyRunner):
    """Its third pass ahead fails."""

    def decode_next(self, sequences: Sequence[Any], past: Sequence[int], tokens: Tensor) -> Tensor:
        answer = super().decode_next(sequences, past, tokens)
        if [kind for kind, _, _ in self.log].count("ahead") == 3:
            raise RuntimeError("out of memory")
        return answer


def test_a_pass_that_cannot_be_launched_loses_no_token() -> None:
    machine = make_engine(runner=RunnerWithoutDecodeNext)
    one = job("abc", 8)
    machine.enqueue(one)
    machine.step()
    machine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        machine.step()
    assert one.new_tokens == 2
    assert streaming_results(run(machine))[-1]["full_completion"] == "defghijk"


def test_settings_that_change_take_effect_at_the_next_token() -> None:
    def both(prefix: list[int]) -> list[int]:
        return [*alphabet(prefix), 3]

    machine = make_engine(both)
    own = Settings.greedy()
    machine.enqueue(job("abc", 4, settings=own))
    machine.step()
    own.token_bias = torch.zeros(VOCAB).index_fill_(0, torch.tensor([3]), 5.0)
    assert streaming_results(run(machine))[-1]["full_completion"] == "dbbb"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def specs(tokenizer: Tokenizer) -> SpecsWithResults:
    """Mostly requests that run ahead, and what each gives alone, on a machine that never does."""
    dice = Random(11)
    recipes = [simple_job_spec(dice) for _ in range(SPECS)] + [random_job_spec(dice, tokenizer) for _ in range(4)]
    return [(recipe, run_alone(recipe, tokenizer)) for recipe in recipes]


def run_fuzz(dice: Random, steps: int, tokenizer: Tokenizer, specs: SpecsWithResults) -> Counter[str]:
    walk = EngineFuzz(dice, tokenizer, specs, run_ahead=True)
    runner: Any = walk.engine.runner
    runner.log = []
    for _ in range(steps):
        walk.step()
    walk.drain()
    return walk.counts + Counter(kind for kind, _, _ in runner.log)


def test_many_engines(tokenizer: Tokenizer, specs: SpecsWithResults) -> None:
    """Jobs join, end, fail and are cancelled: each one's text is the same as alone."""
    seen: Counter[str] = Counter()
    for seed in range(RUNS):
        seen += run_fuzz(Random(seed), STEPS, tokenizer, specs)
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
def test_engines_hypothesis(tokenizer: Tokenizer, specs: SpecsWithResults, dice: Random, steps: int) -> None:
    run_fuzz(dice, steps, tokenizer, specs)
