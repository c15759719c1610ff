"""The batched sampler: no row affects another, whatever they ask for and even if one fails."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from exlm.errors import BadLogits, InputError
from exlm.sampling import Sampler, SamplerOutput, SamplerState, SamplingRequest, Settings
from exlm.sampling.rng import uniform
from tests.sampling import oracle
from tests.sampling.random_inputs import (
    EDIT_VALUES,
    STEP_VALUES,
    WIDTHS,
    ToyTokenizer,
    neutral,
    random_logits,
    random_settings,
)


def row(settings: Settings, seed: int = 0, text: list[int] | None = None, **extra: Any) -> SamplingRequest:
    return SamplingRequest(settings, SamplerState(settings, seed, text or []), **extra)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_does_not_depend_on_its_batch(width: int) -> None:
    """Token, probability and top tokens are those of the row alone, and what the oracle gives them."""
    rng = Random(width)
    sampler = Sampler()
    for _ in range(10):
        x = random_logits(rng, 12, width)
        before = x.clone()
        asked = [random_settings(rng, STEP_VALUES, EDIT_VALUES) for _ in range(12)]
        texts = [[rng.randrange(20) for _ in range(rng.randrange(30))] for _ in range(12)]

        def rows(asked: list[Settings] = asked, texts: list[list[int]] = texts) -> list[SamplingRequest]:
            return [row(each, seed, texts[seed], num_top_tokens=4) for seed, each in enumerate(asked)]

        picks = sampler.sample_batch(x, rows())
        assert torch.equal(x, before)
        for place, settings in enumerate(asked):
            alone = sampler.sample_batch(x[place : place + 1], [rows()[place]])
            assert alone.tokens == picks.tokens[place : place + 1]
            assert alone.top_tokens is not None
            assert picks.top_tokens is not None
            assert alone.top_tokens[0].tolist() == picks.top_tokens[place].tolist()
            breakers = settings.dry_sequence_breakers or ()
            edited = oracle.edit_logits(x[place].tolist(), settings, texts[place], breakers=breakers)
            p = oracle.distribution(edited, settings, ignored=settings.xtc_ignore_tokens or ())
            assert p.get(picks.tokens[place], 0.0) == pytest.approx(float(picks.probs[place]), abs=1e-3)


@settings_of_hypothesis(max_examples=30)
@given(st.randoms(use_true_random=True), st.permutations(range(4)))
def test_the_order_of_a_batch_does_not_matter(rng: Random, order: list[int]) -> None:
    x = random_logits(rng, 4, rng.choice(WIDTHS))
    asked = [random_settings(rng, STEP_VALUES, EDIT_VALUES) for _ in range(4)]
    sampler = Sampler()
    straight = sampler.sample_batch(x, [row(asked[i], i) for i in range(4)]).tokens
    mixed = sampler.sample_batch(x[order], [row(asked[i], i) for i in order]).tokens
    assert mixed == [straight[i] for i in order]


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    x = torch.randn(1, 500).expand(64, -1)
    settings = neutral(top_k=0)
    sampler = Sampler()
    batch = sampler.sample_batch(x, [row(settings, seed) for seed in range(64)]).tokens
    assert len(set(batch)) > 30
    for seed in (0, 17, 63):
        state = SamplerState(settings, seed)
        sums = x[0].double().softmax(0).cumsum(0)
        assert sampler.sample_batch(x[:1], [SamplingRequest(settings, state)]).tokens == [batch[seed]]
        assert batch[seed] == int((sums <= uniform(seed, 0)).sum())
        assert sampler.sample_batch(x[:1], [SamplingRequest(settings, state)]).tokens == [batch[seed]]
        state.accept(5)
        wanted = int((sums <= uniform(seed, 1)).sum())
        assert sampler.sample_batch(x[:1], [SamplingRequest(settings, state)]).tokens == [wanted]


def test_after_a_rewind_numbers_are_fresh() -> None:
    x = torch.zeros(1, 1000)
    settings = neutral()
    state = SamplerState(settings, 3, [1, 2])
    sampler = Sampler()
    first = sampler.sample_batch(x, [SamplingRequest(settings, state)]).tokens
    state.accept(first[0])
    sampler.sample_batch(x, [SamplingRequest(settings, state)])
    state.truncate(2)
    second = sampler.sample_batch(x, [SamplingRequest(settings, state)]).tokens
    assert second != first
    state.truncate(2)
    assert sampler.sample_batch(x, [SamplingRequest(settings, state)]).tokens not in (first, second)
    other = SamplerState(settings, 3, [1, 2])
    other.truncate(2)
    assert sampler.sample_batch(x, [SamplingRequest(settings, other)]).tokens == first


def test_shared_settings_share_no_state() -> None:
    x = torch.randn(1, 50).expand(2, -1).contiguous()
    settings = neutral(mirostat=True, mirostat_tau=3.0, dry_multiplier=1.0)
    sampler = Sampler()
    alone, other = SamplerState(settings, 1, [1, 2]), SamplerState(settings, 2, [3, 4, 3, 4, 3])
    fresh = SamplerState(settings, 1, [1, 2])
    for _ in range(5):
        pair = sampler.sample_batch(x, [SamplingRequest(settings, alone), SamplingRequest(settings, other)]).tokens
        single = sampler.sample_batch(x[:1], [SamplingRequest(settings, fresh)]).tokens
        assert single == pair[:1]
        alone.accept(pair[0])
        other.accept(pair[1])
        fresh.accept(pair[0])
    assert alone.mirostat_mu == pytest.approx(fresh.mirostat_mu)
    assert alone.mirostat_mu != other.mirostat_mu
    assert settings.mirostat_mu is None


def test_mirostat_follows_its_target_and_is_rewound() -> None:
    p = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]])
    settings = neutral(mirostat=True, mirostat_tau=1.5, mirostat_eta=0.1)
    seed = next(seed for seed in range(99) if uniform(seed, 1) < 0.6 and uniform(seed, 2) > 0.65)
    state = SamplerState(settings, seed, [1])
    sampler = Sampler()
    assert state.mirostat_mu is None
    assert sampler.sample_batch(p.log(), [SamplingRequest(settings, state)]).tokens == [0]
    assert state.mirostat_mu == pytest.approx(3.0822, abs=1e-4)
    state.accept(0)
    sampler.sample_batch(p.log(), [SamplingRequest(settings, state)])
    assert state.mirostat_mu == pytest.approx(3.0822 + 0.1 * (1.5 + math.log2(0.375)), abs=1e-4)
    state.truncate(1)
    assert state.mirostat_mu is None
    greedy = Settings.greedy(mirostat=True)
    state = SamplerState(greedy, 0)
    sampler.sample_batch(p.log(), [SamplingRequest(greedy, state)])
    assert state.mirostat_mu == pytest.approx(3.15)


ADAPTIVE = [{"top_k": 10}, {"min_p": 0.05}, {"top_p": 0.9, "temperature": 1.5}, {}, {"top_k": 4, "skew": 0.5}]


def test_adaptive_p_follows_the_mean_of_the_original_probabilities() -> None:
    """Alone and in a batch, over many tokens and two rewinds: the oracle's distribution each time."""
    rng, sampler = Random(5), Sampler()
    asked = [neutral(adaptive_target=0.3, adaptive_decay=0.8, **changes) for changes in ADAPTIVE]
    asked += [neutral(top_k=10), neutral(mirostat=True)]
    together, alone = ([SamplerState(each, seed) for seed, each in enumerate(asked)] for _ in range(2))
    means = [[settings.adaptive_target] for settings in asked]
    for step in range(40):
        if step in (15, 30):
            for states in (together, alone):
                for state in states:
                    state.truncate(step // 2)
            means = [known[: step // 2 + 1] for known in means]
        x = random_logits(rng, len(asked), 70)
        requests = [
            SamplingRequest(each, state, num_top_tokens=70) for each, state in zip(asked, together, strict=True)
        ]
        found = sampler.sample_batch(x, requests)
        assert found.top_tokens is not None
        assert found.top_probs is not None
        for i, settings in enumerate(asked):
            single = sampler.sample_batch(x[i : i + 1], [SamplingRequest(settings, alone[i])])
            assert single.tokens == [found.tokens[i]]
            if settings.adaptive_target >= 0:
                assert together[i].step_state("adaptive_p").latest() == alone[i].step_state("adaptive_p").latest()
                wanted = oracle.distribution(x[i].tolist(), settings, mean=means[i][-1])
                top = dict(zip(found.top_tokens[i].tolist(), found.top_probs[i].tolist(), strict=True))
                assert {t: p for t, p in top.items() if p > 0} == pytest.approx(wanted, abs=1e-6)
                off = settings.clone()
                off.adaptive_target = -1.0
                original = oracle.distribution(x[i].tolist(), off)[found.tokens[i]]
                means[i].append(oracle.adaptive_mean(means[i][-1], settings.adaptive_decay, original))
                assert together[i].step_state("adaptive_p").latest() == pytest.approx(means[i][-1], abs=1e-6)
            together[i].accept(found.tokens[i])
            alone[i].accept(found.tokens[i])
    assert all(state.step_state("adaptive_p").latest() is None for state in together[len(ADAPTIVE) :])


def test_adaptive_p_counts_a_greedy_token_as_certain() -> None:
    settings = Settings.greedy(adaptive_target=0.5, adaptive_decay=0.9)
    state = SamplerState(settings, 0)
    assert Sampler().sample_batch(torch.tensor([[1.0, 3.0]]), [SamplingRequest(settings, state)]).tokens == [1]
    assert state.step_state("adaptive_p").latest() == pytest.approx(0.55)


def test_adaptive_p_holds_its_target_over_time() -> None:
    """A model that is nearly sure all the time is pulled to the target: that is what the step is for."""
    settings = neutral(adaptive_target=0.4, adaptive_decay=0.9)
    state, sampler = SamplerState(settings, 3), Sampler()
    p = torch.tensor([[0.62, 0.3, 0.08]])
    chosen = []
    for _ in range(400):
        token = sampler.sample_batch(p.log(), [SamplingRequest(settings, state)]).tokens[0]
        state.accept(token)
        chosen.append(float(p[0, token]))
    assert sum(chosen) / len(chosen) == pytest.approx(0.4, abs=0.04)


def test_greedy_takes_the_first_of_equal_logits() -> None:
    x = torch.zeros(3, 300)
    x[1, 200:] = 1.0
    x[2, 299] = 1.0
    picks = Sampler().sample_batch(x, [row(Settings.greedy(), num_top_tokens=2) for _ in range(3)])
    assert picks.tokens == [0, 200, 299]
    assert picks.probs.tolist() == [1.0] * 3
    assert picks.top_tokens is not None
    assert picks.top_probs is not None
    assert picks.top_tokens.tolist() == [[0, 1], [200, 0], [299, 0]]
    assert picks.top_probs.tolist() == [[1.0, 0.0]] * 3


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 1}, {}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5}, {"typical": 0.5}, {"top_n_sigma": 1.0}],
)
def test_a_row_with_bad_logits_fails_alone(changes: dict[str, Any]) -> None:
    x = torch.randn(6, 300)
    x[1] = -torch.inf
    x[2, 7] = torch.nan
    x[3, 7] = torch.inf
    settings = neutral(**changes)
    sampler = Sampler()
    picks = sampler.sample_batch(x, [row(settings, seed, num_top_tokens=3) for seed in range(6)])
    tokens = picks.tokens
    assert tokens[1:4] == [-1, -2, -3]
    for seed in (0, 4, 5):
        alone = sampler.sample_batch(x[seed : seed + 1], [row(settings, seed, num_top_tokens=3)])
        assert alone.tokens == [tokens[seed]]
    errors = [SamplerOutput.error(token) for token in tokens]
    assert [error is None for error in errors] == [True, False, False, False, True, True]
    assert isinstance(errors[1], BadLogits)
    assert "No token is left" in str(errors[1])
    assert "NaN" in str(errors[2])
    assert "infinite" in str(errors[3])


