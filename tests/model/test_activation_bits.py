"""`Config.cpu_activation_bits`: a model whose products round activations to 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exlm import Cache, Config, Model

IDS = torch.arange(3, 43)[None]


def load(path: Path, bits: int) -> Model:
    """The model on the CPU."""
    config = Config(path)
    config.device, config.cpu_activation_bits = "cpu", bits
    model = Model(config)
    model.load()
    return model


def logits(model: Model, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """The logits of all positions, `chunk` tokens at a time."""
    cache = Cache(model, batch_size=ids.shape[0], max_seq_len=256, dtype="float32")
    return torch.cat([model.forward(part, cache) for part in ids.split(chunk, 1)], 1)


@pytest.mark.parametrize("name", ["tiny-lm-gguf-q4_0", "tiny-lm-exl2-4.0bpw", "tiny-lm-gptq-g128-act"])
def test_8_bits_are_near_16_and_the_same_in_any_batch(fixtures_dir: Path, name: str) -> None:
    folder = fixtures_dir / name
    path = next(folder.glob("*.gguf"), folder)
    model = load(path, 8)
    alone, exact = logits(model, IDS, 40), logits(load(path, 16), IDS, 40)
    difference = float((alone - exact).norm() / exact.norm())
    assert 1e-4 < difference < 0.05
    assert torch.equal(logits(model, IDS, 20), alone)
    batch = torch.cat((IDS.flip(1), IDS, IDS + 1))
    assert torch.equal(logits(model, batch, 40)[1:2], alone)
