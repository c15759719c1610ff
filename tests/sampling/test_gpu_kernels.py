"""The kernels draw the same tokens as torch: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm.kernels.sampling_layout import TOO_MANY_CANDIDATES
from exlm.sampling import (
    PendingOutput,
    Sampler,
    SamplerOutput,
    SamplerState,
    SamplingRequest,
    Settings,
    gpu_kernels,
)
from exlm.sampling.gpu_kernels import variant_of
from tests.sampling.random_inputs import EDIT_VALUES, STEP_VALUES, neutral, random_logits, random_settings

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: log(0), overflow

DEVICE = "cuda" if ON_GPU else "cpu"
TEXT = [3, 4, 5, 3, 4, 5, 3, 4]
SETTING_KINDS: list[dict[str, Any]] = [
    {"top_k": 1, "num_top_tokens": 3},
    {"top_k": 1, "mirostat": True},
    {},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 40, "tfs": 0.9, "typical": 0.7, "min_temp": 0.5, "max_temp": 1.5, "top_a": 0.01},
    {"top_k": 20, "temperature": 1.5, "temperature_last": True, "xtc_probability": 0.5, "skew": 0.3},
    {"top_k": 50, "mirostat": True},
    {"top_p": 0.9},
    {"top_p": 0.8, "temperature": 1.5, "num_top_tokens": 5},
    {"min_p": 0.05, "smoothing_factor": 0.2},
    {"top_a": 0.1},
    {"top_n_sigma": 1.0, "top_k": 20},  # not one of the kernels' steps: torch samples these rows
    {"top_n_sigma": 2.0, "mirostat": True},
    {"adaptive_target": 0.3, "min_p": 0.1},
    {"mirostat": True, "top_p": 0.99},
    {"min_p": 0.1, "temperature": 1.5, "temperature_last": True, "xtc_probability": 0.5},
    {"top_p": 0.8, "typical": 0.8, "skew": -0.3},
    {"min_p": 0.1, "xtc_probability": 1.0, "xtc_ignore_tokens": {3, 4, 5}, "num_top_tokens": 2},
]
LOGITS_EDITS: list[dict[str, Any]] = [
    {"token_repetition_penalty": 1.5, "token_frequency_penalty": 0.3, "token_presence_penalty": 0.2},
    {"token_repetition_penalty": 1.5, "token_repetition_range": 2, "token_repetition_decay": 3},
    {"token_frequency_penalty": 0.5, "token_repetition_range": 3},
    {"dry_multiplier": 2.0},
    {"token_bias": torch.linspace(-3.0, 3.0, 512)},
    {"blocked": [0, 7, 9999]},
    {"allowed": [5, 200, 499, 9999]},
    {"allowed": torch.arange(300) % 3 == 0},
    {"allowed": torch.full((16,), 0x11111111, dtype=torch.int32)},
]


@pytest.fixture(autouse=True)
def _force_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the kernels serve whatever device there is; the interpreter sorts slowly, so let it sort less."""
    monkeypatch.setattr(gpu_kernels, "has_kernels_for", lambda device: device.type == DEVICE)
    if not ON_GPU:
        monkeypatch.setattr(gpu_kernels, "SORT_SIZES", (128,))
        monkeypatch.setattr(gpu_kernels, "GATHER_SIZE", 128)
        monkeypatch.setattr(gpu_kernels, "DRAW_TILE", 1024)
        monkeypatch.setattr(gpu_kernels, "CANDIDATE_TILE", 1024)
        monkeypatch.setattr(gpu_kernels, "EDIT_TILE", 256)
        variant_of.cache_clear()
    yield
    variant_of.cache_clear()


def make_requests(kinds: list[dict[str, Any]], text: list[int] | None = None) -> list[SamplingRequest]:
    rows = []
    for seed, kind in enumerate(kinds):
        own = {name: kind[name] for name in ("num_top_tokens", "blocked", "allowed") if name in kind}
        settings = neutral(**{name: value for name, value in kind.items() if name not in own})
        rows.append(SamplingRequest(settings, SamplerState(settings, seed, TEXT if text is None else text), **own))
    return rows


