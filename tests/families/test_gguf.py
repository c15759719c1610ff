"""GGUF metadata describes the same model as the config.json it was made from."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch

from exlm import spec
from exlm.errors import ConfigError, UnknownArchitecture
from exlm.families import ConfigReader, build_spec
from exlm.families.gguf import ARCHITECTURES, HYBRIDS, config_from_metadata
from exlm.kernels.reference import frequencies
from tests.families import gguf_hybrid_pairs


def as_float32(value: float) -> float:
    """A number rounded to float32, as a GGUF file stores it."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def metadata(arch: str, **changes: Any) -> dict[str, Any]:
    """A small model; `__` in a keyword stands for the key's dot, None leaves a key out."""
    fields = {
        "block_count": 4,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 160,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": as_float32(1e-5),
        "rope.freq_base": 500000.0,
    }
    fields |= {key.replace("__", "."): value for key, value in changes.items()}
    found = {f"{arch}.{key}": value for key, value in fields.items() if value is not None}
    return {
        "general.architecture": arch,
        **found,
        "tokenizer.ggml.tokens": [f"t{n}" for n in range(100)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


COMMON: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}

HEADS = {"attention__key_length": 32, "attention__value_length": 32}
EXPERTS = {"expert_count": 8, "expert_used_count": 2}

CONFIG_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (metadata("llama", rope__dimension_count=16), {"architectures": ["LlamaForCausalLM"]}),
    "llama, counts by layer": (
        metadata("llama", attention__head_count_kv=[2] * 4, feed_forward_length=[160] * 4),
        {"architectures": ["LlamaForCausalLM"]},
    ),
    "linear": (
        metadata("llama", rope__scaling__type="linear", rope__scaling__factor=4.0),
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "linear, old key": (
        metadata("llama", rope__scale_linear=2.0),
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "mistral": (
        metadata("llama", attention__sliding_window=1024),
        {"architectures": ["MistralForCausalLM"], "sliding_window": 1024},
    ),
    "mixtral": (
        metadata("llama", **EXPERTS),
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2": (metadata("qwen2"), {"architectures": ["Qwen2ForCausalLM"]}),
    "qwen2 with yarn": (
        metadata(
            "qwen2",
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=1024,
        ),
        {
            "architectures": ["Qwen2ForCausalLM"],
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        },
    ),
    "qwen2 with yarn and an attention factor": (
        metadata(
            "qwen2",
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=1024,
            rope__scaling__yarn_attn_factor=1.0,
        ),
        {
            "architectures": ["Qwen2ForCausalLM"],
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "attention_factor": 1.0,
            },
        },
    ),
    "qwen3": (metadata("qwen3", **HEADS), {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}),
    "qwen3moe": (
        metadata("qwen3moe", **HEADS, **EXPERTS, expert_feed_forward_length=48),
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "gemma": (metadata("gemma", **HEADS), {"architectures": ["GemmaForCausalLM"], "head_dim": 32}),
    "gemma2": (
        metadata(
            "gemma2",
            **HEADS,
            attention__sliding_window=512,
            attn_logit_softcapping=40.0,
            final_logit_softcapping=20.0,
        ),
        {
            "architectures": ["Gemma2ForCausalLM"],
            "head_dim": 32,
            "sliding_window": 512,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gemma2 27B, without softcap keys": (
        metadata("gemma2", **HEADS, block_count=46),
        {
            "architectures": ["Gemma2ForCausalLM"],
            "num_hidden_layers": 46,
            "head_dim": 32,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (
        metadata(
            "gemma3",
            **HEADS,
            attention__sliding_window=512,
            rope__scaling__type="linear",
            rope__scaling__factor=8.0,
        ),
        {
            "architectures": ["Gemma3ForCausalLM"],
            "head_dim": 32,
            "sliding_window": 512,
            "query_pre_attn_scalar": 32,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3 with a list of layer types": (
        metadata(
            "gemma3",
            **HEADS,
            attention__sliding_window=512,
            attention__sliding_window_pattern=[True, False, True, False],
            rope__freq_base_swa=20000.0,
        ),
        {
            "architectures": ["Gemma3ForCausalLM"],
            "head_dim": 32,
            "sliding_window": 512,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 20000.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    "phi3": (
        metadata("phi3", attention__sliding_window=2047, rope__dimension_count=12),
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047, "partial_rotary_factor": 0.75},
    ),
    "phi3 without a window": (
        metadata("phi3", attention__sliding_window=0),
        {"architectures": ["Phi3ForCausalLM"]},
    ),
}


def spec_of(values: dict[str, Any], **more: Any) -> spec.Model:
    config = config_from_metadata(values, "model.gguf", **more)
    return build_spec(ConfigReader(config, "model.gguf"))


@pytest.mark.parametrize("name", gguf_hybrid_pairs.PAIRS)
def test_a_hybrid_in_gguf_and_its_config_json_give_the_same_spec(name: str) -> None:
    model = spec_of(gguf_hybrid_pairs.metadata(name))
    assert model == build_spec(ConfigReader(gguf_hybrid_pairs.config(name)))
    assert model.is_recurrent


@pytest.mark.parametrize("name", CONFIG_PAIRS)
def test_gguf_and_config_json_give_the_same_spec(name: str) -> None:
    values, config = CONFIG_PAIRS[name]
    assert spec_of(values) == build_spec(ConfigReader(COMMON | config))


def test_every_architecture_has_a_pair() -> None:
    found = {values["general.architecture"] for values, _ in CONFIG_PAIRS.values()}
    hybrids = {arch for arch, *_ in gguf_hybrid_pairs.PAIRS.values()}
    assert hybrids == set(HYBRIDS)
    assert found | hybrids == set(ARCHITECTURES)


def test_phi3s_factors_come_as_tensors() -> None:
    short, long = [1.0 + n / 8 for n in range(8)], [2.0 + n for n in range(8)]
    magnitude = math.sqrt(1 + math.log(4) / math.log(1024))
    values = metadata(
        "phi3", rope__scaling__original_context_length=1024, rope__scaling__attn_factor=as_float32(magnitude)
    )
    factors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    found = spec_of(values, factors=factors).layers[0].mixer.rope
    assert found is not None
    assert isinstance(found.scaling, spec.LongRopeScaling)
    assert (found.scaling.short_factors, found.scaling.long_factors) == (tuple(short), tuple(long))
    assert found.scaling.original_max_positions == 1024
    assert found.scaling.attention_factor == pytest.approx(magnitude, rel=1e-6)


def test_llama3_factors_apply_at_any_length() -> None:
    factors = [1.0, 1.0, 1.3, 2.0, 4.0, 8.0, 8.0, 8.0]
    found = spec_of(metadata("llama"), factors={"rope_freqs.weight": factors}).layers[0].mixer.rope
    assert found is not None
    assert found.scaling == spec.LongRopeScaling(tuple(factors), tuple(factors), 4096, attention_factor=1.0)


def test_llama3_factors_match_its_formula() -> None:
    theta, dim, factor, low, high, original = 500000.0, 16, 8.0, 1.0, 4.0, 1024
    factors = []
    for n in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * n / dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(as_float32(1 / ((1 - smooth) / factor + smooth)))
    assert {1.0, factor} < set(factors)
    written = spec_of(metadata("llama"), factors={"rope_freqs.weight": factors}).layers[0].mixer.rope
    formula = spec.Rope(theta, dim, scaling=spec.Llama3Scaling(factor, low, high, original))
    assert written is not None
    actual, expected = frequencies(written, 4096), frequencies(formula, 4096)
    assert actual[1] == expected[1] == 1.0
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=0)


def test_yarn_parameters() -> None:
    values = metadata(
        "llama",
        rope__scaling__type="yarn",
        rope__scaling__factor=16.0,
        rope__scaling__original_context_length=256,
        rope__scaling__attn_factor=0.5,
        rope__scaling__yarn_beta_fast=64.0,
        rope__scaling__yarn_beta_slow=2.0,
    )
    found = spec_of(values).layers[0].mixer.rope
    assert found is not None
    expected = spec.YarnScaling(
        16.0, 256, beta_fast=64.0, beta_slow=2.0, attention_factor=0.5 * spec.YarnScaling.mscale(16.0)
    )
    assert found.scaling == expected


def test_biases_follow_from_the_tensor_names() -> None:
    names = {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"}
    layer = spec_of(metadata("llama"), tensors=names).layers[0]
    assert layer.mixer.qkv_bias
    assert layer.mixer.out_bias
    assert layer.mlp.bias  # type: ignore[union-attr]
    assert not spec_of(metadata("llama"), tensors={"blk.0.attn_q.bias"}).layers[0].mixer.qkv_bias


@pytest.mark.parametrize(
    ("kind", "words"),
    [("adapter", "an adapter"), ("mmproj", "the vision or audio part"), ("imatrix", "an importance matrix")],
)
def test_gguf_files_that_are_not_models_are_refused(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.gguf is not a model but {words}.* Give the model's own file"):
        spec_of({"general.architecture": "clip", "general.type": kind})
    assert spec_of({**metadata("llama"), "general.type": "model"})


def token_metadata(eos: int = 2, **more: Any) -> dict[str, Any]:
    values = metadata("llama") | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    texts = values["tokenizer.ggml.tokens"]
    texts[7], texts[9] = "<end_of_turn>", "<|im_end|>"
    kinds = [1] * 100
    kinds[7] = kinds[9] = 3
    return values | {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eos_token_id": eos}


def test_bos_and_eos_ids() -> None:
    plain = config_from_metadata(metadata("llama") | {"tokenizer.ggml.padding_token_id": 5}, "m.gguf")
    assert (plain["bos_token_id"], plain["eos_token_id"], plain["pad_token_id"]) == (1, [2], 5)
    stated = config_from_metadata(token_metadata(eot_token_id=4, eom_token_id=6), "m.gguf")
    assert stated["eos_token_id"] == [2, 4, 6]
    assert config_from_metadata(token_metadata(), "m.gguf")["eos_token_id"] == [2, 7, 9]
    assert config_from_metadata(token_metadata(eos=9), "m.gguf")["eos_token_id"] == [9]


@pytest.mark.parametrize("none", [2**32 - 1, -1])
def test_minus_one_in_an_id_is_no_token(none: int) -> None:
    ids = {f"tokenizer.ggml.{name}_token_id": none for name in ("bos", "eos", "eot", "padding")}
    found = config_from_metadata(metadata("llama") | ids, "m.gguf")
    assert not {"bos_token_id", "eos_token_id", "pad_token_id"} & set(found)


def test_a_padding_beyond_the_vocabulary_is_none() -> None:
    found = config_from_metadata(metadata("llama") | {"tokenizer.ggml.padding_token_id": 100}, "m.gguf")
    assert "pad_token_id" not in found
    assert found["eos_token_id"] == [2]


def test_the_vocabulary_may_be_only_a_number() -> None:
    values = metadata("llama", vocab_size=77)
    del values["tokenizer.ggml.tokens"]
    assert config_from_metadata(values, "m.gguf")["vocab_size"] == 77


@pytest.mark.parametrize("arch", ["mamba", None, 7])
def test_unknown_architectures_are_not_guessed(arch: Any) -> None:
    with pytest.raises(UnknownArchitecture, match=r"m\.gguf.*Known: falcon-h1, gemma, gemma2, gemma3, granite"):
        config_from_metadata({"general.architecture": arch}, "m.gguf")


HYBRID_COMPLAINTS: list[tuple[str, dict[str, Any], str]] = [
    ("nemotron_h", {"attention.head_count_kv": [0, 0, 2]}, r"a number, or one for each of 4 layers, found \[0, 0, 2\]"),
    ("nemotron_h", {"attention.head_count_kv": [0, 1, 2, 0]}, "the same for every layer that has one"),
    ("nemotron_h", {"attention.head_count_kv": [0, -1, 2, 0]}, "whole numbers"),
    ("nemotron_h", {"ssm.inner_size": 100}, r"ssm\.inner_size.*a multiple of 8, found 100"),
    ("nemotron_h", {"block_count": 10**6}, r"block_count.*at most 4096, found 1000000"),
    ("granitehybrid", {"ssm.inner_size": 96}, r"ssm\.inner_size.*a multiple of embedding_length, found 96"),
    ("granitehybrid", {"rope.scaling.finetuned": True, "rope.dimension_count": 16}, "the whole head .Bamba comes as"),
    ("granitehybrid", {"rope.scaling.finetuned": 3}, "true or false, found 3"),
    ("kimi-linear", {"attention.key_length_mla": 8}, "more than 8, the shared part of a key"),
    ("qwen35", {"nextn_predict_layers": 5}, r"nextn_predict_layers.*less than the 5 layers, found 5"),
    ("qwen3next with a list", {"attention.recurrent_layers": [1]}, "one entry for each of 4 layers"),
]


@pytest.mark.parametrize(("name", "changes", "complaint"), HYBRID_COMPLAINTS)
def test_invalid_metadata_of_hybrids_is_named(name: str, changes: dict[str, Any], complaint: str) -> None:
    values = gguf_hybrid_pairs.metadata(name)
    arch = values["general.architecture"]
    with pytest.raises(ConfigError, match=complaint):
        spec_of(values | {f"{arch}.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (metadata("llama", block_count=None), "llama.block_count"),
        (metadata("llama", embedding_length="64"), "llama.embedding_length"),
        (metadata("llama", context_length=0), "llama.context_length"),
        (metadata("llama", feed_forward_length=None), "llama.feed_forward_length"),
        (metadata("llama", attention__head_count=2.5), "llama.attention.head_count"),
        (metadata("llama", attention__head_count_kv=[1, 2, 1, 2]), "the same for every layer"),
        (metadata("llama", attention__head_count=5), "5 heads cannot share 64"),
        (metadata("llama", attention__value_length=8), "llama.attention.value_length"),
        (metadata("llama", rope__dimension_count=8), "llama.rope.dimension_count"),
        (metadata("llama", rope__freq_base=float("inf")), "llama.rope.freq_base"),
        (
            metadata("llama", rope__scaling__type="longrope", rope__scaling__factor=2.0),
            "with its factor tensors",
        ),
        (metadata("llama", rope__scaling__type="yarn"), "llama.rope.scaling.factor"),
        (metadata("llama", rope__scaling__type=3), "llama.rope.scaling.type"),
        (metadata("qwen3moe", **HEADS, expert_count=8), "qwen3moe.expert_used_count"),
        (metadata("llama") | {"tokenizer.ggml.eos_token_id": 100}, "tokenizer.ggml.eos_token_id.*below 100"),
    ],
)
def test_invalid_metadata_is_named(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        config_from_metadata(values, "model.gguf")
    assert "model.gguf" in str(caught.value)


def test_too_few_factors_are_refused() -> None:
    with pytest.raises(ConfigError, match="a list of 8 numbers"):
        spec_of(metadata("llama"), factors={"rope_freqs.weight": [1.0, 2.0]})
