"""`Sampler.sample`: exllamav2's tokens for its own cases, shapes, and state kept in the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from exlm import Sampler, Settings
from exlm.errors import InputError
from exlm.legacy.sampler import gather_above_threshold, inverse_cdf, partial_quicksort
from tests.sampling import oracle
from tests.sampling.random_inputs import ToyTokenizer, neutral

ONE_TOKEN = torch.zeros(1, 1, dtype=torch.long)


def logits_of(p: list[float]) -> torch.Tensor:
    return torch.tensor([[p]]).log()


def call(logits: torch.Tensor, settings: Settings, random: float = 0.5, **extra: Any) -> Any:
    ids = extra.pop("sequence_ids", torch.zeros(len(logits), 1, dtype=torch.long))
    return Sampler.sample(logits, settings, ids, random, extra.pop("tokenizer", None), **extra)


def test_the_cases_of_exllamav2(fixtures_dir: Path) -> None:
    """Exact cases: exllamav2's token, probability and best candidates. Others: the standard definitions."""
    folder = fixtures_dir / "reference"
    cases = json.loads((folder / "sampler_cases.json").read_text())
    inputs = load_file(folder / "sampler_inputs.safetensors")
    exact = 0
    for case in cases["cases"]:
        settings = Settings(**(cases["base_settings"] | case["settings"]))
        x, ids = inputs[f"logits{case['logits']}"], inputs[f"seq{case['seq']}"]
        token, tops, top_p, p, ended = call(x, settings, case["random"], sequence_ids=ids, return_top_tokens=16)
        assert not ended
        if case["exact"]:
            exact += 1
            assert int(token) == case["token"], case
            assert float(p) == pytest.approx(case["prob"], abs=1e-4)
            assert tops[0, 0].tolist() == case["top_tokens"]
            assert top_p[0, 0].tolist() == pytest.approx(case["top_probs"], abs=1e-4)
            if case["mu"] is not None:
                assert settings.mirostat_mu == pytest.approx(case["mu"], abs=1e-3)
        else:
            edited = oracle.edit_logits(x[0, 0].tolist(), settings, ids[0].tolist())
            wanted = oracle.distribution(edited, settings)
            assert wanted[int(token)] == pytest.approx(float(p), abs=1e-5)
            assert top_p[0, 0].tolist() == pytest.approx(([*wanted.values(), *[0.0] * 16])[:16], abs=1e-5)
    assert exact >= 160


def test_any_tokenizer_is_accepted() -> None:
    class Slotted:
        __slots__ = ()

        def get_vocab_size(self) -> int:
            return 7

    x = torch.arange(10.0).view(1, 1, 10)
    assert call(x, Settings.greedy(), tokenizer=Slotted())[0].item() == 6
    assert call(x, Settings.greedy(), tokenizer=None)[0].item() == 9


def test_shapes_and_placeholders() -> None:
    x = torch.randn(3, 1, 40)
    token, tops, top_p, p, ended = call(x, neutral(), 0.3)
    assert token.shape == p.shape == (3, 1)
    assert token.dtype == torch.long
    assert tops.is_meta
    assert top_p.is_meta
    assert ended is False
    token, tops, top_p, p, _ = call(x, neutral(), 0.3, return_top_tokens=5)
    assert tops.shape == top_p.shape == (3, 1, 5)
    assert token.shape == (3, 1)


def test_the_first_row_uses_the_number_and_others_derive_theirs() -> None:
    x = torch.zeros(4, 1, 1000)
    tokens = call(x, neutral(), 0.25)[0].flatten().tolist()
    assert tokens[0] == call(x[:1], neutral(), 0.25)[0].item() == 249
    assert len(set(tokens)) == 4
    assert tokens == call(x, neutral(), 0.25)[0].flatten().tolist()
    assert call(x[:1], neutral(), 0.0)[0].item() == 0
    assert call(x[:1], neutral(), 0.999999)[0].item() == 999


def test_the_context_counts() -> None:
    x = torch.tensor([[[3.0, 2.9, 0.0]]])
    settings = Settings.greedy(token_repetition_penalty=1.5)
    assert call(x, settings)[0].item() == 1
    assert call(x, settings, sequence_ids=torch.tensor([[1, 0]]))[0].item() == 0
    assert call(x, Settings.greedy(), blocked_tokens=[0])[0].item() == 1


def test_mirostat_is_kept_in_the_settings() -> None:
    x = logits_of([0.5, 0.3, 0.1, 0.06, 0.04])
    settings = neutral(mirostat=True)
    assert call(x, settings, 0.1)[0].item() == 0
    assert settings.mirostat_mu == pytest.approx([3.0822], abs=1e-4)
    settings.mirostat_mu = [0.5]
    assert call(x, settings, 0.9)[3].item() == 1.0
    call(x.expand(2, -1, -1), settings, 0.1)
    assert settings.mirostat_mu is not None
    assert len(settings.mirostat_mu) == 2
    assert call(x, Settings.greedy(mirostat_mu=[2.0]), 0.1)[0].item() == 0


def test_steps_whose_state_the_settings_cannot_keep_are_refused() -> None:
    logits, ids = torch.zeros(1, 1, 4), torch.tensor([[0]])
    with pytest.raises(InputError, match="keeps no state for adaptive_p"):
        Sampler.sample(logits, neutral(adaptive_target=0.5), ids, 0.5, None)


def test_top_n_sigma_of_a_direct_call() -> None:
    logits, ids = torch.tensor([[[6.0, 5.0, 4.0, 0.0]]]), torch.tensor([[0]])
    for number in (0.0, 0.5, 0.999):
        token, *_ = Sampler.sample(logits, neutral(top_n_sigma=0.3), ids, number, None)
        assert int(token) == 0


