"""A trained model against transformers' outputs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exlm import Cache, Config, Model


@pytest.fixture(scope="module")
def model(fixtures_dir: Path) -> Model:
    model = Model(Config(fixtures_dir / "tiny-lm"))
    model.load()
    return model


def test_logits(model: Model, fixtures_dir: Path) -> None:
    reference = load_file(fixtures_dir / "reference" / "fp32.safetensors")
    ids, want = reference["input_ids"].long(), reference["logits_tail"]
    for chunk in (192, 50, 1):
        cache = Cache(model, max_seq_len=192)
        got = torch.cat([model.forward(part, cache) for part in ids.split(chunk, 1)], 1)[0, -16:]
        assert float((got - want).norm() / want.norm()) < 1e-4
        assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_perplexity(model: Model, fixtures_dir: Path) -> None:
    held_out = load_file(fixtures_dir / "reference" / "heldout_ids.safetensors")
    rows = next(iter(held_out.values())).flatten()[:4096].view(8, 512).long()
    loss = 0.0
    for row in rows:
        shares = model.forward(row[None])[0, :-1].log_softmax(-1)
        loss -= float(shares.gather(1, row[1:, None]).sum())
    assert math.exp(loss / (8 * 511)) == pytest.approx(46.904, abs=0.01)
