"""The transformers classes of each architecture, and small numbers for its config.

Also the published names of tensors that transformers saves under other names. Epsilons
and RoPE bases are far from every family's default, so that reading a wrong key shows.
Weights are filled by `zoo_weights`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Config = dict[str, Any]
Tensors = dict[str, Tensor]

VOCAB = 128
TEXT_VOCAB = 112
"""Ids below this are text tokens in every model of the zoo; those above may be an image's."""

EPS = 2e-3
"""Large enough to show in the logits."""

THETA = 30000.0
WINDOW = 40

SIZES: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
ROPE: Config = {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}
WIDE: Config = {"head_dim": 32}
LLAMA: Config = {**SIZES, **ROPE, "rms_norm_eps": EPS}


@dataclass
class UnsavedModel:
    """A model without weights, and how its folder is to be written."""

    model: Any
    embedding: float = 0.5  # the spread of the embedding table
    active: int = 0  # experts of a token
    rename_tensors: Callable[[Tensors], Tensors] | None = None  # name in transformers → published name
    rewrite_config: Callable[[Config], Config] | None = None  # transformers' config.json → this architecture's


@dataclass(frozen=True)
class Recipe:
    """The classes and small numbers of an architecture."""

    config: str
    numbers: Config
    embedding: float = 0.5
    active: int = 0
    sub_config: str = ""  # the sub-config that overrides go to
    rename_tensors: Callable[[Tensors], Tensors] | None = None


def deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    """Both tables in one, nested tables merged; the second wins."""
    result = dict(base)
    for key, value in changes.items():
        known = result.get(key)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        result[key] = deep_merge(known, value) if both else value  # type: ignore[arg-type]
    return result


def make_transformers_model(architecture: str, config: str, numbers: Config) -> Any:
    """The transformers model with these numbers and eager attention, in evaluation mode."""
    library = importlib.import_module("transformers")
    made = getattr(library, config)(**copy.deepcopy(numbers))  # transformers writes into nested tables
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = getattr(library, architecture)._from_config(made, attn_implementation="eager")
    assert isinstance(model, nn.Module)
    return model.eval()


def from_recipe(architecture: str, overrides: Config) -> UnsavedModel:
    """A model by recipe; overrides go to the language part unless the recipe has them at the top."""
    recipe = RECIPES[architecture]
    changes = overrides
    if recipe.sub_config:
        top = {key: value for key, value in overrides.items() if key in recipe.numbers}
        rest = {key: value for key, value in overrides.items() if key not in top}
        changes = {**top, recipe.sub_config: rest}
    model = make_transformers_model(architecture, recipe.config, deep_merge(recipe.numbers, changes))
    return UnsavedModel(model, recipe.embedding, recipe.active, recipe.rename_tensors)


def _nested_siglip(tensors: Tensors) -> Tensors:
    """Published Gemma 3 files have the vision model one level deeper than transformers does today."""
    return {key.replace("vision_tower.", "vision_tower.vision_model.", 1): t for key, t in tensors.items()}


def _cut_convolutions(tensors: Tensors) -> Tensors:
    """OLMo-Hybrid's three convolutions with their own widths; transformers cuts theirs into three equal parts."""
    result = dict(tensors)
    for key in tensors:
        if key.endswith(".q_conv1d.weight"):
            layer = key.removesuffix("q_conv1d.weight")
            parts = [f"{layer}{part}_conv1d.weight" for part in "qkv"]
            widths = [len(tensors[f"{layer}{part}_proj.weight"]) for part in "qkv"]
            whole = torch.cat([tensors[part] for part in parts])
            result.update(zip(parts, whole.split(widths), strict=True))
    return result


def _dense_kimi_layers(tensors: Tensors) -> Tensors:
    """Published files call the MLP of a dense layer `mlp`, and only experts `block_sparse_moe`."""
    dense = tuple(f".block_sparse_moe.{part}_proj.weight" for part in ("gate", "up", "down"))
    return {key.replace(".block_sparse_moe.", ".mlp.") if key.endswith(dense) else key: t for key, t in tensors.items()}


