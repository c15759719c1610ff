"""InternLM2: Llama with other names, and q, k and v interleaved head by head."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, KeyRename, TensorLocation, TensorNames
from .common import attention, interleaved_qkv, map_layers
from .config_reader import ConfigReader
from .llama import llama

KEY_RENAMES = (
    KeyRename("output.", "lm_head.", prefix_only=True),
    KeyRename("model.tok_embeddings.", "model.embed_tokens.", prefix_only=True),
    KeyRename(".attention.", ".self_attn."),
    KeyRename(".wo.", ".o_proj."),
)


def internlm2(c: ConfigReader) -> spec.Model:
    """Llama; with `bias`, attention has biases."""
    bias = c.flag("bias", default=False)
    attn = attention(c, qkv_bias=bias, out_bias=bias)
    names = TensorNames(key_renames=KEY_RENAMES).with_locations(
        attn_norm=TensorLocation(LAYER_PREFIX + "attention_norm"),
        mlp_norm=TensorLocation(LAYER_PREFIX + "ffn_norm"),
        mlp__gate=TensorLocation(LAYER_PREFIX + "feed_forward.w1"),
        mlp__up=TensorLocation(LAYER_PREFIX + "feed_forward.w3"),
        mlp__down=TensorLocation(LAYER_PREFIX + "feed_forward.w2"),
        **interleaved_qkv(attn, "self_attn.wqkv"),
    )
    return replace(map_layers(llama(c), lambda _, layer: replace(layer, attn=attn)), names=names)
