"""Post-sampling hooks see each token of their own job and may replace it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Filter, InputError, Job, PostSamplingResult, Settings
from exlm.generator.speculative import NgramDrafter
from tests.generator import scripted
from tests.generator.test_engine import TOKENIZER, alphabet, make_engine, make_job, run, streaming_results, tokens
from tests.generator.toy_model import VOCAB


def hooked(*hooks: Any) -> Settings:
    return Settings.greedy(post_sampling_hooks=list(hooks))


def replacing(old: str, new: str) -> Any:
    def hook(result: PostSamplingResult) -> None:
        if result.token == tokens(old)[0]:
            result.sampled_token = torch.tensor([[tokens(new)[0]]])

    return hook


@pytest.mark.parametrize("none", [None, [], ()])
def test_no_hooks(none: Any) -> None:
    settings = Settings.greedy(post_sampling_hooks=none)
    assert streaming_results(run(make_engine(), make_job("abc", 3, settings=settings)))[-1]["full_completion"] == "def"


def test_a_hook_sees_what_was_sampled() -> None:
    sampled: list[PostSamplingResult] = []
    results = streaming_results(
        run(make_engine(), make_job("abc", 3, settings=hooked(sampled.append), return_top_tokens=2))
    )
    assert [result["text"] for result in results] == ["d", "e", "f"]
    assert [entry.token for entry in sampled] == tokens("def")
    assert all(entry.sampled_token.shape == entry.sampled_prob.shape == (1, 1) for entry in sampled)
    assert all(float(entry.sampled_prob) == 1.0 for entry in sampled)
    assert all(entry.candidate_tokens.shape == entry.candidate_probs.shape == (1, 1, 2) for entry in sampled)
    assert all(entry.logits.shape == (1, 1, VOCAB) for entry in sampled)
    assert int(sampled[1].logits.argmax()) == tokens("e")[0]
    assert "token_probs" not in results[0]
    assert "logits" not in results[0]


def test_a_hook_replaces_a_token_and_the_text_goes_on_from_there() -> None:
    results = streaming_results(
        run(make_engine(), make_job("abc", 5, settings=hooked(replacing("e", "q"), replacing("q", "w"))))
    )
    assert results[-1]["full_completion"] == "dwxyz"
    assert results[1]["token_ids"].tolist() == [tokens("w")]


@pytest.mark.parametrize("drafting", [False, True])
def test_stops_bans_and_drafts_see_only_the_replaced_token(drafting: bool) -> None:
    options: dict[str, Any] = {"drafter": NgramDrafter(3), "num_draft_tokens": 3} if drafting else {}
    prompt = "defghdefgh" * 2 + "abc"
    settings = hooked(replacing("h", "m"))
    last = streaming_results(
        run(
            make_engine(**options),
            make_job(prompt, 9, settings=settings, stop_conditions=["h", "o"], return_probs=True),
        )
    )[-1]
    assert (last["full_completion"], last["eos_reason"]) == ("defgmn", "stop_string")
    banned = streaming_results(
        run(make_engine(alphabet, **options), make_job(prompt, 3, settings=settings, banned_strings=["h"]))
    )[-1]
    assert banned["full_completion"] == "def"


def test_a_pair_has_one_token() -> None:
    settings = hooked(replacing("k", "p"))
    settings.cfg_scale = 1.5
    pair = Job([TOKENIZER.encode("abcdefghij"), TOKENIZER.encode("xyzghij")], 3, gen_settings=settings)
    assert streaming_results(run(make_engine(), pair))[-1]["full_completion"] == "pqr"
    assert [sequence.ids[-3:] for sequence in pair.sequences] == [tokens("pqr")] * 2


def test_a_broken_hook_fails_its_own_job() -> None:
    def broken(result: PostSamplingResult) -> None:
        raise KeyError("oops")

    def sample_outside_vocabulary(result: PostSamplingResult) -> None:
        result.sampled_token = VOCAB

    jobs = [
        make_job("abc", 3),
        make_job("def", 3, settings=hooked(broken)),
        make_job("xyz", 3, settings=hooked(sample_outside_vocabulary)),
    ]
    last = {result["serial"]: result for result in streaming_results(run(make_engine(), *jobs)) if result["eos"]}
    assert last[0]["full_completion"] == "def"
    for serial, message in ((1, "hook failed: KeyError"), (2, f"hook chose {VOCAB}")):
        assert last[serial]["eos_reason"] == "error"
        assert isinstance(last[serial]["error"], InputError)
        assert message in str(last[serial]["error"])


class RecordingFilter(Filter):
    """A filter that records its tokens and allows all of them."""

    token_ids: list[int]

    def begin(self, prefix_str: Any) -> None:
        self.token_ids = []

    def feed(self, token: Any) -> None:
        self.token_ids.append(int(token))

    def next(self) -> Any:
        return set(range(2, VOCAB)), set()


@pytest.mark.parametrize(("skipped", "expected"), [("", "defg"), ("e", "dfg"), ("df", "eg")])
def test_a_hook_may_keep_a_token_from_the_filters(tmp_path: Path, skipped: str, expected: str) -> None:
    def hook(result: PostSamplingResult) -> None:
        result.feed_filters = result.token not in tokens(skipped)

    generator = scripted.make_generator(tokenizer := scripted.make_tokenizer(tmp_path))
    recording_filter = RecordingFilter(None, tokenizer)
    scripted.run(generator, scripted.make_job("abc", 4, settings=hooked(hook), filters=[recording_filter]))
    assert recording_filter.token_ids == tokens(expected)