def test_guidance() -> None:
    pair = torch.randn(2, 1, 20)
    settings = neutral(cfg_scale=1.5)
    token, tops, top_p, _, _ = call(pair, settings, 0.4, return_top_tokens=20)
    assert token.shape == (1, 1)
    wanted = oracle.distribution(oracle.apply_cfg(pair[0, 0].tolist(), pair[1, 0].tolist(), 1.5), settings)
    assert dict(zip(tops[0, 0].tolist(), top_p[0, 0].tolist(), strict=True)) == pytest.approx(wanted, abs=1e-5)


def test_token_healing_restricts_to_tokens_with_the_prefix() -> None:
    x = torch.randn(2, 1, 32)
    prefix = torch.tensor([[3], [7]])
    tokens = call(x, neutral(), 0.5, tokenizer=ToyTokenizer(), prefix_token=prefix)[0].flatten().tolist()
    assert tokens[0] in (3, 4)
    assert tokens[1] in (7, 8)


class ListFilter:
    """Allows the tokens it was created with."""

    def __init__(self, passes: Any, ends: Any = ()) -> None:
        self.passes, self.ends = passes, ends

    def next(self) -> Any:
        """The allowed tokens and the end tokens."""
        return self.passes, self.ends


class MaskFilter(ListFilter):
    """Masks logits."""

    def can_mask_logits(self) -> bool:
        """Yes."""
        return True

    def prepare_logit_mask(self) -> bool:
        """Whether the mask is there."""
        return self.passes is not None

    def mask_logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits with all other tokens excluded."""
        mask = torch.full_like(x, -torch.inf)
        mask[self.passes] = 0.0
        return x + mask


def test_filters_intersect_and_end() -> None:
    x = torch.arange(10.0).view(1, 1, 10)
    greedy = Settings.greedy()
    first, second = ListFilter([9, 3, 5], {3}), ListFilter({3, 5, 1})
    assert call(x, greedy, filters=[first, second])[0].item() == 5
    token, _, _, _, ended = call(x, greedy, filters=[first, ListFilter(None), ListFilter([3])])
    assert (token.item(), ended) == (3, True)
    assert (
        call(x, greedy, filters=[ListFilter({0, 9})], filter_prefer_eos=True, tokenizer=ToyTokenizer())[0].item() == 0
    )
    assert call(x, greedy, filters=[MaskFilter([2, 4])])[0].item() == 4
    assert call(x, greedy, filters=[MaskFilter([2, 4]), ListFilter([1, 2])])[0].item() == 2
    old_style = Settings.greedy()
    old_style.filters = [ListFilter([6])]
    assert call(x, old_style)[0].item() == 6


def test_mistakes_are_named() -> None:
    x = torch.zeros(2, 1, 10)
    with pytest.raises(InputError, match="incorrect shape"):
        call(x[:, 0], neutral())
    with pytest.raises(InputError, match="CFG requires logits to be bsz 2"):
        call(x[:1], neutral(cfg_scale=1.0))
    with pytest.raises(InputError, match="Prefix token list"):
        call(x, neutral(), prefix_token=ONE_TOKEN, tokenizer=ToyTokenizer())
    with pytest.raises(InputError, match="sequence_ids"):
        call(x, neutral(), sequence_ids=ONE_TOKEN)
    with pytest.raises(InputError, match="batch size > 1"):
        call(x, neutral(), filters=[ListFilter([1])])
    with pytest.raises(InputError, match="excluded all tokens"):
        call(x[:1], neutral(), filters=[ListFilter([1]), ListFilter([2])])
    with pytest.raises(InputError, match="not precomputing mask"):
        call(x[:1], neutral(), filters=[MaskFilter(None)])
    with pytest.raises(InputError, match="random must be"):
        call(x[:1], neutral(), 1.5)
    with pytest.raises(InputError, match="No token is left"):
        call(x[:1], neutral(token_bias=torch.full((10,), -torch.inf)))
    with pytest.raises(InputError, match="NaN"):
        call(x[:1] * torch.nan, neutral())
    with pytest.raises(InputError, match="infinite"):
        call(x[:1] + torch.inf, neutral())


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=60), st.integers(1, 20))
def test_a_part_sorted_order_is_a_permutation_with_its_beginning_sorted(p: list[float], count: int) -> None:
    places = partial_quicksort(p, count)
    assert sorted(places) == list(range(len(p)))
    best = [p[place] for place in places[:count] if p[place] >= 1e-8]
    assert best == sorted((v for v in p if v >= 1e-8), reverse=True)[: len(best)]
    assert len(best) == min(count, sum(v >= 1e-8 for v in p))


def test_a_quadratic_quicksort_falls_back_to_a_full_sort() -> None:
    falling = [1.0 - place / 30_000 for place in range(30_000)]
    assert partial_quicksort(falling, 5) == list(range(30_000))


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_gathering_matches_the_two_pointer_swap(high: list[bool]) -> None:
    ids, low, last = list(range(len(high))), 0, len(high) - 1
    while low < last:
        if high[ids[low]]:
            low += 1
            continue
        while last >= low and not high[ids[last]]:
            last -= 1
        if low < last:
            ids[low], ids[last] = ids[last], ids[low]
    places, extra = gather_above_threshold(torch.tensor(high))
    found = [*places.tolist(), *extra.tolist()]
    if any(high):
        assert found == ids[: last + 1]
    assert sorted(places.tolist()) == [place for place, is_high in enumerate(high) if is_high]


def test_inverse_cdf_never_returns_a_zero_probability() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert [inverse_cdf(p, number) for number in (0.0, 0.3, 0.6, 1.0)] == [1, 1, 3, 3]
