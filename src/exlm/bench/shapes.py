"""Sizes of known models, as in their config.json, and the formats of random weights. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

FORMATS = {"exl2": 4.1, "gptq": 4.0, "gguf": 4.5, "dense": 16.0}
"""Formats of random weights, and the default bits per weight of each."""

MIXES: dict[str, str] = {
    "q2_k": "Q2_K",
    "q3_k_m": "Q3_K",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q4_k_s": "Q4_K",
    "q4_k_m": "Q4_K",
    "q5_0": "Q5_0",
    "q5_1": "Q5_1",
    "q5_k_s": "Q5_K",
    "q5_k_m": "Q5_K",
    "q6_k": "Q6_K",
    "q8_0": "Q8_0",
    "iq4_nl": "IQ4_NL",
    "iq4_xs": "IQ4_XS",
}
"""Mixes of GGUF types, named as llama.cpp's quantiser names them, and the type of most matrices in each."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int = 4096
    theta: float = 10000.0
    head: int = field(default=0, kw_only=True)  # width of one head; 0: hidden / heads

    tied: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head or self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "hidden_act": "silu",
            "torch_dtype": "float16",
            "tie_word_embeddings": self.tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


@dataclass(frozen=True)
class Mixtral(Shape):
    """The sizes of a Mixtral model, with experts of width `mlp`."""

    experts: int = 8
    active: int = 2

    def config(self) -> dict[str, Any]:
        """config.json."""
        return super().config() | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.active,
        }


@dataclass(frozen=True)
class Qwen3Moe(Mixtral):
    """The sizes of a Qwen3 MoE model: many narrow experts, and an explicit head width."""

    head: int = field(default=128, kw_only=True)

    def config(self) -> dict[str, Any]:
        """config.json."""
        return super().config() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": self.head,
            "num_experts": self.experts,
            "moe_intermediate_size": self.mlp,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
        }


@dataclass(frozen=True)
class Qwen35(Shape):
    """The sizes of a Qwen 3.5 model: gated delta nets, and attention with an output gate in every fourth layer."""

    head: int = field(default=256, kw_only=True)
    key_heads: int = 16
    value_heads: int = 32
    state_dim: int = 128  # width of a head's key, and of its value
    conv: int = 4

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer's mixer."""
        return ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(self.layers)]

    def config(self) -> dict[str, Any]:
        """config.json."""
        pairs = self.head_dim // 8  # a quarter of a head turns
        rope = {
            "rope_type": "default",
            "rope_theta": self.theta,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [(pairs + 2 - plane) // 3 for plane in range(3)],
        }
        config = super().config() | self.delta_net_config() | {"rope_parameters": rope, "layer_types": self.layer_types}
        del config["rope_theta"]
        return config | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}

    def delta_net_config(self) -> dict[str, Any]:
        """The part of config.json about heads and delta nets."""
        return {
            "rms_norm_eps": 1e-6,
            "head_dim": self.head_dim,
            "attn_output_gate": True,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.state_dim,
            "linear_value_head_dim": self.state_dim,
            "linear_conv_kernel_dim": self.conv,
        }


@dataclass(frozen=True)
class Qwen35Moe(Qwen35):
    """The sizes of a Qwen 3.5 MoE model: experts of width `mlp`, and a gated shared one."""

    experts: int = 256
    active: int = 8
    shared: int = 512

    def config(self) -> dict[str, Any]:
        """config.json."""
        config = super().config() | self.experts_config()
        return config | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}

    def experts_config(self) -> dict[str, Any]:
        """The part of config.json about experts."""
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.active,
            "moe_intermediate_size": self.mlp,
            "shared_expert_intermediate_size": self.shared,
        }


@dataclass(frozen=True)
class Qwen3Next(Qwen35Moe):
    """The sizes of a Qwen3-Next model: Qwen 3.5 MoE whose delta nets have two fused projections."""

    dense_mlp: int = 5120  # of layers without experts, of which there are none

    def config(self) -> dict[str, Any]:
        """config.json."""
        own = {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "intermediate_size": self.dense_mlp,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "full_attention_interval": 4,
            "partial_rotary_factor": 0.25,
        }
        return Shape.config(self) | self.delta_net_config() | self.experts_config() | own


