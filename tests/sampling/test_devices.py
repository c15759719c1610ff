"""Off the CPU: nothing waits for the device, and tokens are those of the CPU.

The meta device computes nothing and raises if a value is read, so code that runs there does not wait for one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exlm.sampling import Sampler, SamplerState, SamplingRequest, Settings, gpu_kernels
from tests.sampling.random_inputs import ToyTokenizer, neutral

ALL_SETTINGS: list[dict[str, Any]] = [
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
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 1.0, "top_k": 5, "min_p": 0.05},
    {"adaptive_target": 0.4, "min_p": 0.02},
    {"adaptive_target": 0.4, "top_k": 1},
    {"adaptive_target": 0.4, "top_p": 0.9, "mirostat": True, "skew": 0.3},
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


def rows(**extra: Any) -> list[SamplingRequest]:
    asked = [neutral(**changes) for changes in ALL_SETTINGS]
    return [SamplingRequest(each, SamplerState(each, seed, TEXT), **extra) for seed, each in enumerate(asked)]


def test_no_step_synchronizes() -> None:
    x = torch.empty(len(ALL_SETTINGS), 500, device="meta")
    sampler = Sampler(vocab_size=500)
    all_rows = rows(num_top_tokens=3, blocked=[4], allowed=torch.ones(500, dtype=torch.bool))
    drawn = sampler.launch(x, all_rows)._drawn
    assert drawn.tokens.shape == drawn.probs.shape == (len(ALL_SETTINGS),)
    assert drawn.tokens.is_meta
    assert drawn.top_tokens is not None
    assert drawn.top_tokens.shape == (len(ALL_SETTINGS), 3)
    for place, row in enumerate(all_rows):
        alone = sampler.launch(x[place : place + 1], [row])
        assert alone.tokens.is_meta


def test_cfg_and_packed_masks_do_not_synchronize() -> None:
    x = torch.empty(3, 500, device="meta")
    settings = Settings.greedy(cfg_scale=1.5)
    words = torch.zeros(16, dtype=torch.int32)
    asked = [
        SamplingRequest(settings, SamplerState(), uses_cfg=True),
        SamplingRequest(neutral(), SamplerState(), allowed=words),
    ]
    assert Sampler(ToyTokenizer()).launch(x, asked).tokens.is_meta


@pytest.mark.gpu
def test_gpu_and_cpu_draw_the_same_tokens() -> None:
    x = torch.randn(len(ALL_SETTINGS), 500, generator=torch.Generator().manual_seed(1)) * 3.0
    for step in (None, 0.25):
        logits = x if step is None else (x / step).round() * step
        here = Sampler(vocab_size=490).sample_batch(logits, rows(num_top_tokens=3))
        pending = Sampler(vocab_size=490).launch(logits.cuda(), rows(num_top_tokens=3))
        there = pending.wait()
        assert pending.tokens.is_cuda
        assert there.tokens == here.tokens
        torch.testing.assert_close(there.probs.cpu(), here.probs, atol=1e-5, rtol=1e-4)
        assert here.top_tokens is not None
        assert there.top_tokens is not None
        assert there.top_tokens.tolist() == here.top_tokens.tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("fast", [True, False])
def test_gpu_sampling_never_synchronizes(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(gpu_kernels, "has_kernels_for", lambda device: False)
    sampler = Sampler(vocab_size=500)
    x = torch.randn(len(ALL_SETTINGS), 500, device="cuda")
    asked = rows(num_top_tokens=3)  # as before: each kernel takes seconds to compile
    sampler.sample_batch(x, asked)
    for row in asked:
        row.state.accept(7)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = sampler.launch(x, asked)
        greedy = sampler.launch(x[:1], [SamplingRequest(Settings.greedy(), SamplerState())])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert min(pending.wait().tokens) >= 0
    assert greedy.wait().tokens == x[0].argmax().unsqueeze(0).tolist()
