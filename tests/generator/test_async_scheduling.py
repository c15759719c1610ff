"""Asynchronous scheduling launches the next pass before the host has read its tokens; texts are unchanged."""

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
from tests.generator.test_engine import TOKENIZER, Script, alphabet, make_job, run, streaming_results, tokens
from tests.generator.toy_model import VOCAB, AsyncToyRunner, ToyRunner

RUNS, STEPS, SPECS = 12, 250, 120


def make_engine(script: Script = alphabet, runner: type[ToyRunner] = AsyncToyRunner, **options: Any) -> EngineCore:
    return EngineCore(runner(script, 16), PageTable(16), TOKENIZER, VOCAB, **options)


def pass_log(engine: EngineCore) -> list[tuple[str, int, int]]:
    assert isinstance(engine.runner, ToyRunner)
    return engine.runner.log


def pass_kinds(engine: EngineCore) -> list[str]:
    return [kind for kind, _, _ in pass_log(engine)]


def texts_by_step(rounds: list[list[dict[str, Any]]]) -> list[list[tuple[int, str]]]:
    """Serial number and text of each result, by step."""
    steps = (streaming_results([results]) for results in rounds)
    return [[(result["serial"], result.get("text", "")) for result in results] for results in steps]


def test_each_token_costs_one_pass_and_all_but_the_first_are_ahead() -> None:
    engine = make_engine()
    rounds = run(engine, make_job("abc", 6))
    assert streaming_results(rounds)[-1]["full_completion"] == "defghi"
    assert pass_log(engine) == [("prefill", 1, 2), ("decode", 1, 1), *[("ahead", 1, 1)] * 5]


def test_a_batch_runs_ahead_and_a_finished_job_costs_no_pass() -> None:
    engine = make_engine()
    rounds = run(engine, make_job("abc", 6), make_job("xyz", 3), make_job("mno", 6))
    assert texts_by_step(rounds) == texts_by_step(
        run(make_engine(runner=ToyRunner), make_job("abc", 6), make_job("xyz", 3), make_job("mno", 6))
    )
    passes = [entry for entry in pass_log(engine) if entry[0] != "prefill"]
    # The one that ends is in one pass more than it has tokens: the others' rows of that pass are used.
    assert passes == [("decode", 3, 1), *[("ahead", 3, 1)] * 3, *[("ahead", 2, 1)] * 2]


def test_the_next_pass_is_launched_before_the_tokens_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    wait = PendingOutput.wait

    def logged(pending: PendingOutput) -> SamplerOutput:
        pass_log(engine).append(("fetch", 0, 0))
        return wait(pending)

    monkeypatch.setattr(PendingOutput, "wait", logged)
    run(engine, make_job("abc", 4))
    assert pass_kinds(engine) == ["prefill", "decode", *["ahead", "fetch"] * 3, "fetch"]


@pytest.mark.parametrize("stop", [["g"], tokens("g"), ["fg"]])
def test_the_pass_in_flight_of_a_finished_job_is_dropped(stop: list[int | str]) -> None:
    """The pages that it wrote to can be reused by the next job."""
    run_ahead, synchronous = make_engine(), make_engine(runner=ToyRunner)
    texts = []
    for engine in (run_ahead, synchronous):
        rounds = run(engine, make_job("abc", 20, stop_conditions=stop))
        texts.append(texts_by_step(rounds + run(engine, make_job("abcdef", 9), make_job("abcdex", 9))))
    assert texts[0] == texts[1]
    assert pass_kinds(run_ahead).count("decode") == 2


def test_a_joining_job_costs_one_pass() -> None:
    engine = make_engine()
    engine.enqueue(make_job("abc", 8))
    rounds = [[dict(result) for result in engine.step()] for _ in range(3)]
    rounds += run(engine, make_job("xyz", 4))
    texts = {0: "", 1: ""}
    for results in texts_by_step(rounds):
        for serial, text in results:
            texts[serial] += text
    assert texts == {0: "defghijk", 1: "abcd"}
    assert pass_log(engine) == [
        ("prefill", 1, 2), ("decode", 1, 1), *[("ahead", 1, 1)] * 3,
        ("prefill", 1, 2), ("decode", 2, 1), *[("ahead", 2, 1)] * 4,
    ]  # fmt: skip


def test_a_cancelled_job_costs_no_pass() -> None:
    engine = make_engine()
    first, second = make_job("abc", 6), make_job("xyz", 6)
    for one in (first, second):
        engine.enqueue(one)
    engine.step()
    engine.step()
    engine.cancel(first)
    rounds = run(engine)
    assert [text for results in texts_by_step(rounds) for _, text in results] == ["c", "d", "e", "f"]
    assert pass_kinds(engine).count("decode") == 1


