"""Quantised models on a GPU: the same outputs as their dense models, and no more memory than their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Cache, Config, Model
from exlm.formats import exl2, gptq
from tests import tiny
from tests.model.random_quantized import random_exl2, random_gptq, replace_matrices

pytestmark = pytest.mark.gpu


def load(folder: Path, device: str, dtype: str) -> Model:
    config = Config(folder)
    config.device, config.dtype = device, dtype
    model = Model(config)
    model.load()
    return model


@pytest.mark.parametrize(("write", "make"), [(exl2.write, random_exl2), (gptq.write, random_gptq)])
def test_a_quantised_model_equals_its_dense_model(tmp_path: Path, write: Any, make: Any) -> None:
    folder = tiny.make(tmp_path / "model", hidden_size=64, intermediate_size=128)
    replace_matrices(folder, tmp_path / "dense", write, make, r"_proj\.weight|lm_head")
    ids = torch.randint(3, 60, (2, 40))
    want = load(tmp_path / "dense", "cpu", "float32").forward(ids)
    for dtype, limit in (("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 8e-2)):
        model = load(folder, "cuda", dtype)
        cache = Cache(model, batch_size=2, max_seq_len=64)
        got = torch.cat([model.forward(part, cache).cpu() for part in ids.split(13, 1)], 1)
        assert float((got - want).norm() / want.norm()) < limit


def test_reader_threads_use_the_loading_stream(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    replace_matrices(folder, None, exl2.write, random_exl2, r"_proj\.weight|lm_head")
    ids = torch.randint(3, 60, (1, 9))
    want = load(folder, "cuda", "float16").forward(ids).cpu()
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            torch.cuda._sleep(10_000_000)
            assert load(folder, "cuda", "float16").forward(ids).cpu().equal(want)


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_peak_memory_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("EXLM_CUDA", kernels)
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "vocab_size": 32768, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    folder = tiny.make(tmp_path / "model", torch.float16, **sizes, **heads)
    replace_matrices(folder, None, exl2.write, random_exl2, r"_proj\.weight|lm_head")
    file = (folder / "model.safetensors").stat().st_size
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    load(folder, "cuda", "float16")
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.2 * file, f"{peak / file:.3f} times the file"
