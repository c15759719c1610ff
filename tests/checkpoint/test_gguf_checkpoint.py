"""The roles of a GGUF file: tensors of every architecture are read as the model needs them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from exlm import spec
from exlm.checkpoint import SafetensorsCheckpoint
from exlm.checkpoint.gguf_checkpoint import GgufCheckpoint
from exlm.errors import BadFile, BadTensor, MissingTensor
from exlm.families import ConfigReader, build_spec
from exlm.families.gguf import config_from_metadata
from exlm.formats import DenseWeight, PackedWeight
from exlm.kernels.dispatch import backends_for
from exlm.kvcache import NoCache
from exlm.model.builder import Builder
from exlm.model.decoder import Decoder
from exlm.nn.batch import Batch
from exlm.spec.model import matrices
from tests import tiny
from tests.checkpoint import gguf_models
from tests.checkpoint.gguf_bytes import write_gguf

CPU = torch.device("cpu")
F32 = torch.float32


def weight(checkpoint: GgufCheckpoint, role: str, inputs: int, outputs: int, **options: Any) -> Any:
    options = {"bias": False, "dtype": F32, "device": CPU, **options}
    return checkpoint.weight(role, inputs, outputs, **options)


@pytest.mark.parametrize("variant", gguf_models.VARIANTS)
def test_every_role_comes_back(variant: str, tmp_path: Path) -> None:
    model, roles = gguf_models.write_model(tmp_path / "m.gguf", variant)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    for role, inputs, outputs, bias in matrices(model):
        assert checkpoint.has(role)
        found = weight(checkpoint, role, inputs, outputs, bias=bias)
        assert torch.equal(found.dequantize(), roles[role].T), role
        assert (found.bias is not None) == bias
        if bias:
            assert torch.equal(found.bias, roles[role + ":bias"])
    norms = [role for role, tensor in roles.items() if tensor.dim() == 1 and ":" not in role]
    assert len(norms) > 2 * len(model.layers)
    for role in [*norms, "embed"]:
        found = checkpoint.tensor(role, tuple(roles[role].shape), dtype=F32, device=CPU, finite=True)
        torch.testing.assert_close(found, roles[role], rtol=0, atol=1e-6 if "gemma" in variant else 0)
    assert checkpoint.unused() == []


@pytest.mark.parametrize(("variant", "reordered"), [("llama", True), ("qwen2", False)])
def test_biases_of_q_and_k_are_ordered_as_their_matrices(variant: str, reordered: bool, tmp_path: Path) -> None:
    bias = torch.arange(64.0)
    pairs = bias.view(4, 2, 8).swapaxes(1, 2).flatten()  # heads of 16: each pair of halves side by side

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["blk.0.attn_q.bias"] = pairs if reordered else bias

    checkpoint = rewrite_tensors(tmp_path / "m.gguf", variant, add)
    found = weight(checkpoint, "layers.0.attn.q", 64, 64, bias=True, dtype=torch.float16)
    assert torch.equal(found.bias, bias.half())


def test_old_files_store_experts_separately(tmp_path: Path) -> None:
    model, roles = gguf_models.write_model(tmp_path / "m.gguf", "mixtral", stack=False)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    for role, inputs, outputs, _ in matrices(model):
        assert torch.equal(weight(checkpoint, role, inputs, outputs).dequantize(), roles[role].T), role


@pytest.mark.parametrize("variant", ["llama", "phi3", "qwen2"])
def test_quantised_matrices_stay_packed(variant: str, tmp_path: Path) -> None:
    model, roles = gguf_models.write_model(tmp_path / "m.gguf", variant, kind="Q8_0")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    for role, inputs, outputs, bias in matrices(model):
        found = weight(checkpoint, role, inputs, outputs, bias=bias)
        assert isinstance(found, PackedWeight)
        assert found.format_name == "gguf Q8_0"
        assert checkpoint.describe(role)[0] == "gguf Q8_0"
        torch.testing.assert_close(found.dequantize(), roles[role].T, rtol=0, atol=5e-3)
    stored, nbytes = checkpoint.describe("embed")
    assert (stored, nbytes) == ("gguf Q8_0", model.vocab * model.hidden // 32 * 34)
    half = checkpoint.tensor("embed", (model.vocab, model.hidden), dtype=torch.float16, device=CPU)
    exact = weight(checkpoint, "embed", model.hidden, model.vocab, dtype=None).dequantize()
    assert torch.equal(half, exact.T.half())


def test_bytes_of_fused_roles_add_up_to_the_tensor(tmp_path: Path) -> None:
    model, _ = gguf_models.write_model(tmp_path / "m.gguf", "phi3")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    parts = [checkpoint.describe(f"layers.0.attn.{part}")[1] for part in "qkv"]
    assert sum(parts) == checkpoint.files.tensors["blk.0.attn_qkv.weight"].nbytes
    stacked, _ = gguf_models.write_model(tmp_path / "e.gguf", "mixtral")
    checkpoint = GgufCheckpoint(tmp_path / "e.gguf")
    assert checkpoint.describe("layers.0.mlp.experts.1.up") == ("dense float32", 4 * model.hidden * 96)
    assert stacked.hidden == model.hidden


def test_a_tensor_scale_is_applied(tmp_path: Path) -> None:
    """NVFP4 has 8-bit scales, and a float scale for the whole matrix or expert."""
    model = gguf_models.model_spec("mixtral")
    roles = gguf_models.random_tensors(model)
    arrays = {name: one.numpy() for name, one in gguf_models.converted_tensors(model, "llama", roles).items()}
    kind = gguf.GGMLQuantizationType.NVFP4
    plain = np.random.default_rng(3).integers(0, 0x70, (32, 36), np.uint8)
    arrays["blk.0.attn_v.weight"] = plain
    arrays |= {"blk.0.attn_v.scale": np.array([0.25], np.float32)}
    arrays |= {"blk.0.ffn_up_exps.scale": np.array([1, 2, 3], np.float32)}
    arrays |= {"blk.0.ffn_down_exps.scale": np.array([1, 2], np.float32)}
    values = {key: one for key, one in gguf_models.metadata("mixtral").items() if key[:8] != "general."}
    write_gguf(tmp_path / "m.gguf", "llama", arrays, values, {"blk.0.attn_v.weight": kind})
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    found = weight(checkpoint, "layers.0.attn.v", 64, 32).dequantize()
    assert torch.equal(found, 0.25 * torch.from_numpy(gguf.quants.dequantize(plain, kind)).T)
    for expert in range(3):
        role = f"layers.0.mlp.experts.{expert}.up"
        assert torch.equal(weight(checkpoint, role, 64, 96).dequantize(), (expert + 1) * roles[role].T)
    with pytest.raises(BadTensor, match=r"expected shape \[3\] for the factor of .*found \[2\]"):
        weight(checkpoint, "layers.0.mlp.experts.0.down", 96, 64)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model, roles = gguf_models.write_model(tmp_path / "m.gguf", "gemma", kind="Q8_0", leave_out=("output.weight",))
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    assert model.head.tied
    assert not checkpoint.has("head")
    head = weight(checkpoint, "head", model.hidden, model.vocab, fallback="embed")
    assert isinstance(head, PackedWeight)
    torch.testing.assert_close(head.dequantize(), roles["embed"].T, rtol=0, atol=5e-3)
    builder = Builder(model, checkpoint, [backends_for(CPU, F32)] * (len(model.layers) + 2), 32)
    decoder = list(builder.build())[-1]
    assert decoder.head.linear.out_features == model.vocab
    with pytest.raises(MissingTensor, match=r"head is missing: expected 'output\.weight'"):
        weight(checkpoint, "head", model.hidden, model.vocab)


def test_a_tied_head_has_its_own_bias(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["output.bias"] = torch.arange(len(tensors.pop("output.weight")), dtype=F32)

    checkpoint = rewrite_tensors(tmp_path / "m.gguf", "llama", change)
    head = weight(checkpoint, "head", 64, 64, bias=True, fallback="embed")
    assert torch.equal(head.bias, torch.arange(64.0))


def _logits(model: Any, checkpoint: Any) -> torch.Tensor:
    decoder = list(Builder(model, checkpoint, [backends_for(CPU, F32)] * (len(model.layers) + 2), 64).build())[-1]
    return _logits_of(model, decoder, torch.arange(20).view(2, 10))


def _logits_of(model: spec.Model, decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Logits of rows without cached tokens."""
    rows, tokens = ids.shape
    none = torch.zeros(rows, 1, dtype=torch.long)
    batch = Batch(
        ids=ids,
        positions=torch.arange(tokens).expand(rows, tokens),
        past_lens=none[:, 0],
        page_table=none,
        max_kv_len=tokens,
        uniform=True,
    )
    logits, _ = decoder.forward(batch, [NoCache()] * len(model.layers))
    assert logits is not None
    return logits


