"""DBRX: LayerNorm without bias, clamped q, k, v, and experts stacked in one tensor each."""

from __future__ import annotations

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, KeyRename, TensorLocation, TensorNames
from .common import ACTIVATIONS, attention, decoder, fused_qkv, moe
from .config_reader import ConfigReader

KEY_RENAMES = (
    KeyRename("transformer.", "model."),
    KeyRename(".blocks.", ".layers."),
    KeyRename(".ffn.experts.mlp.", ".block_sparse_moe.experts."),
    KeyRename(".ffn.router.layer.", ".block_sparse_moe.gate."),
    KeyRename(".norm_attn_norm.norm_1.", ".input_layernorm."),
    KeyRename(".norm_attn_norm.norm_2.", ".post_attention_layernorm."),
    KeyRename(".norm_attn_norm.attn.", ".self_attn."),
    KeyRename(".out_proj.", ".o_proj."),
    KeyRename(".norm_f.", ".norm."),
    KeyRename(".wte.", ".embed_tokens."),
)


def dbrx(c: ConfigReader) -> spec.Model:
    """Sixteen experts, four of them for each token, in the published model."""
    n = spec.Norm("layer", 1e-5)
    attn = attention(c, qkv_clip=c.real("attn_config.clip_qkv", default=None))
    act = c.text("ffn_config.ffn_act_fn.name", default="silu")
    # The p-norm by which the weights of the active experts are divided; null leaves them as they are.
    p_norm_key = "moe_normalize_expert_weights"
    p_norm = c.real(f"ffn_config.{p_norm_key}", default=1.0)
    renormalize = c.nested("ffn_config").get(p_norm_key, 1.0) is not None
    if act not in ACTIVATIONS:
        raise c.invalid_value("ffn_config.ffn_act_fn.name", f"one of {', '.join(ACTIVATIONS)}", act)
    if p_norm != 1.0:
        raise c.invalid_value(f"ffn_config.{p_norm_key}", "1 or null", p_norm)
    width = c.size("ffn_config.ffn_hidden_size")
    experts = moe(c, width=width, act=ACTIVATIONS[act], renormalize=renormalize)
    layer = spec.Layer(attn, experts, n, n)
    return decoder(c, [layer] * c.num_layers(), final_norm=n, names=_names(attn, width))


def _names(attn: spec.Attention, width: int) -> TensorNames:
    def expert(key: str, *, transposed: bool = False) -> tuple[TensorLocation, ...]:
        stacked = TensorLocation(
            LAYER_PREFIX + f"block_sparse_moe.experts.{key}",
            rows_per_expert=width,
            transposed=transposed,
            without_suffix=True,
        )
        return (TensorLocation(LAYER_PREFIX + f"block_sparse_moe.experts.{{e}}.{key}"), stacked)

    return TensorNames(key_renames=KEY_RENAMES).with_locations(
        **fused_qkv(attn, "self_attn.Wqkv"),
        mlp__router=TensorLocation(LAYER_PREFIX + "block_sparse_moe.gate"),
        mlp__experts__gate=expert("w1"),
        mlp__experts__up=expert("v1"),
        mlp__experts__down=expert("w2", transposed=True),
    )
