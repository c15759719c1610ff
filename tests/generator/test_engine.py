"""The golden traces of the reference, with its errors corrected, over a scripted model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from exlm.errors import CacheTooSmall, InputError
from exlm.generator.engine import EngineCore
from exlm.generator.job import Job
from exlm.generator.page_table import PageTable
from exlm.sampling import Settings
from tests.generator.page_table_oracle import check_invariants
from tests.generator.toy_model import PIECES, VOCAB, ToyRunner, ToyTokenizer

TOKENIZER = ToyTokenizer()
Script = Callable[[list[int]], Sequence[int]]


def tokens(text: str) -> list[int]:
    return [int(number) for number in TOKENIZER.encode(text)[0]]


def alphabet(prefix: list[int]) -> list[int]:
    """Continue with the next letter of the alphabet."""
    return [(prefix[-1] - 2 + 1) % 26 + 2]


def make_engine(script: Script = alphabet, pages: int = 16, **options: Any) -> EngineCore:
    return EngineCore(ToyRunner(script, pages), PageTable(pages), TOKENIZER, VOCAB, **options)


def make_job(prompt: str | list[int], new: int = 6, **options: Any) -> Job:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else torch.tensor([prompt])
    return Job(ids, new, gen_settings=options.pop("settings", Settings.greedy()), **options)


def run(engine: EngineCore, *jobs: Job) -> list[list[dict[str, Any]]]:
    """Step until every job is done; return the results of each step."""
    for job in jobs:
        engine.enqueue(job)
    rounds = []
    while engine.busy:
        rounds.append([dict(result) for result in engine.step()])
        check_invariants(engine.page_table, [s for active in engine.scheduler.active for s in active.sequences])
    return rounds


def streaming_results(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [result for results in rounds for result in results if result["stage"] == "streaming"]


def test_g1_every_key_of_a_plain_job() -> None:
    rounds = run(make_engine(), make_job("abc", return_probs=True, return_top_tokens=2, identifier="x"))
    started, prefill, first = rounds[0]
    assert (started["stage"], started["serial"], started["identifier"], started["eos"]) == (
        "started",
        0,
        "x",
        False,
    )
    assert (prefill["stage"], prefill["curr_progress"], prefill["max_progress"]) == ("prefill", 2, 2)
    assert first["text"] == "d"
    assert first["token_ids"].tolist() == [[5]]
    assert first["token_probs"].tolist() == [[1.0]]
    assert first["top_k_tokens"].shape == first["top_k_probs"].shape == (1, 1, 2)
    assert first["top_k_tokens"][0, 0, 0] == 5
    last = rounds[5][0]
    assert (last["eos"], last["eos_reason"], last["text"]) == (True, "max_new_tokens", "i")
    assert (last["full_completion"], last["new_tokens"], last["prompt_tokens"]) == ("defghi", 6, 3)
    assert (last["cached_pages"], last["cached_tokens"]) == (0, 0)
    assert last["time_generate"] >= 0
    assert "held" not in last
    assert len(rounds) == 6


def test_g2_a_stop_string_is_never_emitted() -> None:
    results = streaming_results(run(make_engine(), make_job("abc", stop_conditions=["gh"])))
    assert [result.get("text") for result in results] == ["d", "e", "f", None, None]
    last = results[-1]
    assert (last["eos_reason"], last["eos_triggering_string"]) == ("stop_string", "gh")
    assert (last["full_completion"], last["new_tokens"]) == ("def", 5)
    assert last["held"] == {"text": "gh"}
    assert last["token_ids"].tolist() == [[8, 9]]


def test_g3_a_stop_token() -> None:
    last = streaming_results(run(make_engine(), make_job("abc", stop_conditions=[8])))[-1]
    assert (last["eos_reason"], last["eos_triggering_token_id"]) == ("stop_token", 8)
    assert last["eos_triggering_token_str"] == "g"
    assert (last["full_completion"], last["new_tokens"]) == ("def", 4)
    assert last["held"]["text"] == "g"
    assert last["held"]["token_ids"].tolist() == [[8]]


def test_g4_a_prompt_of_one_token_needs_no_prefill() -> None:
    rounds = run(make_engine(), make_job("a", 2))
    assert [result["stage"] for result in rounds[0]] == ["started", "streaming"]
    assert [result["text"] for result in streaming_results(rounds)] == ["b", "c"]


def test_g5_healing() -> None:
    script = {(2, 3): [5, 32], (2, 3, 32): [35], (2, 3, 32, 35): [30], (2, 3, 32, 35, 30): [30]}
    rounds = run(make_engine(lambda prefix: script[tuple(prefix)]), make_job("abHe", 3, token_healing=True))
    assert (rounds[0][1]["curr_progress"], rounds[0][1]["max_progress"]) == (1, 1)
    results = streaming_results(rounds)
    assert [result["text"] for result in results] == ["llo", " world", ".", "."]
    assert results[0]["token_ids"].tolist() == [[32]]
    assert (results[-1]["full_completion"], results[-1]["new_tokens"]) == ("llo world..", 3)
    assert results[-1]["prompt_tokens"] == 3


def test_g6_banned_strings_are_taken_back() -> None:
    def script(prefix: list[int]) -> list[int]:
        return [prefix[-1] + 1, tokens("l")[0]]

    results = streaming_results(run(make_engine(script), make_job("abc", 8, banned_strings=["EF"])))
    assert [result.get("text") for result in results[:3]] == ["d", None, None]
    assert results[2]["suppressed_text"] == "ef"
    assert results[2]["suppressed_tokens"].tolist() == [[6, 7]]
    assert "token_ids" not in results[2]
    assert results[-1]["full_completion"] == "dlmnopqr"
    assert results[-1]["new_tokens"] == 8


@pytest.mark.parametrize("excluded", ["by a bias", "by a hook"])
def test_a_job_with_only_banned_continuations_fails(excluded: str) -> None:
    """Regression: the job sampled and rewound the same token for ever."""
    settings = Settings.greedy()
    if excluded == "by a bias":
        settings.token_bias = torch.full((VOCAB,), -torch.inf)
        settings.token_bias[tokens("ef")] = 0.0
    else:
        settings.post_sampling_hooks = [lambda result: setattr(result, "sampled_token", tokens("e")[0])]
    jobs = [make_job("abc", 8, settings=settings, banned_strings=["E", "f"]), make_job("abc", 30)]
    last = [result for result in streaming_results(run(make_engine(), *jobs)) if result["eos"]]
    assert [result["job"] for result in last] == jobs
    assert isinstance(last[0]["error"], InputError)
    assert "completes a banned string" in str(last[0]["error"])
    assert last[1]["eos_reason"] == "max_new_tokens"


def test_g7_stop_tokens_wait_for_the_minimum() -> None:
    results = streaming_results(
        run(make_engine(lambda _: [0, 29]), make_job("abc", 9, min_new_tokens=3, stop_conditions=[0]))
    )
    last = results[-1]
    assert (last["eos_reason"], last["new_tokens"], last["full_completion"]) == ("stop_token", 4, "!!!")
    assert last["held"]["token_ids"].tolist() == [[0]]


def test_g8_guidance_runs_two_sequences() -> None:
    settings = Settings.greedy()
    settings.cfg_scale = 1.5
    engine = make_engine()
    pair = [TOKENIZER.encode("abcdefghij"), TOKENIZER.encode("tuvwxyz")]
    rounds = run(engine, Job(pair, 3, gen_settings=settings))
    assert (rounds[0][1]["curr_progress"], rounds[0][1]["max_progress"]) == (15, 15)
    runner = engine.runner
    assert isinstance(runner, ToyRunner)
    assert runner.log == [("prefill", 1, 9), ("prefill", 1, 6)] + [("decode", 2, 1)] * 3
    assert streaming_results(rounds)[-1]["prompt_tokens"] == 10


def test_g9_prompts_that_begin_alike_share() -> None:
    common = [2 + i % 26 for i in range(600)]
    engine = make_engine()
    jobs = [make_job([*common, *[28 + i] * 20], 3) for i in range(3)]
    rounds = run(engine, *jobs)
    runner = engine.runner
    assert isinstance(runner, ToyRunner)
    assert [entry for entry in runner.log if entry[0] == "prefill"] == [
        ("prefill", 1, 619),
        ("prefill", 1, 19),
        ("prefill", 1, 19),
    ]
    assert [r["curr_progress"] for r in rounds[0] if r["stage"] == "prefill"] == [619] * 3
    last = [result for result in streaming_results(rounds) if result["eos"]]
    assert [result["cached_pages"] for result in last] == [0, 2, 2]
    assert [result["cached_tokens"] for result in last] == [0, 600, 600]
    runner.log.clear()
    later_rounds = run(engine, make_job([*common, *[28] * 20], 3))
    assert not [entry for entry in runner.log if entry[0] == "prefill"]
    assert [r["curr_progress"] for r in later_rounds[0] if r["stage"] == "prefill"] == [619]
    assert streaming_results(later_rounds)[-1]["cached_tokens"] == 619
    ids = [int(n) for r in streaming_results(later_rounds) for n in r["token_ids"][0]]
    longer = run(engine, make_job([*common, *[28] * 20, *ids, *[29] * 40], 3))
    assert streaming_results(longer)[-1]["cached_tokens"] == 622


def test_g10_whole_pages_need_no_prefill() -> None:
    prompt = [2 + i % 26 for i in range(513)]
    engine = make_engine()
    run(engine, make_job(prompt, 2))
    rounds = run(engine, make_job(prompt, 2))
    assert [result["stage"] for result in rounds[0]] == ["started", "streaming"]
    assert (
        streaming_results(rounds)[-1]["cached_pages"],
        streaming_results(rounds)[-1]["cached_tokens"],
    ) == (2, 512)


def test_g11_a_long_prompt_does_not_stop_the_others() -> None:
    engine = make_engine(chunk_size=512)
    engine.enqueue(make_job("abcdefghij", 20))
    engine.step()
    engine.enqueue(make_job([2 + i % 26 for i in range(1300)], 3))
    progress = []
    for _ in range(3):
        results = engine.step()
        progress.append([r["curr_progress"] for r in results if r["stage"] == "prefill"])
        assert any(r["stage"] == "streaming" and r["serial"] == 0 for r in results)
    assert progress == [[512], [1024], [1299]]
    assert any(r["stage"] == "streaming" and r["serial"] == 1 for r in results)


def test_g18_a_full_batch_makes_the_rest_wait() -> None:
    engine = make_engine(max_batch_size=2)
    rounds = run(engine, *[make_job("abc", 2) for _ in range(4)])
    started = [[r["serial"] for r in results if r["stage"] == "started"] for results in rounds]
    assert [serials for serials in started if serials] == [[0, 1], [2, 3]]


def test_xtc_exempts_the_tokenizers_line_breaks() -> None:
    """XTC would exclude the best token; it never excludes a line break."""
    settings = Settings(temperature=1.0, top_k=0, top_p=0.0, xtc_probability=1.0, token_repetition_penalty=1.0)
    for best, exempt in (("\n", True), ("a", False)):
        ranks = tokens(best + "bc")
        results = [
            streaming_results(
                run(make_engine(lambda _, ranks=ranks: ranks), make_job("x", 1, settings=settings, seed=i))
            )[-1]
            for i in range(40)
        ]
        assert any(result["full_completion"] == best for result in results) == exempt


def test_dry_counts_no_repetition_across_punctuation() -> None:
    """DRY makes a repeated text take its second choice; a sequence breaker ends the repetition."""
    settings = Settings.greedy(dry_multiplier=5.0, dry_allowed_length=2)
    for prompt, following in (("abcd xabc", "z"), ("abc.d xabc.", "d")):
        last = streaming_results(run(make_engine(lambda _: tokens("dz")), make_job(prompt, 1, settings=settings)))[-1]
        assert last["full_completion"] == following


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_conditions": [None]}, "stop_conditions"),
        ({"stop_conditions": ["x", 1.5]}, "stop_conditions"),
        ({"stop_conditions": "x"}, "stop_conditions"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"banned_strings": "x"}, "banned_strings"),
        ({"banned_strings": ["x"], "filters": [object()]}, "banned strings with filters"),
        ({"max_skips": -1}, "max_skips"),
    ],
)
def test_bad_jobs_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_job("abc", **options)


def test_bad_prompts() -> None:
    for prompt in (torch.zeros(1, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), [1, 2], "abc"):
        with pytest.raises(InputError):
            Job(prompt, 3)
    settings = Settings.greedy()
    settings.cfg_scale = 2.0
    with pytest.raises(InputError, match="guidance needs a pair"):
        make_job("abc", settings=settings)
    with pytest.raises(InputError, match="no argument 'unknown'"):
        Job(TOKENIZER.encode("abc"), 3, unknown=1)


def test_jobs_that_can_never_run_are_refused_and_the_rest_goes_on() -> None:
    engine = make_engine(pages=2, max_length=2000)
    with pytest.raises(CacheTooSmall, match="only 2 available"):
        engine.enqueue(make_job("abc", 600))
    with pytest.raises(InputError, match="exceed the model's length"):
        engine.enqueue(make_job("abc", 3000))
    with pytest.raises(InputError, match="Stop token 99"):
        engine.enqueue(make_job("abc", 3, stop_conditions=[99]))
    job = make_job("abc", 3)
    assert streaming_results(run(engine, job))[-1]["full_completion"] == "def"
    with pytest.raises(InputError, match="runs once"):
        engine.enqueue(job)


def test_cancelling_gives_no_result() -> None:
    engine = make_engine()
    first, second = make_job("abc", 50), make_job("xyz", 50)
    engine.enqueue(first)
    engine.enqueue(second)
    engine.step()
    engine.cancel(first)
    engine.cancel(first)
    results = [result for _ in range(3) for result in engine.step()]
    assert {result["serial"] for result in results} == {1}
    engine.clear()
    assert not engine.busy
    assert engine.page_table.num_free_pages == 16


@pytest.mark.parametrize("seed", range(4))
def test_tokens_do_not_depend_on_batch_mates(seed: int) -> None:
    """Random jobs run in one batch and some are cancelled; each gives the same text as alone."""
    import random

    rng = random.Random(seed)

    def script(prefix: list[int]) -> list[int]:
        chooser = random.Random(hash(tuple(prefix[-5:])) ^ seed)
        return chooser.sample(range(2, VOCAB), 6)

    def make_jobs_like(i: int) -> Job:
        chooser = random.Random(seed * 1000 + i)
        head = [2 + j % 26 for j in range(chooser.choice([0, 100, 300, 520]))]
        tail = [chooser.randrange(2, VOCAB) for _ in range(chooser.randint(1, 40))]
        banned = chooser.choice([None, ["ab", "he"], ["Z"]])
        stops = chooser.choice([None, ["zz", "d"], [PIECES.index("q")]])
        return make_job([*head, *tail], chooser.randint(1, 60), banned_strings=banned, stop_conditions=stops)

    single = {}
    for i in range(14):
        single[i] = streaming_results(run(make_engine(script), make_jobs_like(i)))[-1]["full_completion"]
    engine = make_engine(script, pages=12, max_batch_size=5, chunk_size=256)
    jobs = {i: make_jobs_like(i) for i in range(14)}
    for job in jobs.values():
        engine.enqueue(job)
    cancelled = set(rng.sample(range(14), 3))
    step = 0
    while engine.busy:
        engine.step()
        check_invariants(engine.page_table, [s for active in engine.scheduler.active for s in active.sequences])
        step += 1
        if step == 9:
            for i in cancelled:
                engine.cancel(jobs[i])
    for i, job in jobs.items():
        if i not in cancelled or job.full_completion == single[i]:
            assert job.full_completion == single[i]
