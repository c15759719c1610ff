"""All cases of the zoo: every architecture, and each variant that an implementation can get wrong.

One line per case. The overrides are those of `build`: new config keys, and `layout` where only the tensors'
names differ; never `spelling`, since every case is tested with old and new keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHORT = [1.0 + 0.02 * i for i in range(8)]
LONG = [1.0 + 0.9 * i for i in range(8)]
ORIGINAL = {"original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
PHI4 = {
    "rope_type": "longrope",
    "short_factor": SHORT[:6],
    "long_factor": LONG[:6],
    "partial_rotary_factor": 0.75,
}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
GLOBAL_LINEAR = {"full_attention": LINEAR}
INTERVAL = ["linear_attention", "full_attention"] * 2
GEMMA3_DEFAULT_ROPE = {
    "full_attention": {"rope_theta": 1000000.0},
    "sliding_attention": {"rope_theta": 10000.0},
}


@dataclass(frozen=True)
class Case:
    """One model of the zoo: `build(case.architecture, folder, **case.overrides)`."""

    id: str
    architecture: str
    overrides: dict[str, Any] = field(default_factory=dict)


def _case(id: str, architecture: str, **overrides: Any) -> Case:
    return Case(id, architecture, overrides)


CASES: list[Case] = [
    _case("llama", "LlamaForCausalLM"),
    _case("llama-biased", "LlamaForCausalLM", attention_bias=True, mlp_bias=True),
    _case("llama-tied", "LlamaForCausalLM", tie_word_embeddings=True),
    _case("llama-narrow", "LlamaForCausalLM", head_dim=None, num_key_value_heads=4),
    _case("llama-stray", "LlamaForCausalLM", layout="stray"),
    _case("llama-linear", "LlamaForCausalLM", rope_parameters=LINEAR),
    _case("llama-dynamic", "LlamaForCausalLM", rope_parameters=DYNAMIC, max_position_embeddings=128),
    _case("llama-yarn", "LlamaForCausalLM", rope_parameters=YARN),
    _case("llama-yarn-betas", "LlamaForCausalLM", rope_parameters={**YARN, "beta_fast": 12, "beta_slow": 3}),
    _case("llama-yarn-attention", "LlamaForCausalLM", rope_parameters={**YARN, "attention_factor": 1.4}),
    _case(
        "llama-yarn-mscale",
        "LlamaForCausalLM",
        rope_parameters={**YARN, "mscale": 2.0, "mscale_all_dim": 0.5},
    ),
    _case("llama-yarn-untruncated", "LlamaForCausalLM", rope_parameters={**YARN, "truncate": False}),
    _case("llama-llama3", "LlamaForCausalLM", rope_parameters=LLAMA3),
    _case("mistral", "MistralForCausalLM"),
    _case("mistral-full", "MistralForCausalLM", sliding_window=None),
    _case("index", "IndexForCausalLM"),
    _case("index-norm-head", "IndexForCausalLM", norm_head=1),
    _case("granite", "GraniteForCausalLM"),
    _case("granite-tied", "GraniteForCausalLM", tie_word_embeddings=True),
    _case("minicpm", "MiniCPMForCausalLM"),
    _case("minicpm-untied", "MiniCPMForCausalLM", tie_word_embeddings=False),
    _case("yi", "YiForCausalLM"),
    _case("orion", "OrionForCausalLM"),
    _case("qwen2", "Qwen2ForCausalLM"),
    _case("qwen2-window", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=40, max_window_layers=2),
    _case("qwen2-yarn", "Qwen2ForCausalLM", rope_parameters=YARN),
    _case("qwen3", "Qwen3ForCausalLM"),
    _case("qwen3-window", "Qwen3ForCausalLM", use_sliding_window=True, sliding_window=40, max_window_layers=2),
    _case("qwen3-moe", "Qwen3MoeForCausalLM", norm_topk_prob=True),
    _case("qwen3-moe-native", "Qwen3MoeForCausalLM", norm_topk_prob=True, layout="native"),
    _case("qwen3-moe-raw-shares", "Qwen3MoeForCausalLM", norm_topk_prob=False),
    _case(
        "qwen3-moe-mixed",
        "Qwen3MoeForCausalLM",
        norm_topk_prob=True,
        mlp_only_layers=[1],
        decoder_sparse_step=2,
    ),
    _case("qwen3-moe-some-dense", "Qwen3MoeForCausalLM", norm_topk_prob=True, mlp_only_layers=[0, 2]),
    _case("mixtral", "MixtralForCausalLM"),
    _case("mixtral-native", "MixtralForCausalLM", layout="native"),
    _case("mixtral-window", "MixtralForCausalLM", sliding_window=40),
    _case("gemma", "GemmaForCausalLM"),
    _case("gemma2", "Gemma2ForCausalLM"),
    _case("gemma2-uncapped", "Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None),
    _case("gemma3", "Gemma3ForConditionalGeneration"),
    _case("gemma3-linear", "Gemma3ForConditionalGeneration", rope_parameters=GLOBAL_LINEAR),
    _case("gemma3-native", "Gemma3ForConditionalGeneration", layout="native"),
    _case(
        "gemma3-lean",
        "Gemma3ForConditionalGeneration",
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        rope_parameters=GEMMA3_DEFAULT_ROPE,
    ),
    _case("gemma3-text", "Gemma3ForCausalLM"),
    _case("gemma3-text-linear", "Gemma3ForCausalLM", rope_parameters=GLOBAL_LINEAR),
    _case("gemma3-text-pattern", "Gemma3ForCausalLM", sliding_window_pattern=3),
    _case("gemmoe", "GemmoeForCausalLM"),
    _case("starcoder2", "Starcoder2ForCausalLM"),
    _case("starcoder2-full", "Starcoder2ForCausalLM", sliding_window=None),
    _case("cohere", "CohereForCausalLM"),
    _case("cohere-qk-norm", "CohereForCausalLM", use_qk_norm=True),
    _case("cohere2", "Cohere2ForCausalLM"),
    _case("cohere2-pattern", "Cohere2ForCausalLM", sliding_window_pattern=2),
    _case("dbrx", "DbrxForCausalLM"),
    _case("dbrx-raw-shares", "DbrxForCausalLM", ffn_config={"moe_normalize_expert_weights": None}),
    _case("phi3", "Phi3ForCausalLM"),
    _case("phi3-partial", "Phi3ForCausalLM", rope_parameters={"partial_rotary_factor": 0.5}, sliding_window=None),
    _case("phi3-longrope", "Phi3ForCausalLM", rope_parameters=LONGROPE, **ORIGINAL, sliding_window=None),
    _case(
        "phi3-longrope-partial",
        "Phi3ForCausalLM",
        rope_parameters=PHI4,
        **ORIGINAL,
        sliding_window=None,
        tie_word_embeddings=True,
    ),
    _case("glm4", "Glm4ForCausalLM"),
    _case("glm4-unbiased", "Glm4ForCausalLM", attention_bias=False),
    _case("bigcode", "GPTBigCodeForCausalLM"),
    _case("bigcode-erf", "GPTBigCodeForCausalLM", activation_function="gelu"),
    _case("gpt2", "GPT2LMHeadModel"),
    _case("gpt2-bare", "GPT2LMHeadModel", layout="bare"),
    _case("internlm2", "InternLM2ForCausalLM"),
    _case("internlm2-dynamic", "InternLM2ForCausalLM", rope_parameters=DYNAMIC, max_position_embeddings=128),
    _case("llava", "LlavaForConditionalGeneration"),
    _case("llava-native", "LlavaForConditionalGeneration", layout="native"),
    _case("mistral3", "Mistral3ForConditionalGeneration"),
    _case("mistral3-native", "Mistral3ForConditionalGeneration", layout="native"),
    _case("qwen2-vl", "Qwen2VLForConditionalGeneration"),
    _case("qwen2-vl-tied", "Qwen2VLForConditionalGeneration", tie_word_embeddings=True),
    _case("qwen2-vl-native", "Qwen2VLForConditionalGeneration", layout="native"),
    _case("qwen2.5-vl", "Qwen2_5_VLForConditionalGeneration"),
    _case("qwen2.5-vl-native", "Qwen2_5_VLForConditionalGeneration", layout="native"),
    _case("smollm3", "SmolLM3ForCausalLM"),
    _case("smollm3-listed", "SmolLM3ForCausalLM", no_rope_layers=[0, 1, 0, 1]),
    _case(
        "smollm3-window",
        "SmolLM3ForCausalLM",
        use_sliding_window=True,
        sliding_window=40,
        no_rope_layers=[1, 0, 1, 0],
    ),
    _case("olmo2", "Olmo2ForCausalLM"),
    _case("qwen3-next", "Qwen3NextForCausalLM"),
    _case("qwen3-next-native", "Qwen3NextForCausalLM", layout="native"),
    _case("qwen3-next-mixed", "Qwen3NextForCausalLM", mlp_only_layers=[1], norm_topk_prob=False),
    _case("qwen3-next-interval", "Qwen3NextForCausalLM", layer_types=INTERVAL, decoder_sparse_step=2),
    _case("qwen3.5", "Qwen3_5ForCausalLM"),
    _case("qwen3.5-shared-keys", "Qwen3_5ForCausalLM", linear_num_value_heads=2, tie_word_embeddings=True),
    _case("qwen3.5-biased", "Qwen3_5ForCausalLM", attention_bias=True),
    _case("qwen3.5-moe", "Qwen3_5MoeForCausalLM"),
    _case("qwen3.5-moe-native", "Qwen3_5MoeForCausalLM", layout="native"),
    _case("qwen3.5-vl", "Qwen3_5ForConditionalGeneration"),
    _case("qwen3.5-vl-native", "Qwen3_5ForConditionalGeneration", layout="native"),
    _case("qwen3.5-vl-moe", "Qwen3_5MoeForConditionalGeneration"),
    _case("nemotron-h", "NemotronHForCausalLM"),
    _case("nemotron-h-native", "NemotronHForCausalLM", layout="native"),
    _case("nemotron-h-latent", "NemotronHForCausalLM", moe_latent_size=32, norm_topk_prob=False, n_group=1),
    _case("nemotron-h-biased", "NemotronHForCausalLM", use_bias=True, mlp_bias=True, use_conv_bias=False),
    _case("granite-hybrid", "GraniteMoeHybridForCausalLM"),
    _case("granite-hybrid-native", "GraniteMoeHybridForCausalLM", layout="native"),
    _case("granite-hybrid-rope", "GraniteMoeHybridForCausalLM", position_embedding_type="rope"),
    _case("granite-hybrid-dense", "GraniteMoeHybridForCausalLM", num_local_experts=0, mamba_proj_bias=True),
    _case("falcon-h1", "FalconH1ForCausalLM"),
    _case("falcon-h1-norm-first", "FalconH1ForCausalLM", mamba_norm_before_gate=True, mamba_proj_bias=True),
    _case("falcon-h1-gated", "FalconH1ForCausalLM", mamba_rms_norm=False, projectors_bias=True, mlp_bias=True),
    _case("bamba", "BambaForCausalLM"),
    _case("bamba-biased", "BambaForCausalLM", attention_bias=True, mlp_bias=True, mamba_conv_bias=False),
    _case("lfm2", "Lfm2ForCausalLM"),
    _case("lfm2-biased", "Lfm2ForCausalLM", conv_bias=True, block_auto_adjust_ff_dim=False),
    _case("lfm2-moe", "Lfm2MoeForCausalLM"),
    _case("lfm2-moe-native", "Lfm2MoeForCausalLM", layout="native"),
    _case("lfm2-moe-unbiased", "Lfm2MoeForCausalLM", use_expert_bias=False, norm_topk_prob=False),
    _case("kimi-linear", "KimiLinearForCausalLM"),
    _case("kimi-linear-native", "KimiLinearForCausalLM", layout="native"),
    _case("kimi-linear-low-rank-q", "KimiLinearForCausalLM", q_lora_rank=20, n_group=1),
    _case("olmo-hybrid", "OlmoHybridForCausalLM"),
    _case("olmo-hybrid-nope", "OlmoHybridForCausalLM", rope_parameters=None, linear_allow_neg_eigval=False),
    _case("olmo-hybrid-native", "OlmoHybridForCausalLM", layout="native"),
]
"""Every model of the zoo, by family."""

RECURRENT = (
    *("qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen3.5-vl", "qwen3.5-vl-moe", "nemotron-h", "granite-hybrid"),
    *("falcon-h1", "bamba", "lfm2", "lfm2-moe", "kimi-linear", "olmo-hybrid"),
)
"""One model of each family with recurrent states."""