def test_a_gguf_model_gives_the_logits_of_its_folder(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "folder")
    model = build_spec(ConfigReader(tiny.CONFIG))
    files = SafetensorsCheckpoint(folder, model.names)
    roles = {role: files.weight(role, k, n, bias=b, dtype=F32, device=CPU) for role, k, n, b in matrices(model)}
    by_role = {role: one.dequantize().T for role, one in roles.items()}
    by_role["embed"] = files.tensor("embed", (64, 32), dtype=F32, device=CPU)
    for role in ("final_norm", *(f"layers.{i}.{name}" for i in (0, 1) for name in ("attn_norm", "mlp_norm"))):
        by_role[role] = files.tensor(role, (32,), dtype=F32, device=CPU)
    tensors = gguf_models.converted_tensors(model, "llama", by_role)
    values = {
        "llama.embedding_length": 32,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.feed_forward_length": 48,
    }
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
    converted = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", arrays, values))
    assert torch.equal(_logits(model, converted), _logits(model, files))


def rewrite_tensors(path: Path, variant: str, change: Any) -> GgufCheckpoint:
    """A tiny model's file with some tensors changed."""
    model, roles = gguf_models.write_model(path, variant)
    tensors = gguf_models.converted_tensors(model, gguf_models.VARIANTS[variant][0], roles)
    change(tensors)
    values = {key: one for key, one in gguf_models.metadata(variant).items() if key != "general.architecture"}
    arrays = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
    return GgufCheckpoint(write_gguf(path, gguf_models.VARIANTS[variant][0], arrays, values))


