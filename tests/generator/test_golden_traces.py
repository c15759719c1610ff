"""The golden traces G12 to G17 of the reference, with its errors corrected, over scripted generators.

G1 to G11 and G18 are `test_g1_…` and so on in test_engine.py; test_output.py has the text side of G1 to G7
and G15, test_scheduler.py and test_pages.py the paging side of G4, G8 to G11, G14 and G18.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exlm import Generator, InputError, Job, PrefixFilter, SelectFilter, Settings, Tokenizer
from tests.generator.scripted import (
    ID,
    Script,
    ScriptedCache,
    ScriptedModel,
    alphabet,
    forward_passes,
    ids,
    make_generator,
    make_job,
    make_tokenizer,
    run,
    streaming_results,
)

EMOJI = "\U0001f600"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary in which ids 4 to 7 are the bytes of one character."""
    pieces = [b"</s>", b"<s>", b"a", b"b", *(bytes([byte]) for byte in EMOJI.encode()), b"!"]
    return make_tokenizer(tmp_path_factory.mktemp("bytes"), pieces)


def cycle(prefix: list[int]) -> list[int]:
    """Repeat a b c d e."""
    return [(prefix[-1] - 2 + 1) % 5 + 2]


def scripted(*token_ids: int) -> Script:
    """A script that generates `token_ids` after a prompt of one token."""
    return lambda prefix: [token_ids[len(prefix) - 1]]


