"""Sizes of known models, as in their config.json, and the formats of random weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FORMATS = {"exl2": 4.1, "gptq": 4.0, "gguf": 4.5, "dense": 16.0}
"""Formats of random weights, and the default bits per weight of each."""


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

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

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
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name within a layer, in, out), as files order them."""
        yield "mlp.down_proj", self.mlp, self.hidden
        yield "mlp.gate_proj", self.hidden, self.mlp
        yield "mlp.up_proj", self.hidden, self.mlp
        yield from self.attention()

    def attention(self) -> Iterator[tuple[str, int, int]]:
        """`matrices` of the attention only."""
        hidden, wide, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "self_attn.k_proj", hidden, kv
        yield "self_attn.o_proj", wide, hidden
        yield "self_attn.q_proj", hidden, wide
        yield "self_attn.v_proj", hidden, kv


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

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name within a layer, in, out), as files order them."""
        for e in range(self.experts):
            yield f"block_sparse_moe.experts.{e}.w1", self.hidden, self.mlp
            yield f"block_sparse_moe.experts.{e}.w2", self.mlp, self.hidden
            yield f"block_sparse_moe.experts.{e}.w3", self.hidden, self.mlp
        yield "block_sparse_moe.gate", self.hidden, self.experts
        yield from self.attention()


@dataclass(frozen=True)
class Qwen3Moe(Mixtral):
    """The sizes of a Qwen3 MoE model: many narrow experts, and an explicit head width."""

    head: int = 128

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head

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

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name within a layer, in, out), as files order them."""
        for e in range(self.experts):
            yield f"mlp.experts.{e}.down_proj", self.mlp, self.hidden
            yield f"mlp.experts.{e}.gate_proj", self.hidden, self.mlp
            yield f"mlp.experts.{e}.up_proj", self.hidden, self.mlp
        yield "mlp.gate", self.hidden, self.experts
        yield from self.attention()


SHAPES: dict[str, Shape] = {
    "llama-2-7b": Shape(4096, 32, 11008, 32, 32, 32000),
    "llama-2-13b": Shape(5120, 40, 13824, 40, 40, 32000),
    "llama-3-8b": Shape(4096, 32, 14336, 32, 8, 128256, 8192, 500000.0),
    "llama-3-70b": Shape(8192, 80, 28672, 64, 8, 128256, 8192, 500000.0),
    "mistral-7b": Shape(4096, 32, 14336, 32, 8, 32000, 32768),
    "tinyllama-1.1b": Shape(2048, 22, 5632, 32, 4, 32000, 2048),
    "mixtral-8x7b": Mixtral(4096, 32, 14336, 32, 8, 32000, 32768, 1000000.0),
    "qwen3-30b-a3b": Qwen3Moe(2048, 48, 768, 32, 4, 151936, 40960, 1000000.0, 128, 8),
    "smollm2-135m": Shape(576, 30, 1536, 9, 3, 49152, 8192, 100000.0),
    "tiny": Shape(256, 2, 512, 4, 2, 512, 2048),
    "tiny-moe": Mixtral(256, 2, 160, 4, 2, 512, 2048, 10000.0, 4, 2),
}