IMAGE_IDS: Config = {"image_token_id": 120, "video_token_id": 121}
SPAN_IDS: Config = {"vision_start_token_id": 122, "vision_end_token_id": 123}
PIXTRAL: Config = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
SIGLIP: Config = {**PIXTRAL, "model_type": "siglip_vision_model", "vision_use_head": False}
MISTRAL: Config = {**LLAMA, **WIDE, "model_type": "mistral", "sliding_window": None}
GEMMA: Config = {**LLAMA, **WIDE}
GEMMA3: Config = {
    **GEMMA,
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": {"rope_theta": 300000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
    },
}
GPT: Config = {
    "vocab_size": VOCAB,
    "n_positions": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "layer_norm_epsilon": EPS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COHERE: Config = {**SIZES, **ROPE, "layer_norm_eps": EPS, "logit_scale": 0.5}
MROPE: Config = {
    **LLAMA,
    "rope_parameters": {"rope_theta": THETA, "type": "mrope", "mrope_section": [2, 3, 3]},
}
QWEN_VISION: Config = {"depth": 1, "num_heads": 2, "patch_size": 8}
QWEN2_VISION: Config = {**QWEN_VISION, "embed_dim": 32, "hidden_size": 64}
QWEN25_VISION: Config = {**QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
PIXTRAL_TOP: Config = {
    "text_config": MISTRAL,
    "vision_config": PIXTRAL,
    "image_token_index": 120,
    "vision_feature_layer": -1,
    "tie_word_embeddings": False,
}
GRANITE: Config = {
    **LLAMA,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
}
DBRX: Config = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 4,
    "max_seq_len": 512,
    # transformers reads RoPE's top-level value; published files have only the one in attn_config
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": THETA},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}

QWEN_HYBRID: Config = {
    **LLAMA,
    **WIDE,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default", "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
}
QWEN_EXPERTS: Config = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
QWEN35_ROPE: Config = {"rope_parameters": {**QWEN_HYBRID["rope_parameters"], "mrope_section": [3, 3, 2]}}
QWEN35_TOP: Config = {
    "vision_config": {
        **QWEN_VISION,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "num_position_embeddings": 16,
    },
    **IMAGE_IDS,
    **SPAN_IDS,
    "tie_word_embeddings": False,
}
NEMOTRON_H: Config = {
    **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"},
    **WIDE,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
    "layer_norm_epsilon": EPS,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "conv_kernel": 4,
    "time_step_min": 0.3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "n_group": 2,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
WIDE_MAMBA: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "time_step_limit": [0.1, 0.9],
}
HYBRID_TYPES = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
CONV_TYPES = ["conv", "full_attention", "conv", "full_attention"]
LFM2: Config = {
    **{key: value for key, value in SIZES.items() if key != "pad_token_id"},
    **ROPE,
    "norm_eps": EPS,
    "layer_types": CONV_TYPES,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}

RECIPES: dict[str, Recipe] = {
    "Qwen3NextForCausalLM": Recipe("Qwen3NextConfig", {**QWEN_HYBRID, **QWEN_EXPERTS}, active=2),
    "Qwen3_5ForCausalLM": Recipe("Qwen3_5TextConfig", QWEN_HYBRID),
    "Qwen3_5MoeForCausalLM": Recipe("Qwen3_5MoeTextConfig", {**QWEN_HYBRID, **QWEN_EXPERTS}, active=2),
    "Qwen3_5ForConditionalGeneration": Recipe(
        "Qwen3_5Config", {"text_config": {**QWEN_HYBRID, **QWEN35_ROPE}, **QWEN35_TOP}, sub_config="text_config"
    ),
    "Qwen3_5MoeForConditionalGeneration": Recipe(
        "Qwen3_5MoeConfig",
        {"text_config": {**QWEN_HYBRID, **QWEN_EXPERTS, **QWEN35_ROPE}, **QWEN35_TOP},
        active=2,
        sub_config="text_config",
    ),
    "NemotronHForCausalLM": Recipe("NemotronHConfig", NEMOTRON_H, active=2),
    "GraniteMoeHybridForCausalLM": Recipe(
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            **WIDE_MAMBA,
            "layer_types": HYBRID_TYPES,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
        embedding=0.2,
        active=2,
    ),
    "FalconH1ForCausalLM": Recipe(
        "FalconH1Config",
        {
            **LLAMA,
            **WIDE_MAMBA,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "lm_head_multiplier": 0.6,
            "embedding_multiplier": 3.0,
            "mlp_multipliers": [0.7, 1.3],
            "key_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.75,
        },
        embedding=0.2,
    ),
    "BambaForCausalLM": Recipe("BambaConfig", {**LLAMA, **WIDE_MAMBA, "attn_layer_indices": [1]}),
    "Lfm2ForCausalLM": Recipe(
        "Lfm2Config", {**LFM2, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.2}, embedding=0.15
    ),
    "Lfm2MoeForCausalLM": Recipe(
        "Lfm2MoeConfig",
        {
            **LFM2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.4,
        },
        embedding=0.15,
        active=2,
    ),
    "KimiLinearForCausalLM": Recipe(
        "KimiLinearConfig",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "rms_norm_eps": EPS,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "linear_num_heads": 3,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.6,
        },
        active=2,
        rename_tensors=_dense_kimi_layers,
    ),
    "OlmoHybridForCausalLM": Recipe(
        "OlmoHybridConfig",
        {
            **LLAMA,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 4,
        },
        rename_tensors=_cut_convolutions,
    ),
    "LlamaForCausalLM": Recipe("LlamaConfig", {**LLAMA, **WIDE}),
    "MistralForCausalLM": Recipe("MistralConfig", {**LLAMA, **WIDE, "sliding_window": WINDOW}),
    "GraniteForCausalLM": Recipe("GraniteConfig", GRANITE, embedding=0.2),
    "Qwen2ForCausalLM": Recipe("Qwen2Config", LLAMA),
    "Qwen3ForCausalLM": Recipe("Qwen3Config", {**LLAMA, **WIDE}),
    "Qwen3MoeForCausalLM": Recipe(
        "Qwen3MoeConfig",
        {**LLAMA, **WIDE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        active=2,
    ),
    "MixtralForCausalLM": Recipe(
        "MixtralConfig", {**LLAMA, **WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}, active=2
    ),
    "GemmaForCausalLM": Recipe("GemmaConfig", GEMMA, embedding=0.15),
    "Gemma2ForCausalLM": Recipe(
        "Gemma2Config",
        {
            **GEMMA,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        embedding=0.15,
    ),
    "Gemma3ForCausalLM": Recipe("Gemma3TextConfig", GEMMA3, embedding=0.15),
    "Gemma3ForConditionalGeneration": Recipe(
        "Gemma3Config",
        {
            "text_config": GEMMA3,
            "vision_config": SIGLIP,
            "image_token_index": 120,
            "boi_token_index": 121,
            "eoi_token_index": 122,
            "mm_tokens_per_image": 4,
        },
        embedding=0.15,
        sub_config="text_config",
        rename_tensors=_nested_siglip,
    ),
    "Starcoder2ForCausalLM": Recipe(
        "Starcoder2Config", {**SIZES, **ROPE, "norm_epsilon": EPS, "sliding_window": WINDOW}
    ),
    "CohereForCausalLM": Recipe("CohereConfig", COHERE),
    "Cohere2ForCausalLM": Recipe("Cohere2Config", {**COHERE, "sliding_window": WINDOW}),
    "DbrxForCausalLM": Recipe("DbrxConfig", DBRX, active=2),
    "Phi3ForCausalLM": Recipe(
        "Phi3Config", {**LLAMA, "original_max_position_embeddings": 512, "sliding_window": WINDOW}
    ),
    "Glm4ForCausalLM": Recipe("Glm4Config", {**LLAMA, **WIDE}),
    "GPTBigCodeForCausalLM": Recipe("GPTBigCodeConfig", {**GPT, "n_inner": 96}),
    "GPT2LMHeadModel": Recipe("GPT2Config", GPT),
    "LlavaForConditionalGeneration": Recipe(
        "LlavaConfig", {**PIXTRAL_TOP, "vision_feature_select_strategy": "full"}, sub_config="text_config"
    ),
    "Mistral3ForConditionalGeneration": Recipe("Mistral3Config", PIXTRAL_TOP, sub_config="text_config"),
    "Qwen2VLForConditionalGeneration": Recipe(
        "Qwen2VLConfig",
        {
            "text_config": MROPE,
            "vision_config": QWEN2_VISION,
            **IMAGE_IDS,
            **SPAN_IDS,
            "tie_word_embeddings": False,
        },
        sub_config="text_config",
    ),
    "Qwen2_5_VLForConditionalGeneration": Recipe(
        "Qwen2_5_VLConfig",
        {
            "text_config": MROPE,
            "vision_config": QWEN25_VISION,
            **IMAGE_IDS,
            **SPAN_IDS,
            "tie_word_embeddings": False,
        },
        sub_config="text_config",
    ),
    "SmolLM3ForCausalLM": Recipe("SmolLM3Config", LLAMA),
    "Olmo2ForCausalLM": Recipe("Olmo2Config", LLAMA),
}