def test_all_tokens_excluded_by_a_bias_or_by_allowed_tokens() -> None:
    settings = Settings.greedy(token_bias=torch.full((32,), -torch.inf))
    x = torch.randn(3, 32)
    rows = [row(settings), row(Settings.greedy(), allowed=[]), row(Settings.greedy(), allowed=[40])]
    assert Sampler().sample_batch(x, rows).tokens == [-1, -1, -1]


def test_blocked_tokens_are_a_last_resort() -> None:
    x = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    greedy = Settings.greedy()
    sampler = Sampler()
    assert sampler.sample_batch(x, [row(greedy, blocked=[0, 1, 99])]).tokens == [2]
    assert sampler.sample_batch(x, [row(greedy, blocked=[1], allowed=[1])]).tokens == [1]
    assert sampler.sample_batch(x, [row(neutral(), blocked=[1], allowed=[1])]).tokens == [1]


@pytest.mark.parametrize("kind", ["ids", "set", "tensor", "mask", "short mask", "bits"])
def test_allowed_tokens_in_every_form(kind: str) -> None:
    ids = [3, 40, 77]
    mask = torch.zeros(100, dtype=torch.bool)
    mask[ids] = True
    bits = torch.zeros(4, dtype=torch.int64)
    for token in ids:
        bits[token // 32] |= 1 << (token % 32)
    allowed: Any = {
        "ids": ids[::-1],
        "set": set(ids),
        "tensor": torch.tensor(ids),
        "mask": mask,
        "short mask": mask[:80],
        "bits": bits.to(torch.int32),
    }[kind]
    x = torch.randn(400, 100)
    picks = Sampler().sample_batch(x, [row(neutral(), seed, allowed=allowed) for seed in range(400)])
    assert set(picks.tokens) == set(ids)


def test_packed_bits_reach_the_sign_bit() -> None:
    words = torch.tensor([-(2**31), 0, 0], dtype=torch.int32)
    x = torch.randn(1, 70)
    assert Sampler().sample_batch(x, [row(neutral(), allowed=words)]).tokens == [31]


def test_top_n_sigma_counts_neither_excluded_nor_blocked_tokens() -> None:
    """The deviation of 6, 5, 4, 0 is 2.28, that of 6, 5, 4 is 0.82: a blocked token must not widen it."""
    x = torch.tensor([[6.0, 5.0, 4.0, 0.0]]).repeat(400, 1)
    settings = neutral(top_n_sigma=1.3)
    for extra in ({"blocked": [3]}, {"allowed": [0, 1, 2]}):
        picks = Sampler().sample_batch(x, [row(settings, seed, **extra) for seed in range(400)])
        assert set(picks.tokens) == {0, 1}
    assert set(Sampler().sample_batch(x, [row(settings, seed) for seed in range(400)]).tokens) == {0, 1, 2}
    only_blocked = row(settings, blocked=[0, 1, 2, 3], allowed=[2])
    assert Sampler().sample_batch(x[:1], [only_blocked]).tokens == [2]
    wide = Sampler(vocab_size=4)  # padding is no token
    padded = torch.nn.functional.pad(x, (0, 60), value=-50.0)
    assert set(wide.sample_batch(padded, [row(settings, seed) for seed in range(400)]).tokens) == {0, 1, 2}


def test_top_n_sigma_changes_nothing_for_greedy_rows() -> None:
    settings = Settings.greedy(top_n_sigma=0.5)
    assert settings.compiled().greedy_only
    assert Sampler().sample_batch(torch.tensor([[1.0, 3.0, 2.0]]), [row(settings)]).tokens == [1]


def test_padding_is_never_chosen() -> None:
    x = torch.zeros(200, 100)
    x[:, 60:] = 50.0
    for settings in (neutral(), Settings.greedy(), neutral(top_k=5), neutral(min_p=0.5), neutral(top_p=0.5)):
        picks = Sampler(vocab_size=60).sample_batch(x, [row(settings, seed) for seed in range(200)])
        assert max(picks.tokens) < 60
    assert Sampler(ToyTokenizer()).vocabulary.width(100) == 15
    assert Sampler().vocabulary.width(100) == 100


def test_bias_is_added_and_must_be_long_enough() -> None:
    x = torch.zeros(2, 40)
    bias = torch.zeros(64)
    bias[7] = 3.0
    other = torch.zeros(40)
    other[9] = 3.0
    sampler = Sampler()
    greedy = [Settings.greedy(token_bias=bias), Settings.greedy(token_bias=other)]
    assert sampler.sample_batch(x, [row(greedy[0]), row(greedy[0])]).tokens == [7, 7]
    assert sampler.sample_batch(x, [row(greedy[0]), row(greedy[1])]).tokens == [7, 9]
    assert sampler.sample_batch(x, [row(greedy[1]), row(Settings.greedy())]).tokens == [9, 0]
    with pytest.raises(InputError, match="token_bias has 39 entries"):
        sampler.sample_batch(x[:1], [row(Settings.greedy(token_bias=torch.zeros(39)))])


def test_guidance_mixes_pairs() -> None:
    x = torch.randn(5, 30)
    scale = 1.7
    settings = neutral(cfg_scale=scale)
    rows = [row(neutral(), 0, num_top_tokens=30), row(settings, 1, uses_cfg=True, num_top_tokens=30)]
    rows.append(row(settings, 2, uses_cfg=True, num_top_tokens=30))
    picks = Sampler().sample_batch(x, rows)
    mixed = oracle.apply_cfg(x[1].tolist(), x[2].tolist(), scale)
    wanted = oracle.distribution(mixed, settings)
    assert picks.top_tokens is not None
    assert picks.top_probs is not None
    found = dict(zip(picks.top_tokens[1].tolist(), picks.top_probs[1].tolist(), strict=True))
    assert found == pytest.approx(wanted, abs=1e-5)
    one = Sampler().sample_batch(x[1:3], [row(neutral(cfg_scale=1.0), 1, uses_cfg=True)])
    assert one.tokens == Sampler().sample_batch(x[1:2], [row(neutral(), 1)]).tokens
    with pytest.raises(InputError, match="cfg_scale"):
        Sampler().sample_batch(x[:2], [row(neutral(), uses_cfg=True)])


def test_guidance_keeps_what_is_excluded_excluded() -> None:
    x = torch.zeros(2, 4)
    x[:, 3] = -torch.inf
    x[0, 1] = 5.0
    settings = Settings.greedy(cfg_scale=2.0)
    assert Sampler().sample_batch(x, [row(settings, uses_cfg=True)]).tokens == [1]


@pytest.mark.parametrize("shape", [(2, 8), (1, 1, 8), (8,)])
def test_logits_must_fit_the_rows(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="logits must be floating point of shape"):
        Sampler().sample_batch(torch.zeros(shape), [row(neutral())])
    with pytest.raises(InputError, match="int64"):
        Sampler().sample_batch(torch.zeros(1, 8, dtype=torch.int64), [row(neutral())])


def test_an_empty_batch_and_half_precision() -> None:
    picks = Sampler().sample_batch(torch.zeros(0, 8), [])
    assert picks.tokens == []
    x = torch.randn(2, 100).bfloat16()
    found = Sampler().sample_batch(x, [row(neutral(top_k=5), seed) for seed in range(2)])
    assert found.tokens == Sampler().sample_batch(x.float(), [row(neutral(top_k=5), seed) for seed in range(2)]).tokens


def test_top_tokens_are_final_probabilities_and_padded() -> None:
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    picks = Sampler().sample_batch(p, [row(neutral(top_p=0.65), num_top_tokens=4)])
    assert picks.top_tokens is not None
    assert picks.top_probs is not None
    assert picks.top_tokens.tolist() == [[3, 2, 0, 1]]
    assert picks.top_probs.tolist()[0] == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])
    more = Sampler().sample_batch(p, [row(neutral(), num_top_tokens=9)])
    assert more.top_tokens is not None
    assert more.top_tokens.tolist() == [[3, 2, 1, 0]]


