"""The read-only attributes of Config that old programs use, each against its meaning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from exlm import CheckpointError, Config
from exlm.config import RopeStyle
from tests import tiny
from tests.checkpoint import gguf_models
from tests.families.test_config_reader import LLAMA

PLAIN: dict[str, Any] = {  # of LLAMA: what a model has that is peculiar in nothing
    "architecture": "LlamaForCausalLM",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_key_value_groups": 4,  # query heads for each key/value head
    "head_dim": 8,
    "norm_eps": 1e-5,
    "num_experts": None,
    "num_experts_per_token": None,
    "sliding_window": 0,
    "sliding_window_pattern": 1,
    "use_qk_norm": False,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "scale_emb": 1.0,
    "scale_depth": 1.0,
    "norm_head": None,
    "initializer_range": 0.02,
    "max_seq_len": 2048,
    "original_max_seq_len": 2048,
    "rotary_embedding_base": 10000.0,
    "scale_pos_emb": 1.0,
    "scale_alpha_value": 1.0,
    "alt_rope_method": None,
    "scale_short_factor": None,
    "scale_long_factor": None,
    "l3_rope_factor": None,
    "l3_rope_low_freq_factor": None,
    "l3_rope_high_freq_factor": None,
    "l3_rope_original_max_position_embeddings": None,
    "mrope_section": None,
    "vision_model_type": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OPTIONS = {
    "num_experts_per_token",
    "max_seq_len",
    "rotary_embedding_base",
    "scale_pos_emb",
    "scale_alpha_value",
}

GEMMA = {"head_dim": 8, "rope_theta": 1e4, "query_pre_attn_scalar": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SU = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32}

PECULIAR: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # architecture, config.json, fields
    ("MistralForCausalLM", {"sliding_window": 64}, {"sliding_window": 64}),
    ("Qwen2ForCausalLM", {"sliding_window": 64}, {}),  # not used, so there is none
    (
        "MixtralForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "rope_theta": 1e6},
        {"num_experts": 6, "num_experts_per_token": 2, "rotary_embedding_base": 1e6},
    ),
    (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
        {"num_experts": 4, "num_experts_per_token": 2, "intermediate_size": 16, "head_dim": 16} | {"use_qk_norm": True},
    ),
    (
        "Gemma2ForCausalLM",
        {**GEMMA, "sliding_window": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {"sliding_window": 32, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0}
        | {"final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16.0, "scale_emb": 8.0},
    ),
    (
        "Gemma3ForCausalLM",
        {**GEMMA, "sliding_window": 32, "num_hidden_layers": 12},
        {"sliding_window": 32, "sliding_window_pattern": 6, "num_hidden_layers": 12, "use_qk_norm": True}
        | {"query_pre_attn_scalar": 16.0, "scale_emb": 8.0, "max_seq_len": 131072}
        | {"original_max_seq_len": 131072},
    ),
    (
        "GraniteForCausalLM",
        {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
        | {"residual_multiplier": 0.22},
        {"attention_multiplier": 0.25, "scale_emb": 12.0, "logit_scale": 0.125, "scale_depth": 0.22},
    ),
    ("MiniCPMForCausalLM", MINICPM, {"scale_emb": 12.0, "scale_depth": 0.7, "logit_scale": 0.5}),
    (
        "LlamaForCausalLM",
        {"rope_scaling": LLAMA3, "max_position_embeddings": 4096, "rope_theta": 5e5},
        {"alt_rope_method": "llama3", "l3_rope_factor": 8.0, "l3_rope_low_freq_factor": 1.0}
        | {"l3_rope_high_freq_factor": 4.0, "l3_rope_original_max_position_embeddings": 512}
        | {"max_seq_len": 4096, "original_max_seq_len": 4096, "rotary_embedding_base": 5e5},
    ),
    (
        "Phi3ForCausalLM",
        {"rope_scaling": SU, "max_position_embeddings": 4096, "original_max_position_embeddings": 512},
        {"alt_rope_method": "su", "scale_short_factor": [1.0] * 4, "scale_long_factor": [2.0] * 4}
        | {"max_seq_len": 4096, "original_max_seq_len": 512},
    ),
    ("LlamaForCausalLM", {"rope_scaling": YARN}, {"alt_rope_method": "yarn"}),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 4.0}}, {"scale_pos_emb": 4.0}),
    ("LlamaForCausalLM", {"initializer_range": 0.1}, {"initializer_range": 0.1}),
    (
        "LlamaForCausalLM",
        {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4},
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 4},
    ),
]


def described(folder: Path, **changes: Any) -> Config:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return Config(folder)


@pytest.mark.parametrize(
    ("architecture", "changes", "fields"), PECULIAR, ids=[f"{one[0]}-{i}" for i, one in enumerate(PECULIAR)]
)
def test_every_field_has_the_value_of_the_spec(
    tmp_path: Path, architecture: str, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    config = described(tmp_path, architectures=[architecture], **changes)
    expected = {**PLAIN, "architecture": architecture, **fields}
    found = {name: getattr(config, name) for name in PLAIN}
    assert found == expected


def test_a_plain_model_has_neutral_fields(tmp_path: Path) -> None:
    config = described(tmp_path)
    assert {name: getattr(config, name) for name in PLAIN} == PLAIN


@pytest.mark.parametrize(
    "name", [*sorted(set(PLAIN) - OPTIONS), "arch", "tensor_file_map", "tensor_files", "model_config"]
)
def test_fields_cannot_be_set(tmp_path: Path, name: str) -> None:
    config = described(tmp_path)
    with pytest.raises(AttributeError, match=f"config.{name} says what the model is: it cannot be set"):
        setattr(config, name, 1)
    with pytest.raises(AttributeError):
        delattr(config, name)


def test_a_changed_option_leaves_the_fields_alone(tmp_path: Path) -> None:
    config = described(tmp_path, rope_scaling=YARN)
    config.max_seq_len = 99
    config.yarn_rope_factor = 8.0
    assert (config.original_max_seq_len, config.alt_rope_method) == (2048, "yarn")


ARCHITECTURES = [  # config.json, and what of `config.arch.lm` differs from Llama's
    ({}, {}),
    (
        {"architectures": ["GemmaForCausalLM"], "head_dim": 8},
        {"requires_bos": True, "mlp_act_func": "gelu_tanh"},
    ),
    (
        {"architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-5},
        {
            "requires_bos": True,
            "norm": "layernorm",
            "rope_style": RopeStyle.GPTJ,
            "parallel_decoder_blocks": True,
        },
    ),
    (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
        {"is_moe": True},
    ),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, {"swa": True}),
    (
        {"architectures": ["Gemma2ForCausalLM"], **GEMMA},
        {"requires_bos": True, "mlp_act_func": "gelu_tanh", "alternating_swa": True},
    ),
]


@pytest.mark.parametrize(("changes", "peculiar"), ARCHITECTURES, ids=lambda one: str(one.get("architectures")))
def test_the_architecture(tmp_path: Path, changes: dict[str, Any], peculiar: dict[str, Any]) -> None:
    arch = described(tmp_path, **changes).arch
    llama = {
        "requires_bos": False,
        "is_moe": False,
        "norm": "rmsnorm",
        "rope_style": RopeStyle.NEOX,
        "mlp_gate": True,
        "mlp_act_func": "silu",
        "parallel_decoder_blocks": False,
        "swa": False,
        "alternating_swa": False,
        "mrope": False,
    }
    found = dataclasses.asdict(arch.lm)
    found.pop("residual_stream_fp32")
    assert found == {**llama, **peculiar}
    assert arch.requires_bos is arch.lm.requires_bos
    assert arch.arch_string == changes.get("architectures", ["LlamaForCausalLM"])[0]
    with pytest.raises(AttributeError):
        arch.lm.requires_bos = True  # type: ignore[misc]


def test_gpt_2_has_no_rope(tmp_path: Path) -> None:
    raw = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vocab_size": 100, "layer_norm_epsilon": 1e-6}))
    config = Config(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_groups) == (64, 3, 1)
    assert (config.norm_eps, config.max_seq_len, config.rotary_embedding_base) == (1e-6, 512, None)
    assert (config.alt_rope_method, config.mrope_section, config.original_max_seq_len) == (None, None, 512)
    lm = config.arch.lm
    assert (lm.rope_style, lm.norm, lm.mlp_gate) == (RopeStyle.NONE, "layernorm", False)


def test_where_each_tensor_is(tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path))
    file = str(tmp_path / "model.safetensors")
    assert config.tensor_files == [file]
    assert config.model_config == str(tmp_path / "config.json")
    mapped = config.tensor_file_map
    assert set(mapped) == set(tiny.tensors(tiny.CONFIG))
    assert set(mapped.values()) == {file}
    assert [key for key in mapped if key.startswith("model.layers.1.mlp")]
    with pytest.raises(TypeError):
        del mapped["lm_head.weight"]  # type: ignore[attr-defined]
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert config.tensor_files == [file]  # as it was read
    config.prepare()
    assert config.tensor_files == [str(tmp_path / "other.safetensors")]


def test_tensors_have_llamas_names(tmp_path: Path, fixtures_dir: Path) -> None:
    config = Config(fixtures_dir / "tiny-lm-exl2-4.0bpw")
    assert "model.layers.0.self_attn.q_proj.q_weight" in config.tensor_file_map
    renamed = tiny.tensors(tiny.CONFIG)
    raw = {**tiny.CONFIG, "architectures": ["InternLM2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({"output.weight": renamed["lm_head.weight"]}, tmp_path / "model.safetensors")
    assert list(Config(tmp_path).tensor_file_map) == ["lm_head.weight"]


def test_the_tensors_of_a_gguf_file(tmp_path: Path) -> None:
    gguf_models.write_model(tmp_path / "x.gguf", "llama")
    config = Config(tmp_path / "x.gguf")
    assert config.model_config == str(tmp_path / "x.gguf")
    assert config.tensor_files == [config.model_config]
    assert "blk.0.attn_q.weight" in config.tensor_file_map


def test_a_folder_without_weights_has_fields_and_no_tensors(tmp_path: Path) -> None:
    config = described(tmp_path)
    assert config.norm_eps == 1e-5
    with pytest.raises(CheckpointError, match=r"holds no weights"):
        _ = config.tensor_file_map
