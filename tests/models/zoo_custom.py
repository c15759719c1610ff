"""Architectures whose code is published with their weights, rebuilt from parts of transformers.

Each is a transformers model with another norm, head or MLP, and a folder with the names that
the family publishes. Nothing here runs code from a model folder, and transformers is taken to be
right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .zoo_recipes import GEMMA, LLAMA, Config, Tensors, UnsavedModel, deep_merge, make_transformers_model

Renames = tuple[tuple[str, str], ...]


class UnitRowsHead(nn.Linear):
    """A head whose rows are normalised at use."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits against the normalised rows."""
        return functional.linear(input, functional.normalize(self.weight, dim=1))


class Expert(nn.Module):
    """A gated MLP with Mixtral's names for its three matrices."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(gelu(gate) · up)"""
        product: Tensor = self.w2(functional.gelu(self.w1(x), approximate="tanh") * self.w3(x))
        return product


class Experts(nn.Module):
    """Every expert computed for every token, then weighted: slow and simple."""

    def __init__(self, hidden: int, width: int, experts: int, active: int) -> None:
        super().__init__()
        self.active = active
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList([Expert(hidden, width) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        """Softmax over all experts, top `active`, weights renormalised."""
        shares, chosen = functional.softmax(self.gate(x), dim=-1).topk(self.active, dim=-1)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        weights = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, shares)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * weights.unsqueeze(-2)).sum(dim=-1)


def index(overrides: Config) -> UnsavedModel:
    """Llama under another name; `norm_head` makes the head's rows unit vectors at use."""
    norm_head = overrides.get("norm_head", 0)
    model = _llama(overrides, "norm_head")
    if norm_head:
        model.lm_head = UnitRowsHead(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    return UnsavedModel(model, rewrite_config=_recast("index", norm_head=norm_head))


def minicpm(overrides: Config) -> UnsavedModel:
    """Granite's multipliers, derived from the width and depth of the tuned model. Tied by default."""
    own: Config = {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 40}
    own.update({key: overrides[key] for key in own if key in overrides})
    numbers = deep_merge(LLAMA, {k: v for k, v in overrides.items() if k not in own})
    numbers.setdefault("tie_word_embeddings", True)
    hidden, heads = numbers["hidden_size"], numbers["num_attention_heads"]
    multipliers = {
        "embedding_multiplier": own["scale_emb"],
        "attention_multiplier": (hidden // heads) ** -0.5,
        "residual_multiplier": own["scale_depth"] / math.sqrt(numbers["num_hidden_layers"]),
        "logits_scaling": hidden / own["dim_model_base"],
    }
    model = make_transformers_model("GraniteForCausalLM", "GraniteConfig", {**numbers, **multipliers})
    return UnsavedModel(model, embedding=0.2, rewrite_config=_recast("minicpm", *multipliers, **own))


def yi(overrides: Config) -> UnsavedModel:
    """Llama whose norms are called ln1 and ln2."""
    renames = ((".input_layernorm.", ".ln1."), (".post_attention_layernorm.", ".ln2."))
    return UnsavedModel(_llama(overrides), rename_tensors=_renamed(renames), rewrite_config=_recast("Yi"))


def orion(overrides: Config) -> UnsavedModel:
    """Llama with LayerNorm, biased, in every place of RMSNorm."""
    model = _llama(overrides)
    width, eps = model.config.hidden_size, model.config.rms_norm_eps
    for layer in model.model.layers:
        layer.input_layernorm = nn.LayerNorm(width, eps=eps)
        layer.post_attention_layernorm = nn.LayerNorm(width, eps=eps)
    model.model.norm = nn.LayerNorm(width, eps=eps)
    return UnsavedModel(model, rewrite_config=_recast("orion"))


def gemmoe(overrides: Config) -> UnsavedModel:
    """Gemma with Mixtral's experts for its MLPs."""
    own: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
    own.update({key: overrides[key] for key in own if key in overrides})
    numbers = deep_merge(GEMMA, {k: v for k, v in overrides.items() if k not in own})
    model = make_transformers_model("GemmaForCausalLM", "GemmaConfig", numbers)
    for layer in model.model.layers:
        sizes = (numbers["hidden_size"], numbers["intermediate_size"])
        layer.mlp = Experts(*sizes, own["num_local_experts"], own["num_experts_per_tok"])
    return UnsavedModel(
        model,
        embedding=0.15,
        active=own["num_experts_per_tok"],
        rename_tensors=_renamed(((".mlp.", ".block_sparse_moe."),)),
        rewrite_config=_recast("gemmoe", **own),
    )


INTERNLM2: Renames = (
    ("lm_head.", "output."),
    (".embed_tokens.", ".tok_embeddings."),
    (".self_attn.o_proj.", ".attention.wo."),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.up_proj.", ".feed_forward.w3."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
)


def internlm2(overrides: Config) -> UnsavedModel:
    """Llama with one matrix for q, k and v, in which each kv head follows its query heads."""
    model = _llama(overrides)
    kv_heads = model.config.num_key_value_heads

    def respell(tensors: Tensors) -> Tensors:
        result = dict(tensors)
        for layer in range(model.config.num_hidden_layers):
            key = f"model.layers.{layer}."
            q, k, v = (result.pop(f"{key}self_attn.{part}_proj.weight") for part in "qkv")
            groups = [t.reshape(kv_heads, -1, t.shape[-1]) for t in (q, k, v)]
            result[f"{key}attention.wqkv.weight"] = torch.cat(groups, dim=1).flatten(0, 1)
        return _renamed(INTERNLM2)(result)

    return UnsavedModel(model, rename_tensors=respell, rewrite_config=_recast("internlm2", bias=False))


def _llama(overrides: Config, *own: str) -> Any:
    numbers = deep_merge(LLAMA, {key: value for key, value in overrides.items() if key not in own})
    return make_transformers_model("LlamaForCausalLM", "LlamaConfig", numbers)


def _renamed(renames: Renames) -> Callable[[Tensors], Tensors]:
    def rename(tensors: Tensors) -> Tensors:
        result = {}
        for key, tensor in tensors.items():
            for before, after in renames:
                key = key.replace(before, after)
            result[key] = tensor
        return result

    return rename


def _recast(model_type: str, *dropped: str, **added: Any) -> Callable[[Config], Config]:
    """config.json under another model type, without keys that the family's files never had."""

    def recast(config: Config) -> Config:
        gone = {"head_dim"} if config.get("model_type") != "gemma" else set()
        kept = {key: value for key, value in config.items() if key not in gone | set(dropped)}
        return {**kept, "model_type": model_type, **added}

    return recast


CUSTOM: dict[str, Callable[[Config], UnsavedModel]] = {
    "GemmoeForCausalLM": gemmoe,
    "IndexForCausalLM": index,
    "InternLM2ForCausalLM": internlm2,
    "MiniCPMForCausalLM": minicpm,
    "OrionForCausalLM": orion,
    "YiForCausalLM": yi,
}
"""The builders by architecture name; their folders have the old keys by default."""