def test_a_missing_role_is_named(tmp_path: Path) -> None:
    checkpoint = rewrite_tensors(tmp_path / "m.gguf", "qwen2", lambda t: t.pop("blk.1.attn_k.bias"))
    with pytest.raises(MissingTensor, match=r"the bias of layers\.1\.attn\.k is missing.*'blk\.1\.attn_k\.bias'"):
        weight(checkpoint, "layers.1.attn.k", 64, 32, bias=True)
    with pytest.raises(MissingTensor, match=r"'blk\.7\.ffn_up\.weight'"):
        weight(checkpoint, "layers.7.mlp.up", 64, 96)


def test_an_unexpected_bias_is_refused_unless_zero(tmp_path: Path) -> None:
    def add(value: float) -> Any:
        return lambda tensors: tensors.update({"blk.0.ffn_up.bias": torch.full((96,), value)})

    silent = rewrite_tensors(tmp_path / "a.gguf", "llama", add(0.0))
    assert weight(silent, "layers.0.mlp.up", 64, 96).bias is None
    loud = rewrite_tensors(tmp_path / "b.gguf", "llama", add(0.5))
    with pytest.raises(BadTensor, match="found 96 of 96 not zero"):
        weight(loud, "layers.0.mlp.up", 64, 96)


@pytest.mark.parametrize(
    ("variant", "role", "inputs", "outputs"),
    [
        ("llama", "layers.0.mlp.up", 64, 95),
        ("llama", "layers.0.mlp.up", 32, 96),
        ("phi3", "layers.0.mlp.up", 64, 95),
        ("phi3", "layers.0.attn.v", 64, 16),
        ("mixtral", "layers.0.mlp.experts.2.down", 96, 63),
        ("mixtral", "layers.0.mlp.experts.3.down", 96, 64),
    ],
)
def test_shapes_are_checked(variant: str, role: str, inputs: int, outputs: int, tmp_path: Path) -> None:
    gguf_models.write_model(tmp_path / "m.gguf", variant)
    with pytest.raises(BadTensor, match="expected shape"):
        weight(GgufCheckpoint(tmp_path / "m.gguf"), role, inputs, outputs)


