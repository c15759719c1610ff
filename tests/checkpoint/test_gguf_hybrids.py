"""Hybrid models in GGUF files give the logits of their folders."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exlm import Config, Model
from exlm.checkpoint.gguf_checkpoint import GgufCheckpoint, gguf_conversion
from exlm.errors import BadFile, BadTensor, MissingTensor
from exlm.formats import PackedWeight
from exlm.spec.model import matrices
from tests.checkpoint import gguf_hybrids
from tests.checkpoint.gguf_hybrids import CASES
from tests.models import zoo

TOKENS = 120
CPU = torch.device("cpu")


def load(path: Path) -> Model:
    config = Config(path)
    config.max_seq_len = TOKENS
    model = Model(config)
    model.load()
    return model


def logits(path: Path) -> Tensor:
    ids = torch.randint(0, 100, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    return load(path).forward(ids)


def max_difference(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def build(name: str, folder: Path, **more: Any) -> tuple[zoo.Oracle, str]:
    arch, architecture, overrides = CASES[name]
    return zoo.build(architecture, folder, **{**overrides, **more}), arch


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray[Any, Any]]], None]) -> Path:
    """The same file with other tensors."""
    reader = gguf.GGUFReader(path)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path.with_name("changed.gguf"), arch)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    tensors = {one.name: one.data.reshape(tuple(reversed(one.shape.tolist()))) for one in reader.tensors}
    change(tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("changed.gguf")


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_folder(name: str, tmp_path: Path) -> None:
    oracle, arch = build(name, tmp_path / "model")
    path = gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch)
    # Granite's and Falcon-H1's numbers are rounded to float32 once more, in the metadata or the matrices.
    assert max_difference(logits(path), logits(oracle.folder)) < 5e-6
    assert load(path).config.spec.is_recurrent


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next", "nemotron_h_moe", "kimi-linear"])
def test_quantised_matrices_stay_packed(name: str, tmp_path: Path) -> None:
    """Of Qwen 3.5's output projection the inputs are in another order: it gets a permutation."""
    oracle, arch = build(name, tmp_path / "model")
    path = gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch, kind="Q8_0")
    checkpoint = GgufCheckpoint(path)
    spec = load(path).config.spec
    for role, inputs, outputs, bias in matrices(spec):
        weight = checkpoint.weight(role, inputs, outputs, bias=bias, dtype=torch.float32, device=CPU)
        if checkpoint.describe(role)[0] == "gguf Q8_0":
            assert isinstance(weight, PackedWeight), role
            has_order = weight.perm is not None
            assert has_order == (arch.startswith("qwen35") and role.endswith("delta.o")), role


@pytest.mark.parametrize("name", ["qwen35", "nemotron_h_moe-latent", "kimi-linear-low-rank-q", "lfm2"])
def test_packed_matrices_give_what_their_numbers_give(name: str, tmp_path: Path) -> None:
    oracle, arch = build(name, tmp_path / "model")
    packed = gguf_hybrids.write(oracle, tmp_path / "q.gguf", arch, kind="Q8_0")

    def dequantise(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        for one in gguf.GGUFReader(packed).tensors:
            tensors[one.name] = gguf.quants.dequantize(one.data, one.tensor_type)
            tensors[one.name] = tensors[one.name].reshape(tuple(reversed(one.shape.tolist())))

    dense = rewrite(gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch), dequantise)
    assert max_difference(logits(packed), logits(dense)) < 2e-3  # 16-bit activations


def test_prediction_layers_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    oracle, arch = build("qwen35", tmp_path / "model")
    path = gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch, draft_layers=1)
    with caplog.at_level(logging.WARNING):
        found = logits(path)
    assert not caplog.records
    assert max_difference(found, logits(oracle.folder)) < 5e-6


