"""DBRX: LayerNorm without bias, clamped q, k, v, and experts stacked in one tensor each."""

from __future__ import annotations

from .. import spec
from ..spec.names import LAYER, Names, Place, Rename
from .common import ACTIVATIONS, attention, decoder, moe
from .fused import qkv
from .hyper import Hyper

RENAME = (
    Rename("transformer.", "model."),
    Rename(".blocks.", ".layers."),
    Rename(".ffn.experts.mlp.", ".block_sparse_moe.experts."),
    Rename(".ffn.router.layer.", ".block_sparse_moe.gate."),
    Rename(".norm_attn_norm.norm_1.", ".input_layernorm."),
    Rename(".norm_attn_norm.norm_2.", ".post_attention_layernorm."),
    Rename(".norm_attn_norm.attn.", ".self_attn."),
    Rename(".out_proj.", ".o_proj."),
    Rename(".norm_f.", ".norm."),
    Rename(".wte.", ".embed_tokens."),
)


def dbrx(c: Hyper) -> spec.Model:
    """Sixteen experts, four of them for each token, in the published model."""
    n = spec.Norm("layer", 1e-5)
    attn = attention(c, clip=c.real("attn_config.clip_qkv", default=None))
    act = c.text("ffn_config.ffn_act_fn.name", default="silu")
    power, raw = _normalisation(c)
    if act not in ACTIVATIONS:
        raise c.wrong("ffn_config.ffn_act_fn.name", f"one of {', '.join(ACTIVATIONS)}", act)
    if power != 1.0:
        raise c.wrong("ffn_config.moe_normalize_expert_weights", "1 or null", power)
    width = c.size("ffn_config.ffn_hidden_size")
    experts = moe(c, width=width, act=ACTIVATIONS[act], renormalize=not raw)
    layer = spec.Layer(attn, experts, n, n)
    return decoder(c, [layer] * c.depth(), final_norm=n, names=_names(attn, width))


def _normalisation(c: Hyper) -> tuple[float, bool]:
    """The norm the chosen experts' shares are divided by, and whether the file says null: by none at all."""
    key = "moe_normalize_expert_weights"
    raw = c.table("ffn_config").get(key, 1.0) is None
    return c.real(f"ffn_config.{key}", default=1.0), raw


def _names(attn: spec.Attention, width: int) -> Names:
    def expert(key: str, *, transposed: bool = False) -> tuple[Place, ...]:
        stacked = Place(
            LAYER + f"block_sparse_moe.experts.{key}", stack=width, transposed=transposed, bare=True
        )
        return (Place(LAYER + f"block_sparse_moe.experts.{{e}}.{key}"), stacked)

    return Names(rename=RENAME).with_places(
        **qkv(attn, "self_attn.Wqkv"),
        mlp__router=Place(LAYER + "block_sparse_moe.gate"),
        mlp__experts__gate=expert("w1"),
        mlp__experts__up=expert("v1"),
        mlp__experts__down=expert("w2", transposed=True),
    )