def sample_with_torch(x: Tensor, rows: list[SamplingRequest], sampler: Sampler) -> SamplerOutput:
    drawn = sampler._sample_with_torch(sampler._checked_logits(x, len(rows)), rows)
    return PendingOutput(sampler, rows, drawn).wait()


def compare_with_torch(
    x: Tensor, rows: list[SamplingRequest], same: list[SamplingRequest], width: int | None = None
) -> None:
    """The same rows by kernels and by the plain way on the CPU."""
    sampler = Sampler(vocab_size=width)
    found, wanted = sampler.sample_batch(x.to(DEVICE), rows), sample_with_torch(x, same, sampler)
    assert found.tokens == wanted.tokens
    torch.testing.assert_close(found.probs.cpu(), wanted.probs, atol=1e-6, rtol=1e-5)
    if wanted.top_probs is not None and found.top_probs is not None:
        torch.testing.assert_close(found.top_probs.cpu(), wanted.top_probs, atol=1e-6, rtol=1e-5)
    for here, there in zip(rows, same, strict=True):
        assert (here.state.mirostat_mu or 0.0) == pytest.approx(there.state.mirostat_mu or 0.0, rel=1e-6)


def test_every_kind_of_row() -> None:
    x = torch.randn(len(SETTING_KINDS), 500) * 3.0
    x[::2] = (x[::2] / 0.5).round() * 0.5
    compare_with_torch(x, make_requests(SETTING_KINDS), make_requests(SETTING_KINDS), 490)


def test_every_logits_edit() -> None:
    x = torch.randn(len(LOGITS_EDITS), 500)
    kinds = [change | {"top_k": 1} for change in LOGITS_EDITS]
    compare_with_torch(x, make_requests(kinds), make_requests(kinds))


def test_device_state_follows_the_text() -> None:
    """Penalties and mirostat over a text that grows, is rewound, and outgrows the room for it."""
    kinds = [LOGITS_EDITS[0], LOGITS_EDITS[2], LOGITS_EDITS[0] | {"mirostat": True}]
    kinds = [kind | {"top_k": 1} for kind in kinds]
    here, there = make_requests(kinds, []), make_requests(kinds, [])
    sampler = Sampler()
    rng = Random(1)
    for change in (0, 1, 1, 5, -2, 1, 300, 1, -250, 2):
        for row in here + there:
            if change < 0:
                row.state.truncate(len(row.state) + change)
        for _ in range(change):
            token = int(400 * rng.random() ** 3)
            for row in here + there:
                row.state.accept(token)
        x = torch.randn(3, 400) * 0.5 - torch.linspace(0.0, 3.0, 400)
        found, wanted = sampler.sample_batch(x.to(DEVICE), here), sample_with_torch(x, there, sampler)
        assert found.tokens == wanted.tokens
        assert here[2].state.mirostat_mu == pytest.approx(there[2].state.mirostat_mu)


def test_a_changed_bias_counts() -> None:
    bias = torch.zeros(100)
    settings = Settings.greedy(token_bias=bias)
    sampler, x = Sampler(), torch.zeros(1, 100, device=DEVICE)
    for token in (7, 20):
        bias[token] += token
        assert sampler.sample_batch(x, [SamplingRequest(settings, SamplerState())]).tokens == [token]


@pytest.mark.parametrize("kind", [{"top_k": 1}, {"top_k": 1, "blocked": [3]}, {}, {"top_k": 5}, {"top_p": 0.5}])
def test_a_row_with_bad_logits_fails_alone(kind: dict[str, Any]) -> None:
    x = torch.randn(6, 300)
    x[1] = -torch.inf
    x[2, 7] = torch.nan
    x[3, 7] = torch.inf
    x[4, 7] = -torch.nan
    sampler = Sampler()
    found = sampler.sample_batch(x.to(DEVICE), make_requests([kind] * 6)).tokens
    if "blocked" in kind:
        x[1, 3] = -torch.inf
    assert found[2:5] == [-2, -3, -2]
    assert found[1] == (3 if "blocked" in kind else -1)
    assert [found[0], found[5]] == [
        sample_with_torch(x, make_requests([kind] * 6), sampler).tokens[place] for place in (0, 5)
    ]


