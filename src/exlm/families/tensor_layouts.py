"""Where several matrices share one stored tensor: q, k, v in a row, gate and up, or all experts."""

from __future__ import annotations

from collections.abc import Mapping

from .. import spec
from ..spec.tensor_names import LAYER_PREFIX, RowRange, TensorLocation


def fused_qkv(
    attn: spec.Attention, key: str, *, transposed: bool = False
) -> dict[str, tuple[TensorLocation, ...]]:
    """Places for q, k, v: alone, or one after the other in `key`."""
    q, kv = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim
    spans = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    return {
        f"attn__{role}": (
            TensorLocation(f"{LAYER_PREFIX}self_attn.{role}_proj"),
            TensorLocation(LAYER_PREFIX + key, rows=(span,), transposed=transposed),
        )
        for role, span in spans.items()
    }


def fused_gate_up(width: int, key: str = "mlp.gate_up_proj") -> dict[str, tuple[TensorLocation, ...]]:
    """Places for gate and up: alone, or one after the other in `key`."""
    return {
        "mlp__gate": (
            TensorLocation(LAYER_PREFIX + "mlp.gate_proj"),
            TensorLocation(LAYER_PREFIX + key, rows=((0, width),)),
        ),
        "mlp__up": (
            TensorLocation(LAYER_PREFIX + "mlp.up_proj"),
            TensorLocation(LAYER_PREFIX + key, rows=((width, 2 * width),)),
        ),
    }


def interleaved_qkv(attn: spec.Attention, key: str) -> dict[str, tuple[TensorLocation, ...]]:
    """Places for q, k, v packed by key/value head: its query heads, its key, its value, and so on."""
    d, share = attn.head_dim, attn.heads // attn.kv_heads
    step = (share + 2) * d
    starts = [h * step for h in range(attn.kv_heads)]

    def rows(first: int, count: int) -> tuple[RowRange, ...]:
        return tuple((s + first * d, s + (first + count) * d) for s in starts)

    spans = {"q": rows(0, share), "k": rows(share, 1), "v": rows(share + 1, 1)}
    return {
        f"attn__{role}": (
            TensorLocation(f"{LAYER_PREFIX}self_attn.{role}_proj"),
            TensorLocation(LAYER_PREFIX + key, rows=span),
        )
        for role, span in spans.items()
    }


def stacked_experts(
    separate: Mapping[str, TensorLocation], width: int, hidden: int
) -> dict[str, tuple[TensorLocation, ...]]:
    """Places for router and experts: alone, or as transformers 5 holds them, in two tensors for a layer."""
    gate_up_key, down_key = LAYER_PREFIX + "mlp.experts.gate_up_proj", LAYER_PREFIX + "mlp.experts.down_proj"
    stacked = {
        "mlp__router": TensorLocation(LAYER_PREFIX + "mlp.gate"),
        "mlp__experts__gate": TensorLocation(
            gate_up_key, rows=((0, width),), rows_per_expert=2 * width, without_suffix=True
        ),
        "mlp__experts__up": TensorLocation(
            gate_up_key, rows=((width, 2 * width),), rows_per_expert=2 * width, without_suffix=True
        ),
        "mlp__experts__down": TensorLocation(down_key, rows_per_expert=hidden, without_suffix=True),
    }
    return {role: tuple(dict.fromkeys((location, stacked[role]))) for role, location in separate.items()}
