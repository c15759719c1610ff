"""The golden traces, with the reference's mistakes mended, over a scripted model."""

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
    """Every letter is followed by the next one."""
    return [(prefix[-1] - 2 + 1) % 26 + 2]


def make_engine(script: Script = alphabet, pages: int = 16, **options: Any) -> EngineCore:
    return EngineCore(ToyRunner(script, pages), PageTable(pages), TOKENIZER, VOCAB, **options)


def job(prompt: str | list[int], new: int = 6, **options: Any) -> Job:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else torch.tensor([prompt])
    return Job(ids, new, gen_settings=options.pop("settings", Settings.greedy()), **options)


def run(machine: EngineCore, *jobs: Job) -> list[list[dict[str, Any]]]:
    """All steps until every job is done."""
    for one in jobs:
        machine.enqueue(one)
    rounds = []
    while machine.busy:
        rounds.append([dict(result) for result in machine.step()])
        check_invariants(machine.page_table, [s for active in machine.scheduler.active for s in active.sequences])
    return rounds


def streaming_results(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [result for results in rounds for result in results if result["stage"] == "streaming"]


def test_g1_every_key_of_a_plain_job() -> None:
    rounds = run(make_engine(), job("abc", return_probs=True, return_top_tokens=2, identifier="x"))
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
    results = streaming_results(run(make_engine(), job("abc", stop_conditions=["gh"])))
    assert [result.get("text") for result in results] == ["d", "e", "f", None, None]
    last = results[-1]
    assert (last["eos_reason"], last["eos_triggering_string"]) == ("stop_string", "gh")
    assert (last["full_completion"], last["new_tokens"]) == ("def", 5)
    assert last["held"] == {"text": "gh"}
    assert last["token_ids"].tolist() == [[8, 9]]


def test_g3_a_stop_token() -> None:
    last = streaming_results(run(make_engine(), job("abc", stop_conditions=[8])))[-1]
    assert (last["eos_reason"], last["eos_triggering_token_id"]) == ("stop_token", 8)
    assert last["eos_triggering_token_str"] == "g"
    assert (last["full_completion"], last["new_tokens"]) == ("def", 4)
    assert last["held"]["text"] == "g"
    assert last["held"]["token_ids"].tolist() == [[8]]


def test_g4_a_prompt_of_one_token_needs_no_prefill() -> None:
    rounds = run(make_engine(), job("a", 2))
    assert [result["stage"] for result in rounds[0]] == ["started", "streaming"]
    assert [result["text"] for result in streaming_results(rounds)] == ["b", "c"]


def test_g5_healing() -> None:
    script = {(2, 3): [5, 32], (2, 3, 32): [35], (2, 3, 32, 35): [30], (2, 3, 32, 35, 30): [30]}
    rounds = run(make_engine(lambda prefix: script[tuple(prefix)]), job("abHe", 3, token_healing=True))
    assert (rounds[0][1]["curr_progress"], rounds[0][1]["max_progress"]) == (1, 1)
    results = streaming_results(rounds)
    assert [result["text"] for result in results] == ["llo", " world", ".", "."]
    assert results[0]["token_ids"].tolist() == [[32]]
    assert (results[-1]["full_completion"], results[-1]["new_tokens"]) == ("llo world..", 3)
    assert results[-1]["prompt_tokens"] == 3


def test_g6_banned_strings_are_taken_back() -> None:
    def script(prefix: list[int]) -> list[int]:
        return [prefix[-1] + 1, tokens("l")[0]]

    results = streaming_results(run(make_engine(script), job("abc", 8, banned_strings=["EF"])))
    assert [result.get("text") for result in results[:3]] == ["d", None, None]
    assert results[2]["suppressed_text"] == "ef"
    assert results[2]["suppressed_tokens"].tolist() == [[6, 7]]
    assert "token_ids" not in results[2]
    assert results[-1]["full_completion"] == "dlmnopqr"
    assert results[-1]["new_tokens"] == 8


@pytest.mark.parametrize("excluded", ["by a bias", "by a hook"])
def test_a_job_with_only_banned_continuations_fails(excluded: str) -> None:
    """It said and took back the same for ever."""
    settings = Settings.greedy()
    if excluded == "by a bias":
        settings.token_bias = torch.full((VOCAB,), -torch.inf)
        settings.token_bias[tokens("ef")] = 0.0
    else:
        settings.post_sampling_hooks = [lambda result: setattr(result, "sampled_token", tokens("e")[0])]
    asked = [job("abc", 8, settings=settings, banned_strings=["E", "f"]), job("abc", 30)]
    ends = [result for result in streaming_results(run(make_engine(), *asked)) if result["eos"]]
    assert [result["job"] for result in ends] == asked
    assert isinstance(ends[0]["error"], InputError)
    assert "completes a banned string" in str(ends[0]["error"])
    assert ends[1]["eos_reason"] == "max_new_tokens"


def test_g7_stop_tokens_wait_for_the_minimum() -> None:
    results = streaming_results(
        run(make_engine(lambda _: [0, 29]), job("abc", 9, min_new_tokens=3, stop_conditions=[0]))
    )
    last = results[-1]
    assert (last["eos_reason"], last["new_tokens"], last["full_completion"]) == ("stop_token", 4, "!!!")
    assert last["held"]["token_ids"].tolist() == [[0]]


def test_g8_guidance_runs_two_sequences() -> None:
    settings = Settings.greedy()
    settings.cfg_scale = 1.5
    machine = make_engine()
    pair = [TOKENIZER.encode("abcdefghij"), TOKENIZER.encode("tuvwxyz")]
    rounds = run(machine, Job(pair, 3, gen_settings=settings))
    assert (rounds[0][1]["curr_progress"], rounds[0][1]["max_progress"]) == (15, 15)
    runner = machine.runner
    assert isinstance(runner, ToyRunner)
    assert runner.log == [("prefill", 1, 9), ("prefill", 1, 6)] + [("decode", 2, 1)] * 3
    assert streaming_results(rounds)[-1]["prompt_tokens"] == 10


def test_g9_prompts_that_begin_alike_share() -> None:
    common = [2 + i % 26 for i in range(600)]
    machine = make_engine()
    jobs = [job([*common, *[28 + i] * 20], 3) for i in range(3)]
    rounds = run(machine, *jobs)
    runner = machine.runner
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
    again = run(machine, job([*common, *[28] * 20], 3))
    assert not [entry for entry in runner.log if entry[0] == "prefill"]
    assert [r["curr_progress"] for r in again[0] if r["stage"] == "prefill"] == [619]
    assert streaming_results(again)[-1]["cached_tokens"] == 619
    said = [int(n) for r in streaming_results(again) for n in r["token_ids"][0]]
    longer = run(machine, job([*common, *[28] * 20, *said, *[29] * 40], 3))
    assert streaming_results(longer)[-1]["cached_tokens"] == 622


def test_g10_whole_pages_need_no_prefill() -> None:
    prompt = [2 + i % 26 for i in range(513)]
    machine = make_engine()
    run(machine, job(prompt, 2))
    rounds = run(machine, job(prompt, 2))
    assert [result["stage"] for result in rounds[0]] == ["started", "streaming"]
    assert (
        streaming_results(rounds)[-1]["cached_pages"],
        streaming_results(rounds)[-1]["cached_tokens"],
    ) == (2, 512)


def test_g11_a_long_prompt_does_not_stop_the_others() -> None:
    machine = make_engine(chunk_size=512)
    machine.enqueue(job("abcdefghij", 20))
    machine.step()
    machine.enqueue(job([2 + i % 26 for i in range(1300)], 3))
    progress = []
    for _ in range(3):
        results = machine.step()
        progress.append([r["curr_progress"] for r in results if r["stage"] == "prefill"])
        assert any(r["stage"] == "streaming" and r["serial"] == 0 for r in results)
    assert progress == [[512], [1024], [1299]]
    assert any(r["stage"] == "streaming" and r["serial"] == 1 for r in results)


def test_g18_a_full_batch_makes_the_rest_wait() -> None:
    machine = make_engine(max_batch_size=2)
    rounds = run(machine, *[job("abc", 2) for _ in range(4)])
    begun = [[r["serial"] for r in results if r["stage"] == "started"] for results in rounds]
    assert [serials for serials in begun if serials] == [[0, 1], [2, 3]]


def test_xtc_exempts_the_tokenizers_line_breaks() -> None:
    """The best token would be excluded; a line break never is."""
    settings = Settings(temperature=1.0, top_k=0, top_p=0.0, xtc_probability=1.0, token_repetition_penalty=1.0)
    for best, spared in (("\n", True), ("a", False)):
        ranks = tokens(best + "bc")
        said = [
            streaming_results(run(make_engine(lambda _, ranks=ranks: ranks), job("x", 1, settings=settings, seed=i)))[
                -1
            ]
            for i in range(40)
        ]
        assert any(one["full_completion"] == best for one in said) == spared


def test_dry_counts_no_repetition_across_punctuation() -> None:
    """Where the text repeats, DRY takes the second choice; punctuation in between ends what is repeated."""
    settings = Settings.greedy(dry_multiplier=5.0, dry_allowed_length=2)
    for prompt, following in (("abcd xabc", "z"), ("abc.d xabc.", "d")):
        last = streaming_results(run(make_engine(lambda _: tokens("dz")), job(prompt, 1, settings=settings)))[-1]
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
        job("abc", **options)


def test_bad_prompts() -> None:
    for prompt in (torch.zeros(1, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), [1, 2], "abc"):
        with pytest.raises(InputError):
            Job(prompt, 3)
    settings = Settings.greedy()
    settings.cfg_scale = 2.0
    with pytest.raises(InputError, match="guidance needs a pair"):
        job("abc", settings=settings)
    with pytest.raises(InputError, match="no argument 'unknown'"):
        Job(TOKENIZER.encode("abc"), 3, unknown=1)


def test_jobs_that_can_never_run_are_refused_and_the_rest_goes_on() -> None:
    machine = make_engine(pages=2, max_length=2000)
    with pytest.raises(CacheTooSmall, match="only 2 available"):
        machine.enqueue(job("abc", 600))
    with pytest.raises(InputError, match="exceed the model's length"):
        machine.enqueue(job("abc", 3000))
    with pytest.raises(InputError, match="Stop token 99"):
        machine.enqueue(job("abc", 3, stop_conditions=[99]))
    done = job("abc", 3)
    assert streaming_results(run(machine, done))[-1]["full_completion"] == "def"
    with pytest.raises(InputError, match="runs once"):
        machine.enqueue(done)


def test_cancelling_gives_no_result() -> None:
    machine = make_engine()
    one, two = job("abc", 50), job("xyz", 50)
    machine.enqueue(one)
    machine.enqueue(two)
    machine.step()
    machine.cancel(one)
    machine.cancel(one)
    results = [result for _ in range(3) for result in machine.step()]
    assert {result["serial"] for result in results} == {1}
    machine.clear()
    assert not machine.busy
    assert machine.page_table.num_free_pages == 16


@pytest.mark.parametrize("seed", range(4))
def test_tokens_do_not_depend_on_batch_mates(seed: int) -> None:
    """Random jobs in one batch, some cancelled: each says what it says alone."""
    import random

    rng = random.Random(seed)

    def script(prefix: list[int]) -> list[int]:
        chooser = random.Random(hash(tuple(prefix[-5:])) ^ seed)
        return chooser.sample(range(2, VOCAB), 6)

    def fresh(i: int) -> Job:
        chooser = random.Random(seed * 1000 + i)
        head = [2 + j % 26 for j in range(chooser.choice([0, 100, 300, 520]))]
        tail = [chooser.randrange(2, VOCAB) for _ in range(chooser.randint(1, 40))]
        banned = chooser.choice([None, ["ab", "he"], ["Z"]])
        stops = chooser.choice([None, ["zz", "d"], [PIECES.index("q")]])
        return job([*head, *tail], chooser.randint(1, 60), banned_strings=banned, stop_conditions=stops)

    alone = {}
    for i in range(14):
        alone[i] = streaming_results(run(make_engine(script), fresh(i)))[-1]["full_completion"]
    machine = make_engine(script, pages=12, max_batch_size=5, chunk_size=256)
    jobs = {i: fresh(i) for i in range(14)}
    for one in jobs.values():
        machine.enqueue(one)
    cancelled = set(rng.sample(range(14), 3))
    step = 0
    while machine.busy:
        machine.step()
        check_invariants(machine.page_table, [s for active in machine.scheduler.active for s in active.sequences])
        step += 1
        if step == 9:
            for i in cancelled:
                machine.cancel(jobs[i])
    for i, one in jobs.items():
        if i not in cancelled or one.full_completion == alone[i]:
            assert one.full_completion == alone[i]