def test_default_breakers_and_xtc_exempt_tokens_come_from_the_tokenizer() -> None:
    words = ToyTokenizer("abc.!\n\txyz")
    sampler = Sampler(words)
    assert sampler.vocabulary.dry_breaker_ids == {0, 1, 5, 6, 7, 8}
    assert sampler.vocabulary.xtc_exempt_ids == {0, 1, 7}
    assert Sampler().vocabulary.dry_breaker_ids == frozenset()
    x = torch.zeros(1, 12)
    x[0, [7, 2, 3]] = 10.0
    settings = neutral(xtc_probability=1.0, xtc_threshold=0.1)
    picks = sampler.sample_batch(x, [row(settings, num_top_tokens=2)])
    assert picks.top_tokens is not None
    assert picks.top_tokens.tolist() == [[3, 7]]


def test_rows_with_different_xtc_exempt_tokens() -> None:
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(3, -1).contiguous()
    sets = (frozenset({0}), frozenset({1, 2}), None)
    settings = [
        neutral(xtc_probability=1.0 if ignored is not None else 0.0, xtc_threshold=0.15, xtc_ignore_tokens=ignored)
        for ignored in sets
    ]
    settings[2].min_temp, settings[2].max_temp = 0.9, 1.0
    picks = Sampler().sample_batch(x, [row(each, num_top_tokens=4) for each in settings])
    assert picks.top_probs is not None
    assert picks.top_probs[0].tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7, 0.0])
    assert picks.top_probs[1].tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