def test_rows_with_too_many_candidates_are_resampled_with_torch() -> None:
    x = torch.randn(3, 5000) * 0.1
    kinds: list[dict[str, Any]] = [
        {"min_p": 0.05, "xtc_probability": 0.5, "num_top_tokens": 2},
        {"top_k": 5, "num_top_tokens": 4},
        {},
    ]
    sampler = Sampler()
    logits = x.to(DEVICE, copy=True)
    pending = sampler.launch(logits, make_requests(kinds))
    assert int(pending.tokens[0]) == TOO_MANY_CANDIDATES
    logits.zero_()  # as the next pass does
    output = pending.wait()
    assert output.resampled
    wanted = sample_with_torch(x, make_requests(kinds), sampler)
    assert output.tokens == wanted.tokens == pending.tokens.tolist()
    torch.testing.assert_close(output.probs.cpu(), wanted.probs, atol=1e-6, rtol=1e-5)
    assert output.top_tokens is not None
    assert wanted.top_tokens is not None
    assert output.top_tokens[0, :2].tolist() == wanted.top_tokens[0, :2].tolist()
    assert output.top_tokens[1].tolist() == wanted.top_tokens[1].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "top_k"), [(65, 50), (2049, 50), (152064, 200)])
def test_random_rows(width: int, top_k: int) -> None:
    """Any mixture of settings. What float32 weights decide may fall differently once in very many rows.

    Each kernel takes seconds to compile: the two small widths share theirs, and have none for a large top-k.
    """
    rng = Random(width)
    steps = STEP_VALUES | {"top_k": tuple(k for k in STEP_VALUES["top_k"] if not top_k < k < 10**6)}
    sampler, rows, other = Sampler(), 0, 0
    for _ in range(8):
        x = random_logits(rng, 16, width)
        asked = [random_settings(rng, steps, EDIT_VALUES) for _ in range(16)]
        text = [rng.randrange(20) for _ in range(30)]

        def batch(asked: list[Settings] = asked, text: list[int] = text) -> list[SamplingRequest]:
            return [
                SamplingRequest(each, SamplerState(each, seed, text), num_top_tokens=4)
                for seed, each in enumerate(asked)
            ]

        found, wanted = sampler.sample_batch(x.cuda(), batch()), sampler.sample_batch(x, batch())
        rows += 16
        other += sum(a != b for a, b in zip(found.tokens, wanted.tokens, strict=True))
        alike = torch.tensor(found.tokens) == torch.tensor(wanted.tokens)
        close = torch.isclose(found.probs.cpu(), wanted.probs, atol=1e-6, rtol=1e-3)
        assert bool(close[alike].float().mean() > 0.95)
    assert other <= rows // 100


@pytest.mark.gpu
def test_a_batch_in_steady_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server sees: step after step of the same rows, none of which want top tokens."""
    chat = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "token_repetition_penalty": 1.1}
    here, there = make_requests([chat] * 5), make_requests([chat] * 5)
    sampler = Sampler()
    monkeypatch.setattr("exlm.sampling.sampler.copy_to_host", None)  # the kernel writes to the host itself
    for _ in range(40):
        x = torch.randn(5, 152064) * 3.0
        pending, wanted = sampler.launch(x.cuda(), here), sample_with_torch(x, there, sampler)
        found = pending.wait()
        assert not found.resampled
        assert found.tokens == wanted.tokens == pending.tokens.tolist()
        for row, token in zip(here + there, found.tokens * 2, strict=True):
            row.state.accept(token)


def test_half_precision_and_thousands_of_ties() -> None:
    x = (torch.randn(4, 32000 if ON_GPU else 700) * 2.0).bfloat16()
    kinds: list[dict[str, Any]] = [{"top_k": 50}, {"top_p": 0.7}, {"top_k": 1}, {"min_p": 0.2}]
    compare_with_torch(x, make_requests(kinds), make_requests(kinds))
    flat = torch.zeros(3, 152064 if ON_GPU else 3000)
    flat[2, ::3] = -1.0
    kinds = [{"top_k": 64}, {"top_p": 0.7}, {"top_p": 0.9}]
    compare_with_torch(flat, make_requests(kinds), make_requests(kinds))
