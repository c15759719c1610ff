"""Off the CPU: nothing waits for the device, and tokens are those of the CPU.

The meta device computes nothing and refuses to tell a value, so whatever runs there never asked for one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exlm.sampling import Row, Sampler, SamplerState, Settings, fused
from tests.sampling.drawn import Words, neutral

ALL: list[dict[str, Any]] = [
    {"top_k": 1},
    {},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.8},
    {"top_p": 0.9},
    {"min_p": 0.05, "smoothing_factor": 0.2},
    {"top_k": 20, "min_p": 0.1, "skew": 0.3},
    {"token_repetition_penalty": 1.1, "token_frequency_penalty": 0.1},
    {"token_repetition_penalty": 1.1, "token_repetition_range": 2, "token_repetition_decay": 3},
    {"dry_multiplier": 1.0, "top_k": 1},
    {"token_bias": torch.zeros(500), "top_k": 5},
    {"top_a": 0.1},
    {"tfs": 0.9},
    {"typical": 0.8},
    {"mirostat": True},
    {"mirostat": True, "top_k": 1},
    {"min_temp": 0.5, "max_temp": 1.5},
    {"temperature": 1.5, "temperature_last": True, "min_p": 0.1},
    {"xtc_probability": 0.5},
    {"xtc_probability": 0.5, "xtc_ignore_tokens": {3}},
]
TEXT = [3, 4, 5, 3, 4, 5, 3, 4]


def rows(**extra: Any) -> list[Row]:
    asked = [neutral(**changes) for changes in ALL]
    return [Row(each, SamplerState(each, seed, TEXT), **extra) for seed, each in enumerate(asked)]


def test_no_step_waits_for_the_device() -> None:
    x = torch.empty(len(ALL), 500, device="meta")
    sampler = Sampler(vocab_size=500)
    everyone = rows(want_top=3, blocked=[4], allowed=torch.ones(500, dtype=torch.bool))
    picks = sampler.sample_batch(x, everyone)
    assert picks.tokens.shape == picks.probs.shape == (len(ALL),)
    assert picks.tokens.is_meta
    assert picks.top_tokens is not None
    assert picks.top_tokens.shape == (len(ALL), 3)
    for place, row in enumerate(everyone):
        alone = sampler.sample_batch(x[place : place + 1], [row])
        assert alone.tokens.is_meta


def test_guidance_and_packed_masks_do_not_wait_either() -> None:
    x = torch.empty(3, 500, device="meta")
    settings = Settings.greedy(cfg_scale=1.5)
    words = torch.zeros(16, dtype=torch.int32)
    asked = [Row(settings, SamplerState(), guided=True), Row(neutral(), SamplerState(), allowed=words)]
    assert Sampler(Words()).sample_batch(x, asked).tokens.is_meta


@pytest.mark.gpu
def test_a_gpu_picks_the_tokens_of_a_cpu() -> None:
    x = torch.randn(len(ALL), 500, generator=torch.Generator().manual_seed(1)) * 3.0
    for step in (None, 0.25):
        logits = x if step is None else (x / step).round() * step
        here = Sampler(vocab_size=490).sample_batch(logits, rows(want_top=3))
        there = Sampler(vocab_size=490).sample_batch(logits.cuda(), rows(want_top=3))
        assert there.tokens.is_cuda
        assert there.tolist() == here.tolist()
        torch.testing.assert_close(there.probs.cpu(), here.probs, atol=1e-5, rtol=1e-4)
        assert here.top_tokens is not None
        assert there.top_tokens is not None
        assert there.top_tokens.tolist() == here.top_tokens.tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("fast", [True, False])
def test_a_gpu_is_not_waited_for(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(fused, "serves", lambda device: False)
    sampler = Sampler(vocab_size=500)
    x = torch.randn(len(ALL), 500, device="cuda")
    asked = rows(want_top=3)  # as before: each kernel takes seconds to compile
    sampler.sample_batch(x, asked)
    for row in asked:
        row.state.accept(7)
    torch.cuda.set_sync_debug_mode("error")
    try:
        picks = sampler.sample_batch(x, asked)
        greedy = sampler.sample_batch(x[:1], [Row(Settings.greedy(), SamplerState())])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert min(picks.tolist()) >= 0
    assert greedy.tolist() == x[0].argmax().unsqueeze(0).tolist()
