"""Quality of quantised caches with a trained model, token by token, and what they must not change."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exlm import Cache, CacheBase, CacheFP8, CacheQ4, CacheQ6, CacheQ8, Config, Model
from exlm.formats import exl2

ROW = 384  # tokens of each of two rows


@pytest.fixture(scope="module")
def model(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The 4.0 bpw model dequantised to floats: the same numbers, and faster here."""
    source, folder = fixtures_dir / "tiny-lm-exl2-4.0bpw", tmp_path_factory.mktemp("dense")
    stored = load_file(source / "output.safetensors")
    dense = {name: tensor for name, tensor in stored.items() if ".q_" not in name}
    for key in (name.removesuffix(".q_weight") for name in stored if name.endswith(".q_weight")):
        parts = {n.removeprefix(key + "."): t for n, t in stored.items() if n.startswith(key + ".q_")}
        sizes = parts["q_invperm"].numel(), parts["q_weight"].shape[1]
        dense[f"{key}.weight"] = exl2.read(parts, *sizes, key).dequantize().T.contiguous()
    save_file(dense, folder / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    model = Model(Config(folder))
    model.load()
    return model


@pytest.fixture(scope="module")
def ids(fixtures_dir: Path) -> Tensor:
    held_out = load_file(fixtures_dir / "reference" / "heldout_ids.safetensors")
    return next(iter(held_out.values())).flatten()[: 2 * ROW].view(2, ROW).long()


def run(model: Model, cache: CacheBase, ids: Tensor, chunks: list[int]) -> Tensor:
    """The logits of both rows, computed in chunks."""
    return torch.cat([model.forward(part, cache) for part in ids.split(chunks, 1)], 1)


@pytest.mark.parametrize(
    ("kind", "options", "name", "limit"),
    [
        (Cache, {"dtype": "float16"}, "fp16", 25.83),
        (CacheQ8, {}, "q8", 25.83),
        (CacheQ6, {}, "q6", 25.90),
        (CacheQ4, {}, "q4", 26.03),
    ],
)
def test_perplexity_token_by_token(
    model: Model,
    ids: Tensor,
    fixtures_dir: Path,
    kind: type[CacheBase],
    options: dict[str, Any],
    name: str,
    limit: float,
) -> None:
    cache = kind(model, batch_size=2, max_seq_len=ROW, **options)
    logits = run(model, cache, ids[:, :-1], [1] * (ROW - 1))
    log_probs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])
    perplexity = math.exp(-float(log_probs.mean()))
    assert 25.80 < perplexity <= limit
    reference = load_file(fixtures_dir / "reference" / "cache_4.0bpw.safetensors")
    assert perplexity < float(reference[f"ppl_{name}"]) + 0.001
    # The reference quantises neighbours again and again, so with few bits it drifts from an exact cache.
    want, tolerance = reference[name], {"fp16": 2e-3, "q8": 4e-3, "q6": 0.03, "q4": 0.05}[name]
    assert float((logits[:, -1, :2048] - want).norm() / want.norm()) < tolerance


def test_more_bits_are_more_exact(model: Model, ids: Tensor) -> None:
    """The 8-bit cache without scales is far coarser than the one with."""
    part, chunks = ids[:, :216], [200, *[1] * 16]
    exact = run(model, Cache(model, 2, 216), part, chunks)[:, 200:]
    error = {}
    for kind in (CacheFP8, CacheQ8, CacheQ6, CacheQ4):
        logits = run(model, kind(model, 2, 216), part, chunks)[:, 200:]
        error[kind] = float((logits - exact).norm() / exact.norm())
    assert 0 < error[CacheQ8] < 0.006
    assert 2 * error[CacheQ8] < error[CacheQ6] < error[CacheQ4] < 0.06
    assert 4 * error[CacheQ8] < error[CacheFP8] < 0.15


@pytest.mark.parametrize("kind", [CacheFP8, CacheQ8, CacheQ6, CacheQ4])
def test_one_call_sees_its_own_tokens_exactly(model: Model, ids: Tensor, kind: type[CacheBase]) -> None:
    assert torch.equal(model.forward(ids, kind(model, 2, ROW)), model.forward(ids, Cache(model, 2, ROW)))


@pytest.mark.parametrize("kind", [CacheFP8, CacheQ8, CacheQ6, CacheQ4])
def test_a_clone_goes_on_as_the_original(model: Model, ids: Tensor, kind: type[CacheBase]) -> None:
    cache = kind(model, 2, ROW)
    model.forward(ids[:, :300], cache, preprocess_only=True)
    clone, wider = cache.clone(), kind(model, 3, 2 * ROW)
    cache.copy_states(wider, 0, 300, 0, 300, 1, 1, 0, 3)
    wider.current_seq_len = 300
    want = model.forward(ids[:, 300:310], cache)
    assert torch.equal(model.forward(ids[:, 300:310], clone), want)
    got = model.forward(ids[1:, 300:310].expand(3, -1), wider)
    assert torch.allclose(got, want[1:].expand(3, -1, -1), atol=1e-4)
