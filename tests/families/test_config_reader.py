"""Reading config.json: values, defaults, and errors for what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from exlm import spec
from exlm.errors import ConfigError, UnknownArchitecture
from exlm.families import FAMILIES, ConfigReader, build_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}

LLAMA3 = {"type": "llama3", "factor": 8.0}

QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def llama(**changes: Any) -> spec.Model:
    return build_spec(ConfigReader({**LLAMA, **changes}))


def test_a_plain_description_is_frozen_hashable_and_complete() -> None:
    model = llama()
    assert hash(model) == hash(llama())
    assert (len(model.layers), model.vocab, model.hidden, model.max_positions) == (4, 100, 64, 2048)
    assert model.layers[0].mixer.rope == spec.Rope(theta=10000.0, dim=8)


def test_an_unknown_architecture_lists_what_is_known() -> None:
    with pytest.raises(UnknownArchitecture, match=r"'MambaForCausalLM' is not supported.*LlamaForCausalLM"):
        llama(architectures=["MambaForCausalLM"])
    assert len(FAMILIES) >= 31


@pytest.mark.parametrize("names", [None, [], ["A", "B"], "LlamaForCausalLM", [1]])
def test_architectures_must_be_one_name(names: object) -> None:
    with pytest.raises(ConfigError, match="exactly one name"):
        llama(architectures=names)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    raw = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ConfigError, match=f'has no "{key}"'):
        build_spec(ConfigReader(raw))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -1}, '"hidden_size" must be a size from 1'),
        ({"hidden_size": 0}, '"hidden_size" must be a size from 1'),
        ({"hidden_size": 2**40}, '"hidden_size" must be a size from 1'),
        ({"hidden_size": "64"}, '"hidden_size" must be a whole number'),
        ({"hidden_size": 64.5}, '"hidden_size" must be a whole number'),
        ({"hidden_size": True}, '"hidden_size" must be a whole number'),
        ({"hidden_size": [64]}, '"hidden_size" must be a whole number'),
        ({"num_hidden_layers": 10**9}, "at most 4096 layers"),
        ({"num_attention_heads": 7}, "not a multiple of num_attention_heads 7"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 7}, "it must be even"),
        ({"rms_norm_eps": "small"}, '"rms_norm_eps" must be a finite number'),
        ({"rms_norm_eps": float("nan")}, '"rms_norm_eps" must be a finite number'),
        ({"rms_norm_eps": -1}, '"rms_norm_eps" must be a number of at least 0, found -1'),
        ({"rope_theta": 0}, '"rope_theta" must be a number above 0, found 0'),
        ({"rope_parameters": {"rope_theta": -1.0}}, '"rope_theta" must be a number above 0, found -1'),
        ({"logits_scaling": 0}, '"logits_scaling" must be a number above 0'),
        ({"final_logit_softcapping": 0}, '"final_logit_softcapping" must be a number above 0'),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 1e30},
            "a length from 1 to 2147483647",
        ),
        ({"tie_word_embeddings": "yes"}, '"tie_word_embeddings" must be true or false'),
        ({"attention_bias": 1}, '"attention_bias" must be true or false'),
        ({"hidden_act": "snake"}, '"hidden_act" must be one of silu'),
        ({"text_config": [1]}, "text_config must be an object"),
        ({"rope_scaling": "linear"}, '"rope_scaling" must be an object'),
        ({"rope_scaling": {"type": "magic"}}, '"rope_type" must be one of default'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4, "high_freq_factor": 1}}, "below"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1, "mscale_all_dim": [1]}},
            '"mscale_all_dim" must be a finite number',
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": -1}},
            '"beta_fast" must be a number above',
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1},
            '"rope_theta" must be a number other than 1',
        ),
        ({"rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]}}, "a list of 4 numbers"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, "sum to 4"),
        ({"partial_rotary_factor": 2.0}, "it must be even"),
        ({"max_position_embeddings": 0}, '"max_position_embeddings" must be a size'),
    ],
)
def test_wrong_and_contradictory_numbers_are_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llama(**changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "Gemma2ForCausalLM",
            {"query_pre_attn_scalar": 0},
            '"query_pre_attn_scalar" must be a number above 0',
        ),
        (
            "Gemma2ForCausalLM",
            {"attn_logit_softcapping": -1},
            '"attn_logit_softcapping" must be a number above',
        ),
        *(
            (f"{name}ForCausalLM", {"use_bidirectional_attention": True}, "attention. must be false")
            for name in ("Gemma", "Gemma2", "Gemma3")
        ),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": 0}, '"rope_local_base_freq" must be a number above 0'),
        (
            "GraniteForCausalLM",
            {"attention_multiplier": 0},
            '"attention_multiplier" must be a number above 0',
        ),
        *(
            (f"{name}ForCausalLM", {"sliding_window": -1}, '"sliding_window" must be .* or null .* found -1')
            for name in ("Mistral", "Gemma2", "Cohere2")
        ),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3, **QWEN}, '"mlp_only_layers" must be a list of layers'),
    ],
)
def test_invalid_values_of_one_family_are_explained(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llama(architectures=[architecture], **changes)


def test_whole_floats_count_as_numbers() -> None:
    assert llama(hidden_size=64.0) == llama()


def test_the_text_part_wins_over_the_top_level() -> None:
    nested = {"architectures": LLAMA["architectures"], "hidden_size": 1, "text_config": LLAMA}
    assert build_spec(ConfigReader(nested)) == llama()


def test_the_first_known_length_key_wins() -> None:
    assert llama(max_position_embeddings=512, model_max_length=1024).max_positions == 1024
    assert llama(n_positions=128, max_position_embeddings=512).max_positions == 512


def test_layer_types_must_match_the_number_of_layers() -> None:
    raw = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "sliding_window": 8}
    with pytest.raises(ConfigError, match="a list of 4 names"):
        build_spec(ConfigReader({**raw, "layer_types": ["full_attention"]}))
    with pytest.raises(ConfigError, match=r"layer_types.*linear_attention"):
        build_spec(ConfigReader({**raw, "layer_types": ["linear_attention"] * 4}))


def test_more_active_than_existing_experts_are_refused() -> None:
    raw = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 5}
    with pytest.raises(ConfigError, match="only 4 exist"):
        build_spec(ConfigReader(raw))


def test_missing_keys_of_a_nested_config_are_filled_with_family_defaults() -> None:
    raw = {
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {"model_type": "pixtral"},
        "text_config": {"hidden_size": 5120, "head_dim": 128, "sliding_window": None},
    }
    attn = build_spec(ConfigReader(raw)).layers[0].mixer
    assert (attn.heads, attn.kv_heads, attn.head_dim, attn.window) == (32, 8, 128, None)


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3", "Cohere2"])
def test_window_defaults_apply_when_the_file_names_none(name: str) -> None:
    windows = [layer.mixer.window for layer in llama(architectures=[f"{name}ForCausalLM"]).layers]
    assert windows[0] == 4096
    assert llama(architectures=[f"{name}ForCausalLM"], sliding_window=8).layers[0].mixer.window == 8


def test_gemma3_has_a_default_context_length() -> None:
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "sliding_window": 8}
    published = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    assert build_spec(ConfigReader(published)).max_positions == 131072
    explicit = {**published, "text_config": {**text, "max_position_embeddings": 512}}
    assert build_spec(ConfigReader(explicit)).max_positions == 512


def test_a_nested_llama_without_windows_is_filled_with_defaults() -> None:
    raw = {
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {"model_type": "pixtral"},
        "text_config": {"model_type": "llama", "max_position_embeddings": 8192},
    }
    layer = build_spec(ConfigReader(raw)).layers[0]
    assert (layer.mixer.kv_heads, layer.mixer.window, layer.mlp.width) == (32, None, 11008)


def test_another_vision_encoder_is_refused() -> None:
    clip = {"model_type": "clip"}
    raw = {**LLAMA, "architectures": ["LlavaForConditionalGeneration"], "vision_config": clip}
    with pytest.raises(ConfigError, match=r"vision_config.model_type.*pixtral.*'clip'"):
        build_spec(ConfigReader(raw))


def test_qwen3_differs_from_llama_in_one_field() -> None:
    qwen = build_spec(ConfigReader({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}))
    back = tuple(replace(layer, mixer=replace(layer.mixer, qk_norm=None)) for layer in qwen.layers)
    assert replace(qwen, layers=back, architecture="LlamaForCausalLM") == llama()


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_a_rope_scaling_written_beside_the_newer_table_counts(key: str) -> None:
    table = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    yarn = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope = llama(rope_parameters=table, rope_scaling=yarn).layers[0].mixer.rope
    assert rope == spec.Rope(theta=5e5, dim=4, scaling=spec.YarnScaling.with_defaults(4.0, 128))
    assert llama(rope_parameters=table, rope_scaling=None) == llama(rope_parameters=table)
