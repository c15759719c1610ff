"""Quantised models: real files against reference outputs, generated ones against dense models."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exlm import Cache, Config, Model
from exlm.formats import PackedWeight, PlainScales, exl2, gptq
from tests import tiny
from tests.checkpoint import gguf_bytes, gguf_models
from tests.model.random_quantized import random_exl2, random_gptq, replace_matrices
from tests.models import zoo

EXL2 = ["2.5bpw", "4.0bpw", "6.0bpw", "8.0bpw"]
PERPLEXITY = {"2.5bpw": 49.50, "4.0bpw": 47.02, "6.0bpw": 46.90, "8.0bpw": 46.89}
GPTQ = {"g128-sym": 47.56, "g128-act": 47.79}
GPTQMODEL = ["w2-g32", "w3-g32", "w4-g128", "w4-g128-act", "w4-g32-v2", "w8-g32"]


def load(folder: Path) -> Model:
    model = Model(Config(folder))
    model.load()
    return model


def plain(folder: Path) -> Model:
    """In plain torch, which multiplies with exactly the weights that a format defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXLM_CPU", "0")
        return load(folder)


def greedy(model: Model, ids: Tensor, count: int) -> list[int]:
    cache, out = Cache(model, max_seq_len=ids.shape[1] + count), []
    logits = model.forward(ids, cache, last_id_only=True)
    for _ in range(count):
        out.append(int(logits[0, -1].argmax()))
        logits = model.forward(torch.tensor([out[-1:]]), cache) if len(out) < count else logits
    return out


def perplexity(model: Model, fixtures: Path) -> float:
    held_out = load_file(fixtures / "reference" / "heldout_ids.safetensors")
    loss = 0.0
    for row in next(iter(held_out.values())).flatten()[:4096].view(8, 512).long():
        shares = model.forward(row[None])[0, :-1].log_softmax(-1)
        loss -= float(shares.gather(1, row[1:, None]).sum())
    return math.exp(loss / (8 * 511))


@pytest.mark.parametrize(
    ("name", "reference", "limit", "ppl"),
    [(f"tiny-lm-exl2-{b}", f"exl2-{b}", 4e-3, PERPLEXITY[b]) for b in EXL2]
    + [(f"tiny-lm-gptq-{g}", f"gptq-{g}", 1e-3, ppl) for g, ppl in GPTQ.items()],
)
def test_real_files(fixtures_dir: Path, name: str, reference: str, limit: float, ppl: float) -> None:
    want = load_file(fixtures_dir / "reference" / f"{reference}.safetensors")
    model = load(fixtures_dir / name)
    ids, tail = want["input_ids"].long(), want["logits_tail"].float()
    got = model.forward(ids)[0, -16:, :2048]
    assert float((got - tail).norm() / tail.norm()) < limit
    assert torch.equal(got.argmax(-1), tail.argmax(-1))
    assert greedy(model, ids[:, :32], 48) == want["greedy_48"].flatten().tolist()
    assert perplexity(model, fixtures_dir) == pytest.approx(ppl, abs=0.01)


@pytest.mark.parametrize("name", GPTQMODEL)
@pytest.mark.parametrize(("way", "limit"), [(plain, 1e-5), (load, 1e-3)])
def test_real_files_of_another_tool(fixtures_dir: Path, name: str, way: Any, limit: float) -> None:
    """The CPU kernels skip rounding each weight to float16, which is 2e-4 of a product."""
    want = load_file(fixtures_dir / "reference" / f"gptqmodel-{name}.safetensors")
    model = way(fixtures_dir / f"gptqmodel-{name}")
    ids = want["input_ids"].long().view(1, -1)
    logits = want["logits_dequant_fp32"]
    assert float((model.forward(ids)[0] - logits).norm() / logits.norm()) < limit
    greedy_ids = want["greedy"].flatten().tolist()
    count = len(greedy_ids) - ids.shape[1]
    assert greedy(model, ids, count) == greedy_ids[-count:]


def assert_same_logits(folder: Path, dense_folder: Path) -> None:
    ids = torch.randint(3, 60, (2, 40))
    got, want = plain(folder).forward(ids), plain(dense_folder).forward(ids)
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize(("write", "make"), [(exl2.write, random_exl2), (gptq.write, random_gptq)])
def test_a_quantised_model_equals_its_dense_model(tmp_path: Path, write: Any, make: Any) -> None:
    folder = tiny.make(tmp_path / "model", hidden_size=64, intermediate_size=128)
    replace_matrices(folder, tmp_path / "dense", write, make, r"_proj\.weight|lm_head")
    assert_same_logits(folder, tmp_path / "dense")


def test_explain_has_the_same_order_each_time(tmp_path: Path) -> None:
    """Several threads bind the matrices."""
    folder = tiny.make(tmp_path, hidden_size=64, intermediate_size=128)
    replace_matrices(folder, None, exl2.write, random_exl2, r"_proj\.weight")
    explanations = [load(folder).explain() for _ in range(5)]
    assert "layers.1.mlp.down: " in explanations[0]
    assert len(set(explanations)) == 1


def test_fused_tensors_are_split(tmp_path: Path) -> None:
    folder = zoo.build("Phi3ForCausalLM", tmp_path / "model").folder
    replace_matrices(folder, tmp_path / "dense", gptq.write, random_gptq, r"(qkv|gate_up|o|down)_proj\.weight")
    assert_same_logits(folder, tmp_path / "dense")


