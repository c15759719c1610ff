"""Converted folders: weights keep their values, or the conversion is refused and writes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from exlm import Config, Unsupported, convert_model
from exlm.formats import exl2, gptq
from exlm.spec.model import matrices
from tests import tiny
from tests.convert.conversion_helpers import (
    AWQ_JSON,
    assert_same,
    assert_tokenizers,
    gptq_with_zero_point,
    make_quantised,
    read_config,
    read_tensors,
    update_config,
    write_awq,
)
from tests.model.random_quantized import random_exl2, random_gptq, replace_matrices
from tests.models import zoo

EXL2 = [f"tiny-lm-exl2-{bits}bpw" for bits in ("2.5", "4.0", "6.0", "8.0")]
GPTQ_V1 = [
    "tiny-lm-gptq-g128-sym",
    "tiny-lm-gptq-g128-act",
    *(f"gptqmodel-{kind}" for kind in ("w2-g32", "w3-g32", "w4-g128", "w4-g128-act", "w8-g32")),
]
GPTQ_V2 = ["gptqmodel-w4-g32-v2"]


# True files


@pytest.mark.parametrize("name", ["tiny-lm", *EXL2, *GPTQ_V1, *GPTQ_V2])
def test_forms_stay_as_they_are(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    source = fixtures_dir / name
    target = convert_model(source, tmp_path / "new", shard_bytes=2**20)
    assert_same(source, target)
    before, after = read_tensors(source), read_tensors(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    assert read_config(target) == read_config(source)
    others = {path.name for path in source.iterdir() if path.suffix != ".safetensors"}
    for file in others - {"config.json"}:
        assert (target / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("name", GPTQ_V1)
def test_gptq_zero_points_in_both_layouts(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    second = convert_model(fixtures_dir / name, tmp_path / "v2", "gptq-v2")
    assert_same(fixtures_dir / name, second)
    assert read_config(second)["quantization_config"]["checkpoint_format"] == "gptq_v2"
    first = convert_model(second, tmp_path / "v1", "gptq")
    assert_same(fixtures_dir / name, first)
    before, after = read_tensors(fixtures_dir / name), read_tensors(first)
    assert all(torch.equal(before[name], after[name]) for name in before)
    v2 = read_tensors(second)
    changed = {name.rpartition(".")[2] for name in before if not torch.equal(before[name], v2[name])}
    assert changed == {"qzeros"}


def test_gptq_config_follows_the_tensors(fixtures_dir: Path, tmp_path: Path) -> None:
    target = convert_model(fixtures_dir / "gptqmodel-w4-g32-v2", tmp_path / "v1", "gptq")
    for said in (
        read_config(target)["quantization_config"],
        json.loads((target / "quantize_config.json").read_text()),
    ):
        assert (said["checkpoint_format"], said["format"], said["bits"]) == ("gptq", "gptq", 4)


@pytest.mark.parametrize("name", [*EXL2, *GPTQ_V1, *GPTQ_V2])
def test_any_form_as_plain_floats(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    target = convert_model(fixtures_dir / name, tmp_path / "new", "dense")
    assert_same(fixtures_dir / name, target)
    assert "quantization_config" not in read_config(target)
    assert not (target / "quantize_config.json").exists()
    assert all(tensor.is_floating_point() for tensor in read_tensors(target).values())


def test_the_tokenizer_comes_along(fixtures_dir: Path, tmp_path: Path) -> None:
    source = fixtures_dir / "tiny-lm-exl2-4.0bpw"
    target = convert_model(source, tmp_path / "new")
    assert assert_tokenizers(source, target, "Once upon a time, there was 1 dog.\n")


# Built ones


# Cases that differ from these only in how rotations are scaled or how far a layer sees have nothing new here.
SCALINGS = (
    "linear",
    "dynamic",
    "yarn",
    "llama3",
    "window",
    "attention",
    "betas",
    "full",
    "mscale",
    "untruncated",
)


@pytest.mark.parametrize(
    "case", [case for case in zoo.CASES if not case.id.endswith(SCALINGS)], ids=lambda case: case.id
)
def test_every_family_gets_its_first_tensor_names(case: zoo.Case, tmp_path: Path) -> None:
    """Fused, stacked, transposed, tied and multimodal models read the same from the new folder."""
    source = zoo.build(case.architecture, tmp_path / "old", **case.overrides).folder
    target = convert_model(source, tmp_path / "new")
    assert_same(source, target)
    spec = Config(target).spec
    assert spec == Config(source).spec
    stored = read_tensors(target)
    for m in matrices(spec):
        location = spec.names.fused_location(m.role) or spec.names.own_location(m.role)
        assert location.tensor_key("weight") in stored or (m.role == "head" and spec.head.tied)
    assert sum(t.nbytes for t in stored.values()) == sum(t.nbytes for t in read_tensors(source).values())


def test_a_vision_tower_is_copied(tmp_path: Path) -> None:
    source = zoo.build("Qwen2VLForConditionalGeneration", tmp_path / "old").folder
    before = load_file(source / "model.safetensors")
    before["visual.patch_embed.proj.weight"] = torch.randn(3, 4, 5, dtype=torch.bfloat16)
    save_file(before, source / "model.safetensors")
    after = read_tensors(convert_model(source, tmp_path / "new"))
    assert torch.equal(after["visual.patch_embed.proj.weight"], before["visual.patch_embed.proj.weight"])


@pytest.mark.parametrize("to", ["safetensors", "gptq", "gptq-v2", "dense"])
def test_fused_gptq_is_split(tmp_path: Path, to: str) -> None:
    source = zoo.build("Phi3ForCausalLM", tmp_path / "old").folder
    replace_matrices(source, None, gptq.write, random_gptq, r"(qkv|gate_up|o|down)_proj\.weight")
    target = convert_model(source, tmp_path / "new", to)
    assert_same(source, target)
    suffix = "weight" if to == "dense" else "qzeros"
    for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
        assert f"model.layers.0.{part}_proj.{suffix}" in read_tensors(target)
    assert not [name for name in read_tensors(target) if "qkv" in name or "gate_up" in name]


@pytest.mark.parametrize("to", ["safetensors", "exl2", "dense"])
def test_fused_exl2_is_split(tmp_path: Path, to: str) -> None:
    source = zoo.build("Phi3ForCausalLM", tmp_path / "old", intermediate_size=128).folder
    replace_matrices(source, None, exl2.write, random_exl2, r"(qkv|gate_up|o|down)_proj\.weight")
    target = convert_model(source, tmp_path / "new", to)
    assert_same(source, target)
    assert not [name for name in read_tensors(target) if "qkv" in name or "gate_up" in name]


@pytest.mark.parametrize(("write", "reason"), [(gptq.write, "do not fill whole words"), (write_awq, "multiple of 8")])
def test_fused_words_that_cannot_be_split_are_refused(tmp_path: Path, write: Any, reason: str) -> None:
    """Heads of four: k begins and ends inside a word of eight columns."""
    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 64}
    source = zoo.build("Phi3ForCausalLM", tmp_path / "old", **sizes).folder
    tensors = load_file(source / "model.safetensors")
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == (40, 32)
    replace_matrices(source, None, write, random_gptq, r"(qkv|gate_up|o|down)_proj\.weight")
    if write is write_awq:
        update_config(source, quantization_config=AWQ_JSON)
    with pytest.raises(Unsupported, match=rf"^layers\.0\.attn\.k\b.*{reason}"):
        convert_model(source, tmp_path / "new")
    assert os.listdir(tmp_path) == ["old"]
    assert_same(source, convert_model(source, tmp_path / "new", "dense"))


@pytest.mark.parametrize("to", ["safetensors", "gptq", "gptq-v2", "dense"])
@pytest.mark.parametrize("fused", [False, True])
def test_awq(tmp_path: Path, to: str, fused: bool) -> None:
    if fused:
        source = zoo.build("Phi3ForCausalLM", tmp_path / "old").folder
        replace_matrices(source, None, write_awq, random_gptq, r"(qkv|gate_up|o|down)_proj\.weight")
        update_config(source, quantization_config=AWQ_JSON)
    else:
        source = make_quantised(tmp_path / "old", write_awq, random_gptq, AWQ_JSON)
    target = convert_model(source, tmp_path / "new", to)
    assert_same(source, target)
    said: Any = read_config(target).get("quantization_config")
    if to == "safetensors":
        assert said == AWQ_JSON
        assert any(name.endswith("self_attn.k_proj.qweight") for name in read_tensors(target))
    elif to == "dense":
        assert said is None
    else:
        assert (said["quant_method"], said["bits"], said["group_size"], said["desc_act"]) == (
            "gptq",
            4,
            32,
            False,
        )


@pytest.mark.parametrize(("write", "make"), [(exl2.write, random_exl2), (gptq.write, random_gptq)])
def test_a_quantised_model_of_a_transposed_family(tmp_path: Path, write: Any, make: Any) -> None:
    """GPT-2 stores floats transposed, packed matrices as usual, and biases everywhere."""
    source = zoo.build("GPT2LMHeadModel", tmp_path / "old", n_embd=64).folder
    dense = convert_model(source, tmp_path / "dense")
    tensors = read_tensors(dense)
    for name in [n for n in tensors if re.search(r"(_proj|c_fc)\.weight", n)]:
        inputs, outputs = tensors.pop(name).shape
        if re.search(r"[qkv]_proj", name):
            inputs, outputs = outputs, inputs
        key = name.removesuffix("weight")
        tensors |= {key + suffix: t.contiguous() for suffix, t in write(make(inputs, outputs)).items()}
    shutil.rmtree(source)
    shutil.copytree(dense, source)
    save_file(tensors, source / "model.safetensors")
    assert_same(source, convert_model(source, tmp_path / "same"))
    assert_same(source, convert_model(source, tmp_path / "floats", "dense"))


def test_a_packed_head_that_is_unpacked_keeps_its_values(tmp_path: Path) -> None:
    """A reader would normalise the rows of a float head, and would use the embedding for a tied one."""
    source = tiny.make(
        tmp_path / "old",
        hidden_size=64,
        architectures=["IndexForCausalLM"],
        norm_head=1,
        tie_word_embeddings=True,
    )
    replace_matrices(source, None, exl2.write, random_exl2, "lm_head")
    target = convert_model(source, tmp_path / "new", "dense")
    assert_same(source, target)
    assert "lm_head.weight" in read_tensors(target)
    assert read_config(target)["tie_word_embeddings"] is False


def test_an_exl2_head_with_padding_keeps_its_bytes(tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "old", hidden_size=64, vocab_size=70)
    replace_matrices(source, None, exl2.write, random_exl2, "lm_head")
    assert_same(source, convert_model(source, tmp_path / "new", "exl2"))
    assert read_tensors(tmp_path / "new")["lm_head.q_weight"].shape[1] == 96
    assert_same(source, convert_model(source, tmp_path / "floats", "dense"))


@given(
    value=st.integers(0, 16),
    layout=st.sampled_from(["gptq", "gptq_v2", "gemm"]),
    at=st.integers(0, 127),
)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_zero_point_is_kept_or_refused(tmp_path: Path, value: int, layout: str, at: int) -> None:
    """The zero points of 4 bits: 1 to 16 in `gptq`, 0 to 15 in `gptq_v2` and AWQ."""
    if value not in (range(1, 17) if layout == "gptq" else range(16)):
        return
    home = tmp_path / f"{layout}-{value}-{at}"
    shutil.rmtree(home, ignore_errors=True)
    said: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "checkpoint_format": layout}
    write: Any = write_awq
    if layout != "gemm":
        write = lambda weight: gptq.write(weight, v2=layout == "gptq_v2")  # noqa: E731
    source = make_quantised(
        home / "old", write, gptq_with_zero_point(value, at), AWQ_JSON if layout == "gemm" else said
    )
    for to, sayable in (("gptq", range(1, 17)), ("gptq-v2", range(16))):
        if value in sayable:
            assert_same(source, convert_model(source, home / to, to))
            continue
        with pytest.raises(Unsupported, match=r"^layers\.0\.attn\.q: .*zero points from \d+ to \d+"):
            convert_model(source, home / to, to)
        assert {path.name for path in home.iterdir()} <= {"old", "gptq"}


# What is refused


@pytest.mark.parametrize(
    ("write", "make", "to", "reason"),
    [
        (exl2.write, random_exl2, "gptq", "GPTQ has one width"),
        (exl2.write, random_exl2, "gptq-v2", "GPTQ has one width"),
        (gptq.write, random_gptq, "exl2", "EXL2 has squared 4-bit scales"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, write: Any, make: Any, to: str, reason: str) -> None:
    source = make_quantised(tmp_path / "old", write, make)
    with pytest.raises(Unsupported, match=rf"^layers\.0\.attn\.q is stored as \w+ and cannot become {to}: {reason}"):
        convert_model(source, tmp_path / "new", to)
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize("to", ["exl2", "gptq", "gptq-v2"])
def test_floats_are_not_quantised(tmp_path: Path, to: str) -> None:
    source = tiny.make(tmp_path / "old")
    with pytest.raises(Unsupported, match=r"layers\.0\.attn\.q is stored as dense.*quantising"):
        convert_model(source, tmp_path / "new", to)
    assert os.listdir(tmp_path) == ["old"]


def test_unreadable_forms_are_refused(tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "old")
    tensors = load_file(source / "model.safetensors")
    key = "model.layers.1.mlp.up_proj"
    tensors[f"{key}.trellis"] = tensors.pop(f"{key}.weight")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(Unsupported, match=r"layers\.1\.mlp\.up is stored as EXL3.*cannot read"):
        convert_model(source, tmp_path / "new")


def test_a_matrix_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    source = make_quantised(tmp_path / "old", exl2.write, random_exl2)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.randn(128, 64)
    save_file(tensors, source / "model.safetensors")
    assert_same(source, convert_model(source, tmp_path / "new"))
    with pytest.raises(Unsupported, match=r"layers\.1\.mlp\.up is stored twice.*up_proj\.weight"):
        convert_model(source, tmp_path / "floats", "dense")