@dataclass(frozen=True)
class Mamba:
    """The sizes of a Mamba 2 mixer."""

    heads: int
    head_dim: int
    groups: int
    state: int = 128
    conv: int = 4

    @property
    def width(self) -> int:
        """Width of x, z and the output."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class NemotronH(Shape):
    """The sizes of a Nemotron-H model: each layer is one of Mamba 2 (M), an MLP without a gate (-), attention (*)."""

    head: int = field(default=128, kw_only=True)
    pattern: str = ""  # a letter for each layer
    mamba: Mamba = Mamba(128, 80, 8)

    def config(self) -> dict[str, Any]:
        """config.json."""
        config = super().config() | {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "head_dim": self.head,
            "hybrid_override_pattern": self.pattern,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "mamba_num_heads": self.mamba.heads,
            "mamba_head_dim": self.mamba.head_dim,
            "n_groups": self.mamba.groups,
            "ssm_state_size": self.mamba.state,
            "conv_kernel": self.mamba.conv,
            "use_conv_bias": True,
            "use_bias": False,
            "time_step_min": 0.001,
            "time_step_max": 0.1,
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
        }
        for llama_key in ("rms_norm_eps", "rope_theta", "hidden_act"):
            del config[llama_key]
        return config


@dataclass(frozen=True)
class GraniteHybrid(Shape):
    """The sizes of a Granite 4.0 H model: Mamba 2 or attention, then experts of width `mlp` and a shared MLP."""

    experts: int = 64
    active: int = 6
    shared: int = 1024
    attended: tuple[int, ...] = ()  # the layers with attention
    mamba: Mamba = Mamba(48, 64, 1)

    tied: ClassVar[bool] = True

    def config(self) -> dict[str, Any]:
        """config.json."""
        kinds = ["attention" if layer in self.attended else "mamba" for layer in range(self.layers)]
        return super().config() | {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "layer_types": kinds,
            "position_embedding_type": "nope",
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.active,
            "shared_intermediate_size": self.shared,
            "embedding_multiplier": 12,
            "attention_multiplier": 1 / self.head_dim,
            "residual_multiplier": 0.22,
            "logits_scaling": 6,
            "mamba_n_heads": self.mamba.heads,
            "mamba_d_head": self.mamba.head_dim,
            "mamba_n_groups": self.mamba.groups,
            "mamba_d_state": self.mamba.state,
            "mamba_d_conv": self.mamba.conv,
            "mamba_expand": self.mamba.width // self.hidden,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        }


@dataclass(frozen=True)
class Lfm2(Shape):
    """The sizes of an LFM2 model: short convolutions, and attention in some layers; `mlp` is the width that results."""

    attended: tuple[int, ...] = ()  # the layers with attention
    conv: int = 3

    tied: ClassVar[bool] = True

    def config(self) -> dict[str, Any]:
        """config.json."""
        config = super().config() | {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "block_ff_dim": 3 * self.mlp // 2,  # the width is two thirds of it
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": self.conv,
            "conv_bias": False,
            "norm_eps": 1e-5,
            "layer_types": ["full_attention" if layer in self.attended else "conv" for layer in range(self.layers)],
            "tie_embedding": True,
        }
        for llama_key in ("rms_norm_eps", "intermediate_size", "hidden_act"):
            del config[llama_key]
        return config


NEMOTRON_NANO_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"

SHAPES: dict[str, Shape] = {
    "llama-2-7b": Shape(4096, 32, 11008, 32, 32, 32000),
    "llama-2-13b": Shape(5120, 40, 13824, 40, 40, 32000),
    "llama-3-8b": Shape(4096, 32, 14336, 32, 8, 128256, 8192, 500000.0),
    "llama-3-70b": Shape(8192, 80, 28672, 64, 8, 128256, 8192, 500000.0),
    "mistral-7b": Shape(4096, 32, 14336, 32, 8, 32000, 32768),
    "tinyllama-1.1b": Shape(2048, 22, 5632, 32, 4, 32000, 2048),
    "mixtral-8x7b": Mixtral(4096, 32, 14336, 32, 8, 32000, 32768, 1000000.0),
    "qwen3-30b-a3b": Qwen3Moe(2048, 48, 768, 32, 4, 151936, 40960, 1000000.0, 128, 8),
    "qwen3.5-27b": Qwen35(5120, 64, 17408, 24, 4, 248320, 262144, 1e7, value_heads=48),
    "qwen3.6-35b-a3b": Qwen35Moe(2048, 40, 512, 16, 2, 248320, 262144, 1e7),
    "qwen3-next-80b-a3b": Qwen3Next(2048, 48, 512, 16, 2, 151936, 262144, 1e7, experts=512, active=10),
    "nemotron-nano-9b": NemotronH(4480, 56, 15680, 40, 8, 131072, 131072, pattern=NEMOTRON_NANO_PATTERN),
    "granite-4-h-tiny": GraniteHybrid(1536, 40, 512, 12, 4, 100352, 131072, attended=(5, 15, 25, 35)),
    "lfm2-1.2b": Lfm2(2048, 16, 8192, 32, 8, 65536, 128000, 1e6, attended=(2, 5, 8, 10, 12, 14)),
    "smollm2-135m": Shape(576, 30, 1536, 9, 3, 49152, 8192, 100000.0),
    "tiny": Shape(256, 2, 512, 4, 2, 512, 2048),
    "tiny-moe": Mixtral(256, 2, 160, 4, 2, 512, 2048, 10000.0, 4, 2),
}
