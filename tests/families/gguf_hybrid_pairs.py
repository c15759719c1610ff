"""Metadata of hybrid models in GGUF, each with the config.json that means the same."""

from __future__ import annotations

from typing import Any

Table = dict[str, Any]

COMMON: Table = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 160,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 2.0**-16,
    "rope.freq_base": 500000.0,
}
CONFIG: Table = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 2.0**-16,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
DELTA: Table = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 96,
    "rope.dimension_count": 16,
    "full_attention_interval": 2,
}
DELTA_CONFIG: Table = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
EXPERTS: Table = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 48,
    "expert_shared_feed_forward_length": 40,
}
EXPERTS_CONFIG: Table = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
MAMBA: Table = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 24,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 128,
}
MAMBA_CONFIG: Table = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_conv_bias": False,
}
NEMOTRON_CONFIG: Table = {
    "layer_norm_epsilon": 2.0**-16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "conv_kernel": 4,
    "use_conv_bias": False,
}
GROUPS: Table = {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 1.5}
GROUPS_CONFIG: Table = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
KV_LIST = [0, 2, 0, 0]
MIXED = ["mamba", "attention", "mamba", "mamba"]
KIMI: Table = {
    "attention.head_count_kv": [0, 1, 0, 0],
    "attention.key_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 20,
    "attention.kv_lora_rank": 24,
    "attention.q_lora_rank": 12,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 16,
    "leading_dense_block_count": 1,
    "expert_shared_count": 2,
    "expert_weights_norm": False,
    "nextn_predict_layers": 1,
    "block_count": 5,
}

PAIRS: dict[str, tuple[str, Table, str, Table]] = {
    "qwen3next": ("qwen3next", {**DELTA, **EXPERTS}, "Qwen3NextForCausalLM", {**DELTA_CONFIG, **EXPERTS_CONFIG}),
    "qwen3next with a list": (
        "qwen3next",
        {**DELTA, **EXPERTS, "attention.recurrent_layers": [1, 0, 1, 1]},
        "Qwen3NextForCausalLM",
        {
            **DELTA_CONFIG,
            **EXPERTS_CONFIG,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        },
    ),
    "qwen35": (
        "qwen35",
        {**DELTA, "rope.dimension_sections": [3, 3, 2, 0], "block_count": 5, "nextn_predict_layers": 1},
        "Qwen3_5ForCausalLM",
        {**DELTA_CONFIG, "rope_parameters": {"mrope_section": [3, 3, 2]}, "num_nextn_predict_layers": 1},
    ),
    "qwen35 with sections that do not fit": (
        "qwen35",
        {**DELTA, "rope.dimension_sections": [11, 11, 10, 0]},
        "Qwen3_5ForCausalLM",
        DELTA_CONFIG,
    ),
    "qwen35moe": ("qwen35moe", {**DELTA, **EXPERTS}, "Qwen3_5MoeForCausalLM", {**DELTA_CONFIG, **EXPERTS_CONFIG}),
    "nemotron_h": (
        "nemotron_h",
        {**MAMBA, "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 160, 0, 160]},
        "NemotronHForCausalLM",
        {**NEMOTRON_CONFIG, "hybrid_override_pattern": "M-*-"},
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        {
            **MAMBA,
            **EXPERTS,
            **GROUPS,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 48, 0, 48],
            "moe_latent_size": 32,
        },
        "NemotronHForCausalLM",
        {
            **NEMOTRON_CONFIG,
            **EXPERTS_CONFIG,
            **GROUPS_CONFIG,
            "hybrid_override_pattern": "ME*E",
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 32,
        },
    ),
    "granitehybrid": (
        "granitehybrid",
        {
            **MAMBA,
            **EXPERTS,
            "attention.head_count_kv": KV_LIST,
            "attention.scale": 0.5,
            "embedding_scale": 12.0,
            "residual_scale": 0.25,
            "logit_scale": 8.0,
            "rope.scaling.finetuned": False,
        },
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA_CONFIG,
            "layer_types": MIXED,
            "attention_multiplier": 0.5,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 8.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
    "granitehybrid, dense, with RoPE": (
        "granitehybrid",
        {**MAMBA, "attention.head_count_kv": KV_LIST, "attention.head_count": [0, 4, 0, 0], "rope.dimension_count": 32},
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA_CONFIG,
            "layer_types": MIXED,
            "attention_multiplier": 32**-0.5,
            "num_local_experts": 0,
            "shared_intermediate_size": 160,
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1": (
        "falcon-h1",
        MAMBA,
        "FalconH1ForCausalLM",
        {**MAMBA_CONFIG, "mamba_d_ssm": 128, "mamba_norm_before_gate": False},
    ),
    "lfm2": (
        "lfm2",
        {"attention.head_count_kv": KV_LIST, "shortconv.l_cache": 3},
        "Lfm2ForCausalLM",
        {
            "norm_eps": 2.0**-16,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2moe": (
        "lfm2moe",
        {**EXPERTS, "attention.head_count_kv": KV_LIST, "shortconv.l_cache": 3, "leading_dense_block_count": 1},
        "Lfm2MoeForCausalLM",
        {
            **EXPERTS_CONFIG,
            "norm_eps": 2.0**-16,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "use_expert_bias": False,
        },
    ),
    "kimi-linear": (
        "kimi-linear",
        {**EXPERTS, **GROUPS, **KIMI},
        "KimiLinearForCausalLM",
        {
            **EXPERTS_CONFIG,
            **GROUPS_CONFIG,
            "num_key_value_heads": 4,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3, 4],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "kv_lora_rank": 24,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "num_shared_experts": 2,
            "moe_renormalize": False,
            "num_nextn_predict_layers": 1,
        },
    ),
}


def metadata(name: str) -> Table:
    """The metadata of a pair."""
    arch, own, _, _ = PAIRS[name]
    tokens = {"tokenizer.ggml.tokens": [f"t{n}" for n in range(100)]}
    return {"general.architecture": arch, **{f"{arch}.{key}": v for key, v in (COMMON | own).items()}, **tokens}


def config(name: str) -> Table:
    """The config.json of a pair."""
    _, _, architecture, own = PAIRS[name]
    return {"architectures": [architecture], **CONFIG, **own}