def test_a_quantised_head_wins_over_the_tie(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", hidden_size=64, tie_word_embeddings=True)
    replace_matrices(folder, tmp_path / "dense", exl2.write, random_exl2, "lm_head")
    assert_same_logits(folder, tmp_path / "dense")


def test_head_norms_may_be_stored_for_each_head(tmp_path: Path) -> None:
    folder = zoo.build("Qwen3ForCausalLM", tmp_path / "model").folder
    ids = torch.randint(3, 60, (1, 30))
    want = load(folder).forward(ids)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "q_norm" in name or "k_norm" in name:
            tensors[name] = tensor.expand(4 if "q_norm" in name else 2, -1).contiguous()
    save_file(tensors, folder / "model.safetensors")
    torch.testing.assert_close(load(folder).forward(ids), want, rtol=1e-5, atol=1e-5)


def test_awq(tmp_path: Path) -> None:
    def write(weight: PackedWeight) -> dict[str, Tensor]:
        """AWQ's packing: eight columns of a row in its own order, lowest nibble first."""
        from exlm.formats.packed import unpack

        segment = weight.segments[0]
        assert isinstance(segment.zero, Tensor)
        assert isinstance(segment.scales, PlainScales)

        def words(codes: Tensor) -> Tensor:
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            nibbles = codes.long().view(codes.shape[0], -1, 8)[:, :, order]
            packed = sum(nibbles[:, :, i] << (4 * i) for i in range(8))
            assert isinstance(packed, Tensor)
            return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()

        codes = unpack(segment.codes, 4, weight.in_features)
        return {"qweight": words(codes), "qzeros": words(segment.zero), "scales": segment.scales.values}

    folder = tiny.make(tmp_path / "model", hidden_size=64, intermediate_size=96)
    replace_matrices(folder, tmp_path / "dense", write, random_gptq, r"_proj\.weight")
    raw = json.loads((folder / "config.json").read_text())
    quant = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": quant}))
    assert_same_logits(folder, tmp_path / "dense")


PEAK = """
import re, sys
from functools import partial
from pathlib import Path
import torch
torch.set_num_threads(1)
from exlm import Config, Model
def memory(line):
    return int(re.search(line + r':\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024
def code():  # of libraries: how much of them is in memory before they are used is the system's business
    parts = re.split(r'^(?=[0-9a-f]+-[0-9a-f]+ )', Path('/proc/self/smaps').read_text(), flags=re.M)
    return sum(int(re.search(r'Rss:\\s*(\\d+) kB', part)[1]) * 1024 for part in parts if '.so' in part)
config = Config(sys.argv[1])
config.dtype = 'float32'
before = memory('VmRSS') - code()
model = Model(config)
model.load()
print(memory('VmHWM') - code() - before)
"""


def large(folder: Path, write: Any, make: Any) -> Path:
    """Llama 3's proportions: a large vocabulary, whose embedding must not become float32."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "vocab_size": 32768, "num_hidden_layers": 12}
    tiny.make(folder, torch.float16, **sizes, num_attention_heads=8, num_key_value_heads=2)
    replace_matrices(folder, None, write, make, r"_proj\.weight|lm_head")
    return folder / "model.safetensors"


def large_gguf(path: Path) -> Path:
    """The same matrices as random blocks of Q4_1, whose scales are small; the head is the embedding."""
    blocks = np.random.default_rng(3).integers(0, 256, (32768, 1024 // 32, 20), dtype=np.uint8)
    blocks[..., :4] = np.array([0.01, -0.07], dtype=np.float16).view(np.uint8)
    whole = blocks.reshape(32768, -1)
    wide = np.tile(whole[:1024], 4)[:, : 3584 // 32 * 20]  # of 3584 inputs
    arrays: dict[str, np.ndarray[Any, Any]] = {"token_embd.weight": whole}
    for i in range(24):
        rows = {"attn_q": 1024, "attn_k": 256, "attn_v": 256, "attn_output": 1024}
        rows |= {"ffn_gate": 3584, "ffn_up": 3584}
        arrays |= {f"blk.{i}.{name}.weight": whole[:count] for name, count in rows.items()}
        arrays[f"blk.{i}.ffn_down.weight"] = wide
    kinds = dict.fromkeys(arrays, gguf.GGMLQuantizationType.Q4_1)
    norms = [f"blk.{i}.{part}_norm.weight" for i in range(24) for part in ("attn", "ffn")]
    arrays |= dict.fromkeys([*norms, "output_norm.weight"], np.ones(1024, dtype=np.float32))
    sizes = {"block_count": 24, "embedding_length": 1024, "feed_forward_length": 3584}
    sizes |= {"attention.head_count": 8, "attention.head_count_kv": 2, "rope.dimension_count": 128}
    values = {f"llama.{key}": value for key, value in (gguf_models.COMMON | sizes).items()}
    values["tokenizer.ggml.tokens"] = [str(n) for n in range(32768)]
    return gguf_bytes.write_gguf(path, "llama", arrays, values, kinds)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", ["exl2", "gptq", "gguf"])
def test_peak_memory_is_that_of_the_file(tmp_path: Path, form: str) -> None:
    """Also while loading: with the CPU kernels, which repack every matrix, and without them."""
    if form == "gguf":
        model = file = large_gguf(tmp_path / "model.gguf")
    else:
        how = (exl2.write, random_exl2) if form == "exl2" else (gptq.write, partial(random_gptq, group=128))
        file = large(tmp_path / "model", *how)
        model = file.parent
    run = [sys.executable, "-c", PEAK, str(model)]
    for kernels in "01":
        env = {**os.environ, "EXLM_CPU": kernels}
        done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300, env=env)
        assert file.stat().st_size > 150e6
        assert int(done.stdout) < 1.2 * file.stat().st_size