def test_the_oldest_qwen3next_files_fuse_z_too(tmp_path: Path) -> None:
    oracle, arch = build("qwen3next", tmp_path / "model")
    stored = zoo_tensors(oracle)

    def fuse(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        for name in [one for one in tensors if one.endswith("attn_gate.weight")]:
            layer = name.split(".")[1]
            del tensors[name], tensors[f"blk.{layer}.attn_qkv.weight"]
            fused = stored[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
            tensors[f"blk.{layer}.ssm_in.weight"] = fused.numpy()

    path = rewrite(gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch), fuse)
    assert torch.equal(logits(path), logits(oracle.folder))


def zoo_tensors(oracle: zoo.Oracle) -> dict[str, Tensor]:
    return load_file(oracle.folder / "model.safetensors")


def test_gate_and_up_of_all_experts_may_be_one_tensor(tmp_path: Path) -> None:
    oracle, arch = build("qwen35moe", tmp_path / "model")

    def fuse(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        for name in [one for one in tensors if one.endswith("ffn_gate_exps.weight")]:
            up = name.replace("ffn_gate", "ffn_up")
            fused = np.concatenate([tensors.pop(name), tensors.pop(up)], 1)
            tensors[name.replace("ffn_gate", "ffn_gate_up")] = fused
        for name in [one for one in tensors if one.endswith("ffn_gate_inp_shexp.weight")]:
            tensors[name] = tensors[name].reshape(-1)  # one row, as a vector

    path = rewrite(gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch), fuse)
    assert torch.equal(logits(path), logits(oracle.folder))


def test_kimis_kv_b_may_be_one_matrix(tmp_path: Path) -> None:
    oracle, arch = build("kimi-linear", tmp_path / "model")
    stored = zoo_tensors(oracle)

    def fuse(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        for name in [one for one in tensors if one.endswith("attn_k_b.weight")]:
            del tensors[name], tensors[name.replace("attn_k_b", "attn_v_b")]
            layer = name.split(".")[1]
            whole = stored[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
            tensors[name.replace("attn_k_b", "attn_kv_b")] = whole.numpy()

    path = rewrite(gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch), fuse)
    assert torch.equal(logits(path), logits(oracle.folder))


def test_decays_must_be_negative(tmp_path: Path) -> None:
    oracle, arch = build("qwen35", tmp_path / "model")

    def flip(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors["blk.0.ssm_a"] = -tensors["blk.0.ssm_a"]

    path = rewrite(gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch), flip)
    with pytest.raises(BadTensor, match=r"layers\.0\.delta\.a_log must be stored as negative decays, found \d"):
        load(path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen35", "blk.1.ssm_conv1d.weight"),
        ("qwen35", "blk.0.ssm_dt.bias"),
        ("nemotron_h", "blk.0.ssm_d"),
        ("granitehybrid", "blk.0.ssm_norm.weight"),
        ("lfm2", "blk.0.shortconv.conv.weight"),
        ("kimi-linear", "blk.0.ssm_conv1d_k.weight"),
        ("kimi-linear", "blk.0.ssm_a"),
    ],
)
def test_missing_state_tensors_are_named(name: str, tensor: str, tmp_path: Path) -> None:
    oracle, arch = build(name, tmp_path / "model")
    path = rewrite(gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch), lambda tensors: tensors.pop(tensor))
    with pytest.raises(MissingTensor, match=tensor.replace(".", r"\.")):
        load(path)


def test_a_state_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    oracle, arch = build("nemotron_h", tmp_path / "model")

    def cut(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors["blk.0.ssm_a"] = tensors["blk.0.ssm_a"][:4]

    path = rewrite(gguf_hybrids.write(oracle, tmp_path / "m.gguf", arch), cut)
    with pytest.raises(BadTensor, match=r"blk\.0\.ssm_a.*expected shape \[6\].*found \[4, 1\]"):
        load(path)


def test_groups_that_do_not_divide_the_heads_are_refused() -> None:
    metadata = {"general.architecture": "qwen35", "qwen35.embedding_length": 64, "qwen35.attention.head_count": 4}
    sizes = {"group_count": 3, "time_step_rank": 4, "state_size": 16, "inner_size": 96}
    with pytest.raises(BadFile, match=r"qwen35\.ssm\.group_count to divide time_step_rank.*found 3, 4 and 96"):
        gguf_conversion(metadata | {f"qwen35.ssm.{key}": value for key, value in sizes.items()}, "m.gguf")
