"""Matrices, norms, gates and whole layers as one call: the same bits as one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exlm import Cache, CacheBase, CacheQ4, CacheQ8, Config, Model, spec
from exlm.bench.shapes import SHAPES
from exlm.bench.synthetic import RandomTensors, SyntheticCheckpoint, synthetic_format, write_model_folder
from exlm.errors import Unsupported
from exlm.kernels import interface as b
from exlm.kernels.cpu import CpuBackend
from exlm.kernels.cpu.ops import PackedLinear
from exlm.nn import Block, Head
from exlm.nn.fused import FusedBlock, FusedHead

CPU = torch.device("cpu")


def matrix(backend: CpuBackend, inputs: int, outputs: int, seed: int, kind: str = "exl2") -> b.LinearFn:
    weight = synthetic_format(kind).weight(inputs, outputs, RandomTensors(seed, CPU), False, inputs**-0.5)
    return backend.linear(weight)


@pytest.mark.parametrize("rows", [(1, 1), (3, 2), (16, 1), (50, 2)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["exl2", "gguf"])
def test_projections(backend: CpuBackend, rows: tuple[int, int], threads: int, kind: str) -> None:
    torch.set_num_threads(threads)
    norm, scale = spec.Norm("rms", 1e-5), torch.rand(96) + 0.5
    x, more = torch.randn(*rows, 96), torch.randn(*rows, 64)
    three = [matrix(backend, 96, outputs, seed, kind) for seed, outputs in enumerate((64, 32, 37))]
    plain = backend.norm(norm, scale, None)(x)
    got = backend.fused_linear(three, b.NormPrologue(norm, scale), None)(x, None)
    assert all(torch.equal(one, kernel(plain)) for one, kernel in zip(got, three, strict=True))
    (summed,) = backend.fused_linear(three[:1], None, None)(x, more)
    assert torch.equal(summed, three[0](x) + more)
    two = [matrix(backend, 96, 48, seed, kind) for seed in (7, 8)]
    (gated,) = backend.fused_linear(two, b.NormPrologue(norm, scale), "silu")(x, None)
    assert torch.equal(gated, backend.gated("silu")(two[0](plain), two[1](plain)))


def test_what_does_not_go_together_is_declined(backend: CpuBackend) -> None:
    one = matrix(backend, 64, 32, 1)
    for matrices, act in (([lambda x: x], None), ([one, one], "gelu"), ([one] * 4, None), ([one], "silu")):
        with pytest.raises(Unsupported):
            backend.fused_linear(matrices, None, act)  # type: ignore[arg-type]
    with pytest.raises(Unsupported):
        backend.fused_linear([one], b.NormPrologue(spec.Norm("layer", 1e-5), torch.ones(64)), None)
    assert isinstance(one, PackedLinear)


def made_up(folder: Path, shape: str) -> Model:
    config = Config(write_model_folder(folder, SHAPES[shape], 512))
    config.device, config.max_seq_len = "cpu", 512
    model = Model(config)
    model.open_checkpoint = lambda frozen: SyntheticCheckpoint(frozen.spec, synthetic_format("gguf"))
    model.load()
    return model


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("tiny", Cache),
        ("tiny", partial(Cache, dtype="float32")),
        ("tiny", CacheQ8),
        ("tiny", CacheQ4),
        ("tiny-moe", Cache),
    ],
)
def test_whole_layers_say_what_plain_blocks_say(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    kind: Callable[..., CacheBase],
) -> None:
    monkeypatch.setenv("EXLM_CPU", "1")
    model = made_up(tmp_path_factory.mktemp("tiny"), shape)
    decoder = model._require_loaded().decoder
    if not isinstance(decoder.blocks[0], FusedBlock):
        pytest.skip(f"no C kernels here: {model.explain().splitlines()[0]}")
    whole = [block.fused_layer is not None for block in decoder.blocks if isinstance(block, FusedBlock)]
    assert whole == [shape == "tiny"] * 2  # of mixtures, attention alone is fused
    assert isinstance(decoder.head, FusedHead)
    assert (decoder.fused is not None) == (shape == "tiny")
    answers = []
    for way in ("at once", "layer by layer", "plainly"):
        if way == "layer by layer":
            decoder.fused = None
        if way == "plainly":
            decoder.blocks = [block.block for block in decoder.blocks if isinstance(block, FusedBlock)]
            assert all(isinstance(block, Block) for block in decoder.blocks)
            head = decoder.head
            decoder.head = Head(head.norm, head.linear, head.scale, head.softcap)
        cache, ids = kind(model, max_seq_len=256), torch.arange(40)[None] * 7 % 512
        model.forward(ids[:, :30], cache, preprocess_only=True)
        answers.append(torch.cat([model.forward(ids[:, i : i + 1], cache) for i in range(30, 40)], 1))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("kind", [Cache, partial(Cache, dtype="float16"), CacheQ8])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 230), (3, 70)])
def test_prompts_are_whole_layers_too(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[..., CacheBase],
    rows: int,
    tokens: int,
) -> None:
    monkeypatch.setenv("EXLM_CPU", "1")
    model = made_up(tmp_path_factory.mktemp("tiny"), "tiny")
    decoder = model._require_loaded().decoder
    fused = [block for block in decoder.blocks if isinstance(block, FusedBlock)]
    if not fused:
        pytest.skip(f"no C kernels here: {model.explain().splitlines()[0]}")
    ids = torch.arange(rows * tokens).view(rows, -1) * 7 % 512
    answers = []
    for way in ("at once", "layer by layer", "plainly"):
        if way == "layer by layer":
            decoder.fused = None
        if way == "plainly":
            decoder.blocks = [block.block for block in fused]
        cache = kind(model, batch_size=rows, max_seq_len=256)
        model.forward(ids[:, :-2], cache, preprocess_only=True)
        behind = model.forward(ids[:, -2:], cache)
        answers.append((behind, model.forward(ids, kind(model, batch_size=rows, max_seq_len=256))))
    for other in answers[1:]:
        assert all(torch.equal(one, two) for one, two in zip(answers[0], other, strict=True))


def test_a_step_over_another_cache_reads_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What C was told of a cache is told again for another, and for one that takes a dead one's place."""
    monkeypatch.setenv("EXLM_CPU", "1")
    model = made_up(tmp_path, "tiny")
    if model._require_loaded().decoder.fused is None:
        pytest.skip(f"no C kernels here: {model.explain().splitlines()[0]}")
    ids = torch.arange(40)[None] * 7 % 512
    whole = model.forward(ids, Cache(model, max_seq_len=256))
    kept, other = Cache(model, max_seq_len=256), Cache(model, max_seq_len=256)
    for i in range(40):
        if i == 20:
            other.current_seq_len = 0
            for layer in kept.layers:  # what is moved or copied lies elsewhere
                layer.kv_pages = layer.clone().kv_pages
        fresh = Cache(model, max_seq_len=256)
        for cache, past in ((kept, i), (other, i % 20), (fresh, 0)):
            cache.current_seq_len = past
            said = model.forward(ids[:, past : past + 1], cache)
            assert torch.allclose(said, whole[:, past : past + 1], atol=1e-3), (i, past)
        del fresh


