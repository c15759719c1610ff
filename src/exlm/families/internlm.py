"""InternLM2: Llama with other names and q, k, v woven together head by head."""

from __future__ import annotations

from dataclasses import replace

from .. import spec
from ..spec.names import LAYER, Names, Place, Rename
from .common import attention, layered
from .fused import interleaved_qkv
from .hyper import Hyper
from .llama import llama

RENAME = (
    Rename("output.", "lm_head.", start=True),
    Rename("model.tok_embeddings.", "model.embed_tokens.", start=True),
    Rename(".attention.", ".self_attn."),
    Rename(".wo.", ".o_proj."),
)


def internlm2(c: Hyper) -> spec.Model:
    """Llama's shape; `bias` puts one on attention."""
    bias = c.flag("bias", default=False)
    attn = attention(c, qkv_bias=bias, out_bias=bias)
    names = Names(rename=RENAME).with_places(
        attn_norm=Place(LAYER + "attention_norm"),
        mlp_norm=Place(LAYER + "ffn_norm"),
        mlp__gate=Place(LAYER + "feed_forward.w1"),
        mlp__up=Place(LAYER + "feed_forward.w3"),
        mlp__down=Place(LAYER + "feed_forward.w2"),
        **interleaved_qkv(attn, "self_attn.wqkv"),
    )
    return replace(layered(llama(c), lambda _, layer: replace(layer, attn=attn)), names=names)