def test_g12_ngram_drafting_takes_five_tokens_a_round(tokenizer: Tokenizer) -> None:
    """The reference stopped at 16 of 20 tokens."""
    generator = make_generator(tokenizer, cycle, use_ngram_draft=True, num_draft_tokens=4)
    rounds = run(generator, make_job("abcde" * 4, 20))
    assert [len(streaming_results([results])) for results in rounds] == [5, 5, 5, 5]
    last = streaming_results(rounds)[-1]
    assert last["full_completion"] == "abcde" * 4
    assert (last["new_tokens"], last["eos_reason"]) == (20, "max_new_tokens")
    assert (last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (16, 0)
    assert forward_passes(generator) == [("prefill", 1, 19), *[("decode", 1, 5)] * 4]


def drafted(tokenizer: Tokenizer, guesses: Script) -> Generator:
    model, cache = ScriptedModel(), ScriptedCache()
    return Generator(
        model,
        cache,
        tokenizer,
        draft_model=ScriptedModel(guesses),
        draft_cache=ScriptedCache(),
        num_draft_tokens=4,
    )


def test_g13_a_perfect_draft_model(tokenizer: Tokenizer) -> None:
    """The reference stopped at 8 of 12 tokens. The draft model reads what it has missed in its first pass."""
    engine = drafted(tokenizer, alphabet)
    rounds = run(engine, make_job([2 + i % 26 for i in range(60)], 12))
    assert [len(streaming_results([results])) for results in rounds] == [5, 5, 2]
    assert forward_passes(engine) == [
        ("prefill", 1, 59),
        ("decode", 1, 5),
        ("decode", 1, 5),
        ("decode", 1, 2),
    ]
    draft = list(engine.draft_model.runners[0].log)
    assert draft[0] == ("prefill", 1, 59)
    assert [kind for kind, _, _ in draft].count("decode") == 4 + 4 + 1
    last = streaming_results(rounds)[-1]
    assert (last["new_tokens"], last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (12, 9, 0)
    assert last["full_completion"] == "ijklmnopqrst"


def test_g13_a_draft_model_that_is_always_wrong(tokenizer: Tokenizer) -> None:
    """The reference stopped at 4 of 8 tokens. After a rejected draft of four the draft length is 1, then 0."""
    engine = drafted(tokenizer, lambda prefix: [ID["!"]])
    rounds = run(engine, make_job("abc", 8))
    assert [len(streaming_results([results])) for results in rounds] == [1] * 8
    assert [tokens for kind, _, tokens in forward_passes(engine) if kind == "decode"] == [
        5,
        2,
        2,
        1,
        1,
        2,
        1,
        1,
    ]
    last = streaming_results(rounds)[-1]
    assert (last["full_completion"], last["new_tokens"]) == ("defghijk", 8)
    assert (last["accepted_draft_tokens"], last["rejected_draft_tokens"]) == (0, 7)


@pytest.mark.parametrize("paged", [True, False])
def test_g14_a_short_continuation_costs_what_is_new(tokenizer: Tokenizer, paged: bool) -> None:
    generator = make_generator(tokenizer, paged=paged)
    first = [2 + i % 26 for i in range(100)]
    ids = [int(n) for result in streaming_results(run(generator, make_job(first, 3))) for n in result["token_ids"][0]]
    rounds = run(generator, make_job([*first, *ids, *[ID["z"]] * 10], 2))
    prefill = [entry for entry in forward_passes(generator) if entry[0] == "prefill"]
    assert prefill == [("prefill", 1, 99), ("prefill", 1, 10)]
    last = streaming_results(rounds)[-1]
    assert (last["cached_tokens"], last["cached_pages"]) == (102, 0)


def test_g14_unpaged_jobs_run_one_after_the_other(tokenizer: Tokenizer) -> None:
    generator = make_generator(tokenizer, paged=False)
    rounds = run(generator, make_job("abc", 3), make_job("xyz", 3))
    texts = [(result["serial"], result["text"]) for result in streaming_results(rounds)]
    assert texts == [(0, "d"), (0, "e"), (0, "f"), (1, "a"), (1, "b"), (1, "c")]
    assert [len(streaming_results([results])) for results in rounds] == [1] * 6


def test_g14_an_unpaged_pair_is_refused(tokenizer: Tokenizer) -> None:
    """The reference let the second job wait for ever."""
    settings = Settings.greedy()
    settings.cfg_scale = 1.5
    with pytest.raises(InputError, match=r"batch size of 2.*not with paged=False"):
        make_generator(tokenizer, paged=False).enqueue(Job([ids("abc"), ids("xyz")], 3, gen_settings=settings))


def test_g15_a_character_in_four_tokens(byte_tokenizer: Tokenizer) -> None:
    generator = make_generator(byte_tokenizer, scripted(4, 5, 6, 7, 2))
    results = streaming_results(run(generator, make_job([2], 5)))
    assert [result.get("text") for result in results] == [None, None, None, EMOJI, "a"]
    assert [set(result) for result in results[:3]] == [{"job", "stage", "eos", "serial"}] * 3
    assert results[3]["token_ids"].tolist() == [[4, 5, 6, 7]]
    assert results[-1]["full_completion"] == EMOJI + "a"


def test_g15_the_limit_inside_a_character(byte_tokenizer: Tokenizer) -> None:
    """The incomplete character becomes one U+FFFD, as in UTF-8 decoders; the reference gave one per two bytes."""
    generator = make_generator(byte_tokenizer, scripted(4, 5, 6, 7))
    results = streaming_results(run(generator, make_job([2], 2)))
    assert [result.get("text") for result in results] == [None, "\ufffd"]
    assert results[-1]["token_ids"].tolist() == [[4, 5]]
    assert results[-1]["eos_reason"] == "max_new_tokens"
    assert "held" not in results[-1]


def test_g15_a_stop_token_inside_a_character(byte_tokenizer: Tokenizer) -> None:
    """Held text is emitted; only the stop token is not."""
    generator = make_generator(byte_tokenizer, scripted(4, 5, 0))
    last = streaming_results(run(generator, make_job([2], 9, stop_conditions=[0])))[-1]
    assert (last["text"], last["token_ids"].tolist()) == ("\ufffd", [[4, 5]])
    assert (last["eos_reason"], last["full_completion"], last["new_tokens"]) == ("stop_token", "\ufffd", 3)
    assert set(last["held"]) == {"token_ids"}
    assert last["held"]["token_ids"].tolist() == [[0]]


def ranking(*best: str) -> Script:
    """A script with these pieces as candidates, best first."""
    return lambda _: [ID[piece] for piece in best]


@pytest.mark.parametrize(
    ("preferred", "text"), [("cdogat", "cat"), ("dogcat", "do"), ("zd", "do")], ids=["cat", "dog", "dislike"]
)
def test_g16_a_select_filter_ends_with_its_option(tokenizer: Tokenizer, preferred: str, text: str) -> None:
    select = SelectFilter(None, tokenizer, ["dog", "do", "cat"])
    results = streaming_results(
        run(make_generator(tokenizer, ranking(*preferred)), make_job("abc", 9, filters=[select]))
    )
    assert [result["text"] for result in results] == list(text)
    assert (results[-1]["eos_reason"], results[-1]["full_completion"]) == ("end_filter", text)
    assert "held" not in results[-1]


def test_g16_a_prefix_filter(tokenizer: Tokenizer) -> None:
    prefix = PrefixFilter(None, tokenizer, "Hello w")
    prefix.begin("")
    assert prefix.next() == ({ID["Hello"], ID["Hel"], ID["He"]}, set())
    script = ranking("z", "He", "Hel", "Hello", " world")
    results = streaming_results(run(make_generator(tokenizer, script), make_job("abc", 7, filters=[prefix])))
    assert results[-1]["full_completion"] == "Hello worldzz"
    assert results[0]["token_ids"].tolist() == [[ID["He"]]]


def chunks(
    tokenizer: Tokenizer, script: Script, prompt: list[int], **options: Any
) -> tuple[list[tuple[str | None, bool]], list[dict[str, Any]]]:
    """Text and eos of each result, and the results."""
    results = streaming_results(run(make_generator(tokenizer, script), make_job(prompt, 4, **options)))
    return [(result.get("text"), result["eos"]) for result in results], results


def test_g17_a_script_that_ends(tokenizer: Tokenizer) -> None:
    """The traces of the streaming generator as results of a job: the last one has neither text nor ids."""
    text, results = chunks(tokenizer, scripted(5, 6, 7, 0), [2], stop_conditions=[0])
    assert text == [("d", False), ("e", False), ("f", False), (None, True)]
    assert "token_ids" not in results[-1]


def test_g17_held_text_is_shown_before_the_end(tokenizer: Tokenizer) -> None:
    """The ids of held text come with it."""
    text, results = chunks(tokenizer, scripted(5, 6, 7, 0), [2], stop_conditions=[0, "fz"])
    assert text == [("d", False), ("e", False), (None, False), ("f", True)]
    assert results[-1]["token_ids"].tolist() == [[7]]


def test_g17_healing(tokenizer: Tokenizer) -> None:
    """The id of the healed token is in the result as well."""
    script = {(2, 3): [5, 32], (2, 3, 32): [35], (2, 3, 32, 35): [0]}
    prompt = [ID["a"], ID["b"], ID["He"]]
    text, results = chunks(
        tokenizer, lambda prefix: script[tuple(prefix)], prompt, token_healing=True, stop_conditions=[0]
    )
    assert text == [("llo", False), (" world", False), (None, True)]
    assert [result["token_ids"].tolist() for result in results[:2]] == [[[32]], [[35]]]


def test_every_trace_has_a_test() -> None:
    """A test function whose name has its number exists for each of G1 to G18."""
    files = ["test_engine.py", Path(__file__).name]
    written = "".join((Path(__file__).parent / name).read_text() for name in files)
    assert [n for n in range(1, 19) if f"def test_g{n}_" not in written] == []
