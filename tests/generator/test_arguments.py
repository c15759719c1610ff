"""Arguments that cannot be served are refused by name, with a remedy, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exlm import InputError, Job, RegexFilter, SelectFilter, Settings
from tests.generator import scripted
from tests.generator.test_loop import TOKENIZER, job


@pytest.mark.parametrize("number", [0, -1, 2**31, 1.5, True, None, "3"])
def test_a_job_makes_at_least_one_token(number: Any) -> None:
    with pytest.raises(InputError, match=r"max_new_tokens must be a whole number from 1 .* found"):
        job("abc", number)


def test_a_misspelt_name_gets_a_suggestion(tmp_path: Path) -> None:
    machine = scripted.generator(scripted.tokenizer(tmp_path))
    with pytest.raises(InputError, match=r"Job has no argument 'stop_condition'. Did you mean 'stop_cond"):
        Job(TOKENIZER.encode("abc"), 3, stop_condition=[0])
    with pytest.raises(
        InputError, match=r"generate\(\) has no argument 'completion_onyl'. Did you mean 'compl"
    ):
        machine.generate("abc", 3, completion_onyl=True)
    with pytest.raises(InputError, match=r"generate\(\) has no argument 'input_ids'"):
        machine.generate("abc", 3, input_ids=TOKENIZER.encode("abc"))
    with pytest.raises(
        InputError, match=r"Generator has no argument 'max_batch'. Did you mean 'max_batch_size'"
    ):
        scripted.generator(scripted.tokenizer(tmp_path), max_batch=3)
    with pytest.raises(InputError, match=r"'zzz'. Leave it out"):
        machine.generate("abc", 3, zzz=None)
    assert machine.generate("abc", 3, gen_settings=Settings.greedy()) == "abcdef"


def test_what_other_calls_of_the_old_library_took_may_be_passed_on_empty(tmp_path: Path) -> None:
    machine = scripted.generator(scripted.tokenizer(tmp_path))
    old: dict[str, Any] = {"loras": None, "input_embeddings": None, "embeddings": None}
    assert machine.generate("abc", 3, gen_settings=Settings.greedy(), **old) == "abcdef"
    Job(TOKENIZER.encode("abc"), 3, **old)
    with pytest.raises(InputError, match="takes no stop_token: use stop_conditions"):
        machine.generate("abc", 3, stop_token=0)
    with pytest.raises(InputError, match="embeddings must be a list with one entry for each of 2 prompts"):
        machine.generate(["abc", "def"], 3, embeddings=[None])


def test_jobs_arguments_reach_the_jobs(tmp_path: Path) -> None:
    machine = scripted.generator(scripted.tokenizer(tmp_path))
    options: dict[str, Any] = {"identifier": 7, "max_skips": None, "return_probs": True, "salt": "ann"}
    _, last = machine.generate(
        ["abc", "def"], 2, gen_settings=Settings.greedy(), return_last_results=True, **options
    )
    assert [result["identifier"] for result in last] == [7, 7]
    assert all("token_probs" in result for result in last)


@pytest.mark.parametrize("prefer_eos", [False, True])
def test_a_finished_grammar_ends_a_text_that_should_be_longer(tmp_path: Path, prefer_eos: bool) -> None:
    """`min_new_tokens` keeps stop tokens away, but where a filter lets nothing else follow, its end wins."""
    texts = scripted.tokenizer(tmp_path)
    machine = scripted.generator(texts)
    others = [scripted.job("abc", 12), scripted.job("xyz", 12)]
    options: dict[str, Any] = {
        "min_new_tokens": 10, "stop_conditions": [0], "filter_prefer_eos": prefer_eos,
    }  # fmt: skip
    grammar = scripted.job("abc", 12, filters=[RegexFilter(texts, "[x-z]{2}")], **options)
    option = scripted.job("abc", 12, filters=[SelectFilter(None, texts, ["cat"])], **options)
    last = {
        r["serial"]: r for r in scripted.streams(scripted.run(machine, *others, grammar, option)) if r["eos"]
    }
    assert [last[n]["full_completion"] for n in range(2)] == ["defghijklmno", "abcdefghijkl"]
    assert (last[2]["eos_reason"], len(last[2]["full_completion"])) == ("end_filter", 2)
    assert (last[3]["eos_reason"], last[3]["full_completion"]) == ("end_filter", "cat")
    assert last[2]["new_tokens"] == 3
