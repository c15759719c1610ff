"""Named shapes: their published sizes, folders that their families load, and the bytes that a step reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import stored_tensors
from benchmarks.synthetic import write_dense, write_exl2, write_gptq
from exlm import Cache, Config, Generator, Model, Settings, Tokenizer
from exlm.bench import benchmark
from exlm.bench.benchmark import BenchmarkConfig, run
from exlm.bench.shapes import SHAPES, Mamba, Shape
from exlm.bench.synthetic import SyntheticCheckpoint, synthetic_format, write_model_folder
from exlm.spec.model import matrices

PUBLISHED = {
    "llama-2-7b": 6.74,
    "llama-3-8b": 8.03,
    "mixtral-8x7b": 46.70,
    "qwen3-30b-a3b": 30.53,
    "qwen3.5-27b": 26.90,
    "qwen3.6-35b-a3b": 34.66,
    "qwen3-next-80b-a3b": 79.67,
    "nemotron-nano-9b": 8.89,
    "granite-4-h-tiny": 6.94,
    "lfm2-1.2b": 1.17,
}
"""Billions of weights of each shape."""

DELTA: dict[str, Any] = {"head": 32, "key_heads": 2, "value_heads": 6, "state_dim": 32}
EXPERTS: dict[str, Any] = {"mlp": 64, "experts": 4, "active": 2, "shared": 96}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5-27b": {"layers": 8, "mlp": 224, **DELTA},
    "qwen3.6-35b-a3b": {"layers": 4, **EXPERTS, **DELTA},
    "qwen3-next-80b-a3b": {"layers": 4, **EXPERTS, **DELTA},
    "nemotron-nano-9b": {"layers": 6, "mlp": 224, "head": 32, "pattern": "M-M*-M", "mamba": Mamba(8, 32, 2, 16)},
    "granite-4-h-tiny": {"layers": 4, "attended": (2,), **EXPERTS, "mamba": Mamba(8, 32, 1, 16)},
    "lfm2-1.2b": {"layers": 4, "mlp": 256, "attended": (1, 3)},
}
"""How each hybrid shape is scaled down."""

WRITERS: dict[str, Callable[[Path, Shape], Path]] = {"exl2": write_exl2, "gptq": write_gptq, "dense": write_dense}


def scaled_down(name: str) -> Shape:
    """The hybrid shape with small sizes."""
    return replace(SHAPES[name], hidden=128, heads=4, kv_heads=2, vocab=320, positions=512, **HYBRIDS[name])


def num_stored_weights(shape: Shape) -> tuple[int, int]:
    """The numbers in the stored tensors: in matrices of layers, and in all tensors."""
    layers = range(shape.layers)
    packed = sum(one.inputs * one.outputs for i in layers for one in stored_tensors.matrices(shape, i))
    floats = [one for i in layers for one in stored_tensors.floats(shape, i)]
    in_matrices = packed + sum(math.prod(one.shape) for one in floats if one.values == "matrix")
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return in_matrices, packed + sum(math.prod(one.shape) for one in floats) + tables + shape.hidden


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_weights(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    model = Config(write_model_folder(tmp_path, shape, 64)).freeze().spec
    in_layers = sum(one.in_features * one.out_features for one in matrices(model) if one.role != "head")
    in_matrices, total = num_stored_weights(shape)
    assert in_layers == in_matrices
    assert (model.vocab, model.hidden, len(model.layers)) == (shape.vocab, shape.hidden, shape.layers)
    if name in PUBLISHED:
        assert total / 1e9 == pytest.approx(PUBLISHED[name], abs=0.01)


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_written_hybrid_loads_and_generates(tmp_path: Path, name: str, form: str) -> None:
    shape = scaled_down(name)
    folder = WRITERS[form](tmp_path / "model", shape)
    config = Config(folder)
    config.device, config.dtype = "cpu", "float32"
    frozen = config.freeze()
    assert frozen.spec.is_recurrent
    source = frozen.open_checkpoint()
    stored = {source.describe(one.role)[0].split()[0] for one in matrices(frozen.spec) if one.role != "head"}
    assert stored | {"dense"} == {"dense", form}
    assert form in stored
    model, tokenizer = Model(config), Tokenizer(config)
    model.load()
    assert_generates(model, tokenizer)


@pytest.mark.parametrize("form", ["exl2", "gptq", "gguf", "dense"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_without_files_loads_and_generates(tmp_path: Path, name: str, form: str) -> None:
    config = Config(write_model_folder(tmp_path, scaled_down(name), 512))
    config.device, config.dtype = "cpu", "float32"
    model, tokenizer = Model(config), Tokenizer(config)
    model.open_checkpoint = lambda frozen: SyntheticCheckpoint(frozen.spec, synthetic_format(form))
    model.load()
    assert_generates(model, tokenizer)


def assert_generates(model: Model, tokenizer: Tokenizer) -> None:
    """Logits are finite and differ between tokens; a generator continues with what they say."""
    ids = torch.arange(30, 60)[None]
    logits = model.forward(ids, Cache(model, max_seq_len=256))
    assert bool(logits.isfinite().all())
    assert len(set(logits[0].argmax(-1).tolist())) > 1
    assert 0.1 < float(logits.std()) < 30
    wanted, cache = [], Cache(model, max_seq_len=256)
    for _ in range(6):
        ids = model.forward(ids, cache, last_id_only=True)[:, -1].argmax(-1, keepdim=True)
        wanted.append(int(ids))
    generator = Generator(model, Cache(model, max_seq_len=256), tokenizer, max_batch_size=2)
    prompt = tokenizer.decode(torch.arange(30, 60))
    assert torch.equal(tokenizer.encode(prompt), torch.arange(30, 60)[None])
    text = generator.generate(prompt, 6, gen_settings=Settings.greedy(), completion_only=True, stop_conditions=[])
    assert text == tokenizer.decode(torch.tensor(wanted))


def test_a_stored_matrix_of_several_is_quantised_as_one(tmp_path: Path) -> None:
    shape = scaled_down("qwen3.5-27b")
    model = Config(write_model_folder(tmp_path, shape, 64)).freeze().spec
    made, checkpoint = synthetic_format("exl2"), SyntheticCheckpoint(model, synthetic_format("exl2"))
    sizes = {
        one.name: (one.inputs, one.outputs)
        for one in (*stored_tensors.matrices(shape, 0), *stored_tensors.matrices(shape, 3))
    }
    for name, roles in (
        ("linear_attn.in_proj_qkv", ("layers.0.delta.q", "layers.0.delta.k", "layers.0.delta.v")),
        ("self_attn.q_proj", ("layers.3.attn.q", "layers.3.attn.gate")),
    ):
        inputs, outputs = sizes[name]
        stored = sum(checkpoint.describe(role)[1] for role in roles)
        assert made.nbytes(inputs, outputs, False) - len(roles) < stored <= made.nbytes(inputs, outputs, False)
    q, gate = (
        checkpoint.weight(f"layers.3.attn.{part}", 128, 128, bias=False, dtype=None, device=torch.device("cpu"))
        for part in ("q", "gate")
    )
    assert q.describe() == gate.describe()
    assert not torch.equal(q.dequantize(), gate.dequantize())


def test_bytes_per_step_count_active_experts_only() -> None:
    shape, packed = SHAPES["tiny-moe"], synthetic_format("exl2")
    prompt, *_ = run(BenchmarkConfig(shape="tiny-moe", device="cpu", contexts=(8,), prompt=16, tokens=4)).rows
    read = packed.nbytes(shape.hidden, shape.vocab, True)
    for name, inputs, outputs in stored_tensors.matrices(shape):
        nbytes = packed.nbytes(inputs, outputs, False) * shape.layers
        read += nbytes // 2 if ".experts." in name else nbytes  # two of four
    for _, sizes, values in stored_tensors.floats(shape):
        read += 2 * math.prod(sizes) * shape.layers if values == "matrix" else 0
    assert prompt.bytes_read == read
    assert prompt.tokens_per_second is not None


def test_bytes_per_step_count_recurrent_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny-hybrid", scaled_down("qwen3.5-27b"))
    config = BenchmarkConfig(shape="tiny-hybrid", device="cpu", batches=(1, 3), contexts=(8,), prompt=16, tokens=4)
    one, three = run(config).rows[1:]
    state = 6 * (6 * 32 * 32 * 4 + 3 * (2 * 2 * 32 + 6 * 32) * 4)  # six delta nets, computing in float32
    page_token = 2 * 2 * 2 * 32 * 2  # keys and values of two layers in float16
    weights = one.bytes_read - 2 * state - page_token * 8
    assert three.bytes_read == weights + 3 * (2 * state + page_token * 8)
    assert weights > 0
    monkeypatch.setattr(benchmark, "free_bytes", lambda _: benchmark.MEMORY_RESERVE + 3 * state + 512 * page_token)
    one, three = run(config).rows[1:]
    assert one.tokens_per_second is not None
    assert three.tokens_per_second is None  # the states of three rows do not fit
