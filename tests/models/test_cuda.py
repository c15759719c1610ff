"""Every family on a GPU in 16 bits against the CPU in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exlm import Cache, Config, Model
from tests.models import zoo
from tests.models.zoo_cases import CASES, Case

pytestmark = pytest.mark.gpu

TOKENS = 300


def load(folder: Path, device: str, dtype: str) -> Model:
    config = Config(folder)
    config.device, config.dtype, config.max_seq_len = device, dtype, TOKENS
    model = Model(config)
    model.load()
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_sixteen_bits_on_a_gpu(case: Case, tmp_path: Path) -> None:
    folder = zoo.build(case.architecture, tmp_path / "model", **case.overrides).folder
    ids = torch.randint(0, 100, (2, TOKENS))
    want = load(folder, "cpu", "float32").forward(ids)
    for dtype, limit in (("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 8e-2)):
        model = load(folder, "cuda", dtype)
        whole = model.forward(ids).cpu()
        assert float((whole - want).norm() / want.norm()) < limit, dtype
        cache = Cache(model, batch_size=2, max_seq_len=TOKENS)
        parts = [model.forward(part, cache).cpu() for part in ids.split(97, 1)]
        assert float((torch.cat(parts, 1) - want).norm() / want.norm()) < limit, dtype
