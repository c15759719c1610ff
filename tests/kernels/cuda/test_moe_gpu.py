"""Packed experts on a GPU: right, the same bits in any company, recorded, and whole models with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Cache, Config, Generator, Job, Model, Settings, Tokenizer
from exlm.bench.shapes import SHAPES
from exlm.bench.synthetic import SyntheticCheckpoint, synthetic_format, write_model_folder
from exlm.kernels import interface as b
from exlm.kernels.cuda import moe
from exlm.kernels.cuda.backend import CudaBackend
from tests.kernels.cuda.oracle import LIMIT, off
from tests.kernels.cuda.random_moe import RECIPES, Mixture, mixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNTS = (b.FUSE_MAX_TOKENS, 1, 2, 3, 5, 8, 16, 17, 33)


def bound(name: str, folder: Path) -> tuple[Mixture, b.MoeFn]:
    device = torch.device("cuda", 0)
    made, backend = mixture(name).to(device), CudaBackend(device, torch.float16, folder)
    parts = ([backend.linear(one) for one in part] for part in made.weights)
    return made, backend.moe(made.moe, *parts, made.selection_bias)


@pytest.mark.parametrize("name", RECIPES)
def test_few_tokens_are_right_and_alone_as_in_company(tmp_path: Path, name: str) -> None:
    made, kernel = bound(name, tmp_path)
    x, logits = made.tokens(b.FUSE_MAX_TOKENS)
    want, whole = made.right(x, logits), None
    for count in COUNTS:
        got = kernel(x[:, -count:], logits[:, -count:])
        assert off(got, want[:, -count:]) < LIMIT
        whole = got if whole is None else whole
        assert got.equal(whole[:, -count:])
        assert kernel(x[:, -count:], logits[:, -count:]).equal(got)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("count", [b.FUSE_MAX_TOKENS + 1, 300])
@pytest.mark.parametrize("worth", [0, moe.MAX_MOE_GEMM_WORK])
def test_many_tokens_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int, worth: int
) -> None:
    made, kernel = bound(name, tmp_path)
    monkeypatch.setattr(moe, "MAX_MOE_GEMM_WORK", worth)
    x, logits = made.tokens(count)
    got = kernel(x, logits)
    assert off(got, made.right(x, logits)) < LIMIT
    assert kernel(x, logits).equal(got)


@pytest.mark.parametrize("count", [1, 16, b.FUSE_MAX_TOKENS])
def test_routing_when_replayed_from_a_graph(tmp_path: Path, count: int) -> None:
    made, kernel = bound("exl2", tmp_path)
    x, logits = made.tokens(count)
    kernel(x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(x, logits)
    for seed in range(1, 4):
        for held, fresh in zip((x, logits), made.tokens(count, seed), strict=True):
            held.copy_(fresh)
        graph.replay()
        assert out.equal(kernel(x, logits))
        assert off(out, made.right(x, logits)) < LIMIT


def said(folder: Path, form_name: str, batched: bool) -> tuple[list[list[int]], Any]:
    """What follows some prompts, and the recordings that were made."""
    config = Config(write_model_folder(folder, SHAPES["tiny-moe"], 512))
    config.device, config.dtype = "cuda", "float16"
    model = Model(config)
    model.open_checkpoint = lambda frozen: SyntheticCheckpoint(frozen.spec, synthetic_format(form_name))
    model.load()
    generator = Generator(model, Cache(model, max_seq_len=4096), Tokenizer(config), max_batch_size=8)
    jobs = [Job(torch.arange(3, 9 + 5 * i)[None], max_new_tokens=24, gen_settings=Settings.greedy()) for i in range(5)]
    for batch in [jobs] if batched else [[job] for job in jobs]:
        generator.enqueue(batch)
        while generator.num_remaining_jobs():
            generator.iterate()
    made: Any = generator._engine.runner
    return [list(job.sequences[0].ids) for job in jobs], made.graphs


@pytest.mark.parametrize("form_name", ["exl2", "gptq", "gguf"])
def test_passes_of_a_model_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form_name: str) -> None:
    alone, graphs = said(tmp_path, form_name, batched=False)
    assert any(one.graph is not None for one in graphs._graphs.values())
    batched, graphs = said(tmp_path, form_name, batched=True)
    agreed = sum(one == other for one, other in zip(batched, alone, strict=True))
    assert agreed >= len(alone) - 1  # the router is dense, and its sums differ with the company
    assert any(one.graph is not None for size, one in graphs._graphs.items() if size.rows > 1)
    monkeypatch.setenv("EXLLAMA_NO_GRAPHS", "1")
    plain, graphs = said(tmp_path, form_name, batched=False)
    assert graphs is None
    assert plain == alone
