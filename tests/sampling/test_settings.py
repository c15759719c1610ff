"""Settings: the old library's fields and defaults, checked, shareable."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from exlm import Sampler
from exlm.errors import InputError
from exlm.sampling import Settings
from tests.sampling.random_inputs import ToyTokenizer, neutral

ORDER = [
    "token_repetition_penalty",
    "token_repetition_range",
    "token_repetition_decay",
    "token_frequency_penalty",
    "token_presence_penalty",
    "temperature",
    "smoothing_factor",
    "min_temp",
    "max_temp",
    "temp_exponent",
    "top_k",
    "top_p",
    "top_a",
    "min_p",
    "tfs",
    "typical",
    "skew",
    "temperature_last",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "mirostat_mu",
    "token_bias",
    "cfg_scale",
    "post_sampling_hooks",
    "dry_allowed_length",
    "dry_base",
    "dry_multiplier",
    "dry_sequence_breakers",
    "dry_range",
    "dry_max_ngram",
    "ngram_trie",
    "ngram_index",
    "ngram_history",
    "xtc_probability",
    "xtc_threshold",
    "xtc_ignore_tokens",
]


NOT_IN_EXLLAMAV2 = ["top_n_sigma", "adaptive_target", "adaptive_decay"]


def test_fields_have_the_order_and_defaults_of_exllamav2() -> None:
    assert [item.name for item in dataclasses.fields(Settings) if item.init] == ORDER + NOT_IN_EXLLAMAV2
    found = Settings()
    assert (found.token_repetition_penalty, found.temperature, found.top_k, found.top_p) == (
        1.025,
        0.8,
        50,
        0.8,
    )
    assert (found.token_repetition_range, found.mirostat_tau, found.mirostat_eta) == (-1, 1.5, 0.1)
    assert (found.dry_allowed_length, found.dry_base, found.dry_max_ngram) == (2, 1.75, 20)
    assert (found.dry_multiplier, found.xtc_probability, found.xtc_threshold) == (0.0, 0.0, 0.1)
    assert found.mirostat_mu is None
    assert Settings(1.1, 64).token_repetition_range == 64
    assert Sampler.Settings is Settings


def test_greedy() -> None:
    found = Settings.greedy(cfg_scale=1.5)
    assert (found.temperature, found.token_repetition_penalty) == (1.0, 1.0)
    assert (found.top_p, found.top_k) == (0.0, 1)
    assert found.cfg_scale == 1.5
    assert found.compiled().greedy


def test_clones_share_nothing_that_changes() -> None:
    first = Settings(temperature=0.5, post_sampling_hooks=[print], mirostat_mu=[1.0])
    first.disallow_tokens(ToyTokenizer(), [3])
    second = first.clone()
    second.temperature = 1.5
    second.post_sampling_hooks.clear()
    second.disallow_tokens(ToyTokenizer(), [4])
    assert second.mirostat_mu is not None
    second.mirostat_mu[0] = 2.0
    assert (first.temperature, first.post_sampling_hooks, first.mirostat_mu) == (0.5, [print], [1.0])
    assert first.token_bias is not None
    assert float(first.token_bias[4]) == 0.0
    assert first.compiled() is not second.compiled()


def test_hooks_may_be_none() -> None:
    found = Settings()
    found.post_sampling_hooks = None  # type: ignore[assignment]
    found.check()
    assert found.clone().post_sampling_hooks == []


def test_greedy_clone_keeps_penalties_and_drops_bias_and_guidance() -> None:
    first = Settings(
        token_repetition_penalty=1.2, dry_base=3.0, dry_allowed_length=4, dry_multiplier=0.5, cfg_scale=2.0
    )
    first.disallow_tokens(ToyTokenizer(), [3])
    clone = first.greedy_clone()
    assert (clone.top_k, clone.top_p, clone.temperature) == (1, 0.0, 0.8)
    assert (clone.dry_base, clone.dry_allowed_length, clone.token_repetition_penalty) == (3.0, 4, 1.2)
    assert clone.token_bias is None
    assert clone.cfg_scale is None


class ToyTokenizerWithConfig(ToyTokenizer):
    """A tokenizer with fewer pieces than its model has ids."""

    class config:
        vocab_size = 70


def test_ids_that_only_the_model_knows_can_be_named() -> None:
    found = Settings()
    found.allow_tokens(ToyTokenizerWithConfig(), [3, *range(60, 70)])
    assert found.token_bias is not None
    assert [n for n, bias in enumerate(found.token_bias.tolist()) if bias == 0] == [3, *range(60, 70)]
    with pytest.raises(InputError, match="the vocabulary has ids 0 to 69, found 70"):
        found.disallow_tokens(ToyTokenizerWithConfig(), [70])
    found.token_bias = torch.zeros(ToyTokenizerWithConfig().get_vocab_size())
    found.disallow_tokens(ToyTokenizerWithConfig(), [69])
    assert found.token_bias.tolist() == [0.0] * 69 + [-torch.inf]


def test_misspelt_fields_are_errors_with_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'temperature'"):
        Settings().temprature = 1.0
    with pytest.raises(TypeError):
        Settings(temprature=1.0)  # type: ignore[call-arg]
    found = Settings()
    found.filters = []
    found.filter_prefer_eos = True


def test_unknown_attributes_of_old_programs_are_kept_with_a_warning() -> None:
    found = Settings()
    for name in ("stop_sequences", "stop_tokens", "max_new_tokens", "token_repetition_penalty_max"):
        with pytest.warns(UserWarning, match=f"no field '{name}': it is kept, and nothing reads it"):
            setattr(found, name, ["###"])
        assert getattr(found.clone(), name) == ["###"]
        setattr(found, name, [])  # said once
    found.check()

    @dataclasses.dataclass(eq=False)
    class More(Settings):
        mine: int = 3

    more = More(temperature=0.5)
    more.mine = 4
    assert (more.clone().mine, more.temperature) == (4, 0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [
        {"post_sampling_hooks": print},
        {"post_sampling_hooks": [None]},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "warm"},
        {"temperature": None},
        {"temperature": 10**400},
        {"top_k": -(10**400)},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": math.nan},
        {"token_repetition_penalty": 0.0},
        {"token_repetition_penalty": -1.0},
        {"token_repetition_range": -2},
        {"token_repetition_decay": -1},
        {"smoothing_factor": -0.1},
        {"min_temp": -1.0},
        {"top_a": -1.0},
        {"mirostat": True, "mirostat_tau": 0.0},
        {"dry_base": 0.0},
        {"dry_multiplier": -1.0},
        {"dry_max_ngram": 0},
        {"dry_range": -1},
        {"dry_sequence_breakers": "abc"},
        {"dry_sequence_breakers": {"."}},
        {"xtc_probability": 1.5},
        {"xtc_threshold": -0.1},
        {"xtc_ignore_tokens": 5},
        {"cfg_scale": math.nan},
        {"adaptive_target": 1.1},
        {"adaptive_decay": 1.0},
        {"adaptive_decay": -0.1},
        {"token_bias": [0.0]},
        {"token_bias": torch.zeros(2, 2)},
    ],
)
def test_invalid_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=list(wrong)[-1]):
        Settings(**wrong).check()


def test_biases_that_are_no_plain_numbers_are_refused_by_name() -> None:
    zeros = torch.zeros(2)
    for wrong in (zeros.to_sparse(), zeros.to("meta"), zeros.to(torch.complex64)):
        with pytest.raises(InputError, match="token_bias"):
            Settings(token_bias=wrong).check()


@pytest.mark.parametrize(
    "fine",
    [
        {"temperature": 0},
        {"temperature": -1.0},
        {"top_p": 7.0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 1.0},
        {"max_temp": -1.0},
        {"dry_range": 3},
        {"cfg_scale": -1.0},
        {"dry_sequence_breakers": [3, 4]},
    ],
)
def test_off_values_are_accepted(fine: dict[str, Any]) -> None:
    Settings(**fine).check()


def test_any_skew_compiles() -> None:
    """One below -709 was an OverflowError in the middle of a step, for the whole batch."""
    logits = torch.tensor([[[1.0, 3.0, 2.0]]])
    for skew, likeliest in ((-1e4, True), (-1e308, True), (1e4, False)):
        settings = neutral(skew=skew)
        token, *_ = Sampler.sample(logits, settings, torch.tensor([[0]]), 0.999, None)
        assert (int(token) == 1) is likeliest


def test_compiled_settings_follow_assignments_and_are_shared_by_equal_settings() -> None:
    first, second = neutral(top_p=0.5), neutral(top_p=0.5)
    assert first.compiled() is second.compiled()
    second.top_p = 0.6
    assert first.compiled() is not second.compiled()
    second.top_p = 0.5
    assert first.compiled() is second.compiled()
    second.temperature = math.nan
    with pytest.raises(InputError):
        second.compiled()


def test_temperature_last_without_truncation_is_ordinary_temperature() -> None:
    assert neutral(temperature=0.5, temperature_last=True).compiled() is not None
    assert not neutral(temperature=0.5, temperature_last=True).compiled().probs_steps
    assert neutral(temperature=0.0, temperature_last=True, top_p=0.5).compiled().greedy


def test_allowed_and_disallowed_tokens() -> None:
    words = ToyTokenizer()
    found = Settings()
    found.allow_tokens(words, [3, "c"])
    assert found.token_bias is not None
    assert len(found.token_bias) == 32
    assert found.token_bias.eq(0.0).nonzero().flatten().tolist() == [3, 4]
    found.allow_tokens(words, ["d"])
    assert found.token_bias.eq(0.0).nonzero().flatten().tolist() == [3, 4, 5]
    found.disallow_tokens(words, ["c"])
    assert found.token_bias.eq(0.0).nonzero().flatten().tolist() == [3, 5]
    other = Settings()
    other.disallow_tokens(words, [0])
    assert other.token_bias is not None
    assert other.token_bias.eq(-torch.inf).nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("call", ["allow_tokens", "disallow_tokens"])
@pytest.mark.parametrize("wrong", ["missing", None, 1.5, True, -1, 15, 10**9])
def test_unknown_tokens_are_errors(call: str, wrong: Any) -> None:
    found = Settings()
    with pytest.raises(ValueError, match=call):
        getattr(found, call)(ToyTokenizer(), [2, wrong])
    assert found.token_bias is None


def test_a_bias_too_short_for_the_vocabulary_is_refused() -> None:
    found = Settings(token_bias=torch.zeros(3))
    with pytest.raises(InputError, match="3 entries"):
        found.allow_tokens(ToyTokenizer(), [2])
