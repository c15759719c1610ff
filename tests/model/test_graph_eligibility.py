"""Which batches may be captured: all whose kernels do not synchronise, MoE only with few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from exlm import Config
from exlm.bench.shapes import SHAPES
from exlm.bench.synthetic import write_model_folder
from exlm.kernels.dispatch import BackendList, DispatchRecord
from exlm.kernels.interface import FUSE_MAX_TOKENS
from exlm.kernels.reference import ReferenceBackend
from exlm.model.cuda_graphs import MAX_GRAPH_TOKENS, CudaGraphRunner
from exlm.model.loader import LoadedModel

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "experts", "attention", "tokens"),
    [
        ("tiny", "", "triton", MAX_GRAPH_TOKENS),
        ("tiny", "", "reference", 0),
        ("tiny-moe", "cuda", "cuda", FUSE_MAX_TOKENS),
        ("tiny-moe", "reference", "cuda", 0),
        ("tiny-moe", "", "cuda", 0),
    ],
)
def test_backends_decide_whether_graphs_are_captured(
    tmp_path: Path, shape: str, experts: str, attention: str, tokens: int
) -> None:
    config = Config(write_model_folder(tmp_path, SHAPES[shape], 64)).freeze()
    roles = [
        (f"layers.{i}.{part}", backend) for i in (0, 1) for part, backend in (("attn", attention), ("mlp", experts))
    ]
    records = [DispatchRecord(role, backend, "") for role, backend in roles if backend]
    backends = BackendList([ReferenceBackend(CPU, torch.float16)], records)
    assert LoadedModel(config, cast(Any, None), (), (backends,) * 4).max_graph_tokens == tokens


@pytest.mark.parametrize("mixer", ["delta", "mamba", "conv"])
@pytest.mark.parametrize(("backend", "tokens"), [("cuda", MAX_GRAPH_TOKENS), ("reference", 0)])
def test_recurrent_mixers_decide_too(tmp_path: Path, mixer: str, backend: str, tokens: int) -> None:
    config = Config(write_model_folder(tmp_path, SHAPES["tiny"], 64)).freeze()
    records = [DispatchRecord("layers.0.attn", "cuda", ""), DispatchRecord(f"layers.1.{mixer}", backend, "")]
    backends = BackendList([ReferenceBackend(CPU, torch.float16)], records)
    assert LoadedModel(config, cast(Any, None), (), (backends,) * 4).max_graph_tokens == tokens


def test_larger_batches_are_not_captured() -> None:
    graphs = CudaGraphRunner(lambda batch: batch.ids[..., None], CPU, max_tokens=4)
    for rows, tokens, captured in ((4, 1, True), (2, 2, True), (5, 1, False), (2, 3, False)):
        logits = graphs.decode([[7] * tokens] * rows, [1] * rows, [[0]] * rows)
        assert (logits is not None) == captured
