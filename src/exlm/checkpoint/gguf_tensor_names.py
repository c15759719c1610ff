"""The names of each role's tensors in GGUF files, and what llama.cpp's converter changed in the weights.

The names are the same for every architecture, so a family's own `TensorNames`, which are those of folders,
are not needed. Widths of fused and stacked tensors come from the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import BadFile
from ..spec.tensor_names import TensorLocation, TensorNames

LAYER_PREFIX = "blk.{i}."

BASE_KEYS = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": LAYER_PREFIX + "attn_norm",
    "attn_post": LAYER_PREFIX + "post_attention_norm",
    "mlp_norm": LAYER_PREFIX + "ffn_norm",
    "mlp_post": LAYER_PREFIX + "post_ffw_norm",
    "attn.q": LAYER_PREFIX + "attn_q",
    "attn.k": LAYER_PREFIX + "attn_k",
    "attn.v": LAYER_PREFIX + "attn_v",
    "attn.o": LAYER_PREFIX + "attn_output",
    "attn.q_norm": LAYER_PREFIX + "attn_q_norm",
    "attn.k_norm": LAYER_PREFIX + "attn_k_norm",
    "mlp.gate": LAYER_PREFIX + "ffn_gate",
    "mlp.up": LAYER_PREFIX + "ffn_up",
    "mlp.down": LAYER_PREFIX + "ffn_down",
    "mlp.router": LAYER_PREFIX + "ffn_gate_inp",
}

NORMS = ("final_norm", "attn_norm", "attn_post", "mlp_norm", "mlp_post", "attn.q_norm", "attn.k_norm")


@dataclass(frozen=True)
class GgufTensorNames:
    """The tensor names of one model, and the converter's changes to undo."""

    names: TensorNames
    head_dim: int
    interleaved_rope: bool  # the outputs of q and k are ordered for rotary pairs (2i, 2i + 1)
    norms_plus_one: bool  # norms are stored as w + 1


def gguf_tensor_names(metadata: Mapping[str, Any], source: str) -> GgufTensorNames:
    """The tensor names of the model that the metadata describes; `source` names the file in errors."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise BadFile(f"{source}: expected a name as general.architecture, found {arch!r}.")

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or value < 1:
            raise BadFile(f"{source}: expected a number of at least 1 as {arch}.{key}, found {value!r}.")
        return value

    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads)
    table: dict[str, tuple[TensorLocation, ...]] = {
        role: (TensorLocation(key),) for role, key in BASE_KEYS.items()
    }
    q, kv = heads * head_dim, number("attention.head_count_kv", heads) * head_dim
    for role, span in {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}.items():
        table[f"attn.{role}"] += (TensorLocation(LAYER_PREFIX + "attn_qkv", rows=(span,)),)
    width = number("feed_forward_length", 1)
    if arch == "phi3":
        table["mlp.gate"] = (TensorLocation(LAYER_PREFIX + "ffn_up", rows=((0, width),)),)
        table["mlp.up"] = (TensorLocation(LAYER_PREFIX + "ffn_up", rows=((width, 2 * width),)),)
    expert = number("expert_feed_forward_length", width)
    for part, rows in {"gate": expert, "up": expert, "down": hidden}.items():
        stacked = TensorLocation(f"{LAYER_PREFIX}ffn_{part}_exps", rows_per_expert=rows)
        table[f"mlp.experts.{part}"] = (stacked, TensorLocation(f"{LAYER_PREFIX}ffn_{part}.{{e}}"))
    return GgufTensorNames(
        TensorNames(locations=tuple(table.items())),
        head_dim,
        interleaved_rope=arch == "llama",
        norms_plus_one=arch in ("gemma", "gemma2", "gemma3"),
    )


def role_in_layer(role: str) -> str:
    """A role without its layer: `layers.3.attn.q` → `attn.q`."""
    return role.split(".", 2)[2] if role.startswith("layers.") else role
