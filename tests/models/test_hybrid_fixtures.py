"""Trained hybrid models against transformers in float32: the last logits of a prompt, and what follows it greedily."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exlm import Cache, Config, Model

FIXTURES = ["qwen3_5", "nemotron_h"]


def load(folder: Path) -> Model:
    config = Config(folder)
    config.dtype = "float32"
    model = Model(config)
    model.load()
    return model


@pytest.mark.parametrize("name", FIXTURES)
def test_last_logits_of_the_prompt(fixtures_dir: Path, name: str) -> None:
    want = load_file(fixtures_dir / "reference" / f"{name}.safetensors")
    model, ids = load(fixtures_dir / f"tiny-{name}"), want["input_ids"]
    assert float((model.forward(ids)[0, -16:] - want["logits_tail"]).abs().max()) < 2e-3
    for chunk in (64, 7, 1):
        cache = Cache(model, max_seq_len=ids.shape[1])
        logits = torch.cat([model.forward(part, cache) for part in ids.split(chunk, 1)], 1)
        assert float((logits[0, -16:] - want["logits_tail"]).abs().max()) < 2e-3, f"chunks of {chunk}"


@pytest.mark.parametrize("name", FIXTURES)
def test_greedy_ids(fixtures_dir: Path, name: str) -> None:
    want = load_file(fixtures_dir / "reference" / f"{name}.safetensors")
    model, prompt, greedy = load(fixtures_dir / f"tiny-{name}"), want["input_ids"][:, :32], want["greedy_48"].flatten()
    cache = Cache(model, max_seq_len=prompt.shape[1] + len(greedy))
    token, found = model.forward(prompt, cache)[:, -1:].argmax(-1), []
    for _ in greedy:
        found.append(int(token))
        token = model.forward(token, cache)[:, -1:].argmax(-1)
    assert found == greedy.tolist()
