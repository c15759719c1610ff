"""Where several matrices share one stored tensor: q, k, v in a row, gate and up, or all experts."""

from __future__ import annotations

from collections.abc import Mapping

from .. import spec
from ..spec.names import LAYER, Place, Span


def qkv(attn: spec.Attention, key: str, *, transposed: bool = False) -> dict[str, tuple[Place, ...]]:
    """Places for q, k, v: alone, or one after the other in `key`."""
    q, kv = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim
    spans = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    return {
        f"attn__{role}": (
            Place(f"{LAYER}self_attn.{role}_proj"),
            Place(LAYER + key, rows=(span,), transposed=transposed),
        )
        for role, span in spans.items()
    }


def gate_up(width: int, key: str = "mlp.gate_up_proj") -> dict[str, tuple[Place, ...]]:
    """Places for gate and up: alone, or one after the other in `key`."""
    return {
        "mlp__gate": (Place(LAYER + "mlp.gate_proj"), Place(LAYER + key, rows=((0, width),))),
        "mlp__up": (Place(LAYER + "mlp.up_proj"), Place(LAYER + key, rows=((width, 2 * width),))),
    }


def interleaved_qkv(attn: spec.Attention, key: str) -> dict[str, tuple[Place, ...]]:
    """Places for q, k, v packed by key/value head: its query heads, its key, its value, and so on."""
    d, share = attn.head_dim, attn.heads // attn.kv_heads
    step = (share + 2) * d
    starts = [h * step for h in range(attn.kv_heads)]

    def rows(first: int, count: int) -> tuple[Span, ...]:
        return tuple((s + first * d, s + (first + count) * d) for s in starts)

    spans = {"q": rows(0, share), "k": rows(share, 1), "v": rows(share + 1, 1)}
    return {
        f"attn__{role}": (Place(f"{LAYER}self_attn.{role}_proj"), Place(LAYER + key, rows=span))
        for role, span in spans.items()
    }


def stacked(alone: Mapping[str, Place], width: int, hidden: int) -> dict[str, tuple[Place, ...]]:
    """Places for router and experts: alone, or as transformers 5 holds them, in two tensors for a layer."""
    both, down = LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj"
    together = {
        "mlp__router": Place(LAYER + "mlp.gate"),
        "mlp__experts__gate": Place(both, rows=((0, width),), stack=2 * width, bare=True),
        "mlp__experts__up": Place(both, rows=((width, 2 * width),), stack=2 * width, bare=True),
        "mlp__experts__down": Place(down, stack=hidden, bare=True),
    }
    return {role: tuple(dict.fromkeys((place, together[role]))) for role, place in alone.items()}