def test_tensors_are_checked(tmp_path: Path) -> None:
    def add_wrong_tensors(tensors: dict[str, torch.Tensor]) -> None:
        tensors["output_norm.weight"][3] = float("nan")
        tensors["token_embd.weight"][5, 5] = 1e6

    checkpoint = rewrite_tensors(tmp_path / "m.gguf", "llama", add_wrong_tensors)
    with pytest.raises(BadTensor, match="expected finite values"):
        checkpoint.tensor("final_norm", (64,), dtype=F32, device=CPU, finite=True)
    with pytest.raises(BadTensor, match=r"expected shape \[63\] or \[2, 64\] for final_norm, found \[64\]"):
        checkpoint.tensor("final_norm", ((63,), (2, 64)), dtype=F32, device=CPU)
    with pytest.raises(BadTensor, match=r"found \[64, 64\]\. The metadata describes another model"):
        checkpoint.tensor("embed", (65, 64), dtype=F32, device=CPU)
    with pytest.raises(BadTensor, match="1 of 4096 values are too large for float16"):
        checkpoint.tensor("embed", (64, 64), dtype=torch.float16, device=CPU)
    dense = weight(checkpoint, "layers.0.mlp.up", 64, 96, dtype=torch.bfloat16)
    assert isinstance(dense, DenseWeight)
    assert dense.data.dtype is torch.bfloat16


def test_what_is_read_shares_no_memory_with_the_file(tmp_path: Path) -> None:
    model, roles = gguf_models.write_model(tmp_path / "m.gguf", "llama")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    up = weight(checkpoint, "layers.0.mlp.up", 64, 96, dtype=None)
    checkpoint.files.view("blk.0.ffn_up.weight").zero_()
    assert torch.equal(up.data, roles["layers.0.mlp.up"])
    assert model.layers[0].mlp.width == 96


def test_unused_tensors_are_listed(tmp_path: Path) -> None:
    checkpoint = rewrite_tensors(tmp_path / "m.gguf", "llama", lambda t: t.update({"strange": torch.zeros(4)}))
    weight(checkpoint, "head", 64, 64)
    unused = checkpoint.unused()
    assert "strange" in unused
    assert "output.weight" not in unused


@pytest.mark.parametrize("missing", ["llama.embedding_length", "llama.attention.head_count"])
def test_metadata_without_widths_is_refused(missing: str, tmp_path: Path) -> None:
    values = {"llama.embedding_length": 32, "llama.attention.head_count": 4}
    values.pop(missing)
    path = write_gguf(tmp_path / "m.gguf", "llama", {"x": np.zeros(4, dtype=np.float32)}, values)
    with pytest.raises(BadFile, match=missing):
        GgufCheckpoint(path)


@pytest.mark.weights
def test_smollm2(fixtures_dir: Path) -> None:
    """Prompts and the reference's greedy answers in one pass each: the same choice wherever it was clear."""
    path = os.environ.get("EXLM_SMOLLM2")
    if not path:
        pytest.skip("point EXLM_SMOLLM2 at SmolLM2-135M-Instruct.Q4_1.gguf")
    checkpoint = GgufCheckpoint(path)
    config = config_from_metadata(checkpoint.files.metadata, path, tensors=checkpoint.files.tensors)
    model = build_spec(ConfigReader(config, path))
    decoder = list(Builder(model, checkpoint, [backends_for(CPU, F32)] * (len(model.layers) + 2), 256).build())[-1]
    assert checkpoint.unused() == []
    for case in json.loads((fixtures_dir / "reference" / "smollm2.json").read_text())["cases"]:
        prompt, answer = case["input_ids"], case["greedy_ids_64"]
        logits = _logits_of(model, decoder, torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
        for number, value in case["first_step_top5"]:
            assert float(logits[0, number]) == pytest.approx(value, abs=0.1)
        best = logits.topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > 0.05
        assert int(clear.sum()) > 50
        assert torch.equal(best.indices[clear, 0], torch.tensor(answer)[clear])
