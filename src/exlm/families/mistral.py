"""Mistral and its derivatives: Mixtral (experts), Pixtral's language model, Phi-3 and 4 (fused tensors)."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, TensorLocation, TensorNames
from .common import (
    LANGUAGE_MODEL_PREFIXES,
    fused_gate_up,
    fused_qkv,
    layer_windows,
    map_layers,
    moe,
    stacked_experts,
    with_windows,
)
from .config_reader import ConfigReader
from .llama import llama

EXPERT_LOCATIONS = {
    "mlp__router": TensorLocation(LAYER_PREFIX + "block_sparse_moe.gate"),
    "mlp__experts__gate": TensorLocation(LAYER_PREFIX + "block_sparse_moe.experts.{e}.w1"),
    "mlp__experts__up": TensorLocation(LAYER_PREFIX + "block_sparse_moe.experts.{e}.w3"),
    "mlp__experts__down": TensorLocation(LAYER_PREFIX + "block_sparse_moe.experts.{e}.w2"),
}

LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}

MISTRAL_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "vocab_size": 32000,
}


def mistral(c: ConfigReader) -> spec.Model:
    """Llama with a sliding window in every layer, if the file has one."""
    return with_windows(llama(c), layer_windows(c, c.num_layers(), lambda _: True))


def mixtral(c: ConfigReader) -> spec.Model:
    """Mistral with experts in place of the MLP."""
    c = c.with_defaults(rms_norm_eps=1e-5, rope_theta=1e6)
    experts = moe(c)
    model = map_layers(mistral(c), lambda _, layer: replace(layer, mlp=experts))
    return replace(
        model, names=TensorNames().with_locations(**stacked_experts(EXPERT_LOCATIONS, experts.width, model.hidden))
    )


def pixtral(c: ConfigReader) -> spec.Model:
    """The language model of Pixtral: LLaVA and Mistral 3 files."""
    tower = c.text("vision_config.model_type", default=None)
    if tower != "pixtral":
        raise c.invalid_value(
            "vision_config.model_type", '"pixtral" (the only vision encoder known for this architecture)', tower
        )
    kind = c.text("text_config.model_type", default="mistral")
    if kind not in {"mistral", "llama"}:
        raise c.invalid_value("text_config.model_type", '"mistral" or "llama"', kind)
    defaults = LLAMA_DEFAULTS if kind == "llama" else MISTRAL_DEFAULTS
    nested = c.with_missing_keys_filled(defaults) if c.nested("text_config") else c
    return replace(mistral(nested), names=TensorNames(key_renames=LANGUAGE_MODEL_PREFIXES))


def phi3(c: ConfigReader) -> spec.Model:
    """Mistral whose files may fuse q, k, v and gate, up; LongRoPE for long contexts."""
    model = mistral(c.with_defaults(rms_norm_eps=1e-5))
    names = TensorNames().with_locations(
        **fused_qkv(model.attentions[0], "self_attn.qkv_proj"), **fused_gate_up(c.size("intermediate_size"))
    )
    return replace(model, names=names)