def test_a_stack_is_gone_once_a_module_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXLM_CPU", "1")
    model = made_up(tmp_path, "tiny")
    decoder = model._require_loaded().decoder
    if decoder.fused is None:
        pytest.skip(f"no C kernels here: {model.explain().splitlines()[0]}")
    ids, seen = torch.arange(1, 5)[None], []

    def changed(module: Any) -> Any:
        return SimpleNamespace(forward=lambda x, batch: seen.append(x.shape) or module.forward(x, batch))

    before = model.forward(ids, Cache(model, max_seq_len=256))
    decoder.replace("layers.1.mlp.down", changed)
    assert torch.equal(model.forward(ids, Cache(model, max_seq_len=256)), before)
    assert len(seen) == 1


def test_a_head_whose_matrix_was_replaced_uses_the_new_one() -> None:
    x, batch, same = torch.randn(2, 1, 8), SimpleNamespace(adapters=()), SimpleNamespace()
    same.forward = lambda x, _: x
    made: Any = (lambda x, _: (x, 2 * x), same, 3.0, None)
    fused: Any = FusedHead(Head(*made), lambda x, _: [2 * x], 4)
    assert torch.equal(fused.forward(x, x, batch)[0], 12 * x)
    assert torch.equal(fused.forward(x, x, batch)[1], 2 * x)
    fused.linear = SimpleNamespace(forward=lambda x, _: -x)
    assert torch.equal(fused.forward(x, None, batch)[0], -6 * x)