def test_a_job_in_a_reused_row_does_not_take_the_pass_in_flight() -> None:
    """The new batch has as many jobs, with texts as long, as the one in flight."""
    engine = make_engine()
    first, second = make_job("abc", 6), make_job("xyz", 6)
    for one in (first, second):
        engine.enqueue(one)
    engine.step()
    engine.cancel(first)
    results = streaming_results(run(engine, make_job("mnop", 5)))
    assert [result["full_completion"] for result in results if result["eos"]] == ["abcdef", "qrstu"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_step_that_is_interrupted_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass in flight is for tokens that the host has not read."""
    engine = make_engine()
    one = make_job("abc", 8)
    engine.enqueue(one)
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(PendingOutput, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert one.new_tokens == 1
    assert streaming_results(run(engine))[-1]["full_completion"] == "defghijk"


def test_nothing_runs_ahead_of_a_job_that_asks_for_more() -> None:
    engine = make_engine()
    run(engine, make_job("abc", 4), make_job("xyz", 8, banned_strings=["zzz"]))
    assert pass_kinds(engine).count("ahead") == 0
    engine = make_engine()
    rounds = run(engine, make_job("abc", 8), make_job("xyz", 4, return_probs=True))
    assert pass_kinds(engine).count("ahead") == 3
    assert streaming_results(rounds)[-1]["full_completion"] == "defghijk"


def test_no_finished_job_is_referenced() -> None:
    engine = make_engine()
    run(engine, make_job("abc", 20, stop_conditions=["g"]))
    assert engine.in_flight._jobs == []
    assert engine.in_flight._logits is None


class Failing(AsyncToyRunner):
    """A runner whose logits are NaN from a certain letter on."""

    def _logits(self, prefix: list[int]) -> Tensor:
        row = super()._logits(prefix)
        return row.fill_(torch.nan) if prefix[-1] == tokens("g")[0] else row


def test_a_failed_token_in_flight_harms_no_other_job() -> None:
    engine = make_engine(runner=Failing)
    results = streaming_results(run(engine, make_job("abc", 8), make_job("lmn", 8)))
    first = [result for result in results if result["serial"] == 0]
    assert [result.get("text") for result in first] == ["d", "e", "f", "g", None]
    assert first[-1]["eos_reason"] == "error"
    assert results[-1]["full_completion"] == "opqrstuv"
    assert pass_kinds(engine).count("decode") == 1


class ResamplingSampler(Sampler):
    """A sampler that resamples some rows from the same logits, as for too many candidates for its kernel."""

    def launch(self, logits: Tensor, requests: Sequence[SamplingRequest]) -> PendingOutput:
        pending = super().launch(logits, requests)
        for row, request in enumerate(requests):
            if len(request.state) % 3 == row:
                pending.tokens[row] = TOO_MANY_CANDIDATES
        pending.saved_logits = logits.clone()
        return pending


def test_a_row_is_resampled_from_the_same_logits() -> None:
    engine = make_engine()
    engine.sampler = ResamplingSampler(TOKENIZER, VOCAB)
    rounds = run(engine, make_job("abc", 12), make_job("xyz", 12))
    assert texts_by_step(rounds) == texts_by_step(
        run(make_engine(runner=ToyRunner), make_job("abc", 12), make_job("xyz", 12))
    )
    assert pass_kinds(engine).count("decode") > 4


class RunnerWithoutDecodeNext(AsyncToyRunner):
    """A runner whose third pass ahead cannot be launched."""

    def decode_next(self, sequences: Sequence[Any], past: Sequence[int], tokens: Tensor) -> Tensor:
        logits = super().decode_next(sequences, past, tokens)
        if [kind for kind, _, _ in self.log].count("ahead") == 3:
            raise RuntimeError("out of memory")
        return logits


def test_a_pass_that_cannot_be_launched_loses_no_token() -> None:
    engine = make_engine(runner=RunnerWithoutDecodeNext)
    one = make_job("abc", 8)
    engine.enqueue(one)
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert one.new_tokens == 2
    assert streaming_results(run(engine))[-1]["full_completion"] == "defghijk"


def test_settings_that_change_take_effect_at_the_next_token() -> None:
    def script(prefix: list[int]) -> list[int]:
        return [*alphabet(prefix), 3]

    engine = make_engine(script)
    settings = Settings.greedy()
    engine.enqueue(make_job("abc", 4, settings=settings))
    engine.step()
    settings.token_bias = torch.zeros(VOCAB).index_fill_(0, torch.tensor([3]), 5.0)
    assert streaming_results(run(engine))[-1]["full_completion"] == "dbbb"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def specs(tokenizer: Tokenizer) -> SpecsWithResults:
    """Mostly requests that are scheduled asynchronously, each with its results in a synchronous engine."""
    rng = Random(11)
    recipes = [simple_job_spec(rng) for _ in range(SPECS)] + [random_job_spec(rng, tokenizer) for _ in range(4)]
    return [(recipe, run_alone(recipe, tokenizer)) for recipe in recipes]


def run_fuzz(
    rng: Random, steps: int, tokenizer: Tokenizer, specs: SpecsWithResults, recurrent: bool = False
) -> Counter[str]:
    walk = EngineFuzz(rng, tokenizer, specs, run_ahead=True, recurrent=recurrent)
    runner: Any = walk.engine.runner
    runner.log = []
    for _ in range(steps):
        walk.step()
    walk.drain()
    return walk.counts + Counter(kind for kind, _, _ in runner.log)


@pytest.mark.parametrize("recurrent", [False, True])
def test_many_engines(tokenizer: Tokenizer, specs: SpecsWithResults, recurrent: bool) -> None:
    """Jobs join, end, fail and are cancelled; each gives the same text as alone."""
    events: Counter[str] = Counter()
    for seed in range(RUNS):
        events += run_fuzz(Random(seed), STEPS, tokenizer, specs, recurrent)
    at_least = dict.fromkeys(("stop_token", "stop_string", "error", "too large", "cancels"), 10)
    at_least |= {
        "rounds": 2000,
        "finished": 300,
        "max_new_tokens": 100,
        "reused": 20 if recurrent else 100,
        "ahead": 1000,
        "decode": 500,
        "guesses": 50,
    }
    assert {key: events[key] for key in at_least if events[key] < at_least[key]} == {}, events


@settings(max_examples=12)
@given(rng=st.randoms(use_true_random=False), steps=st.integers(1, 30))
def test_engines_hypothesis(tokenizer: Tokenizer, specs: SpecsWithResults, rng: Random, steps: int) -> None:
    run_fuzz(rng, steps, tokenizer, specs)
