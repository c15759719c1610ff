"""The user's changes, applied to a model's description: longer contexts, other rotations, fewer experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import spec
from ..errors import InputError, shown
from .hyper import LIMIT


@dataclass(frozen=True)
class Overrides:
    """What may be changed before loading."""

    max_seq_len: int
    scale_pos_emb: float = 1.0
    scale_alpha: float = 1.0
    rope_theta: float | None = None
    yarn_factor: float | None = None
    yarn_original: int | None = None
    active_experts: int | None = None


def main_rope(model: spec.Model) -> spec.Rope | None:
    """The rotation that carries the context: a layer that sees everything, else the first that turns at all.

    Models with two tables (Gemma 3) stretch only this one: a windowed layer looks no further than its window.
    """
    ropes = [layer.attn.rope for layer in model.layers if layer.attn.rope is not None]
    wide = [
        layer.attn.rope for layer in model.layers if layer.attn.rope is not None and layer.attn.window is None
    ]
    return next(iter(wide or ropes), None)


def override(model: spec.Model, wishes: Overrides) -> spec.Model:
    """The description with the wishes in it; a wish that cannot be granted is an error."""
    if model.embed.positions and wishes.max_seq_len > model.embed.positions:
        raise InputError(
            f"max_seq_len {wishes.max_seq_len} exceeds the {model.embed.positions} learned positions "
            f"of the model, which cannot be stretched. Use at most {model.embed.positions}."
        )
    old = main_rope(model)
    new = None if old is None else _rotation(old, model, wishes)
    if new is None and (wishes.scale_pos_emb != 1.0 or wishes.scale_alpha != 1.0 or wishes.yarn_factor):
        raise InputError(f"{model.architecture} has no rotary positions to scale.")

    def change(layer: spec.Layer) -> spec.Layer:
        if new is not None and layer.attn.rope == old:
            layer = replace(layer, attn=replace(layer.attn, rope=new))
        if isinstance(layer.mlp, spec.Moe) and wishes.active_experts is not None:
            if not 1 <= wishes.active_experts <= layer.mlp.experts:
                raise InputError(
                    f"num_experts_per_token must be 1 to {layer.mlp.experts}, found {wishes.active_experts}."
                )
            layer = replace(layer, mlp=replace(layer.mlp, active=wishes.active_experts))
        return layer

    return replace(model, layers=tuple(change(layer) for layer in model.layers))


def _rotation(rope: spec.Rope, model: spec.Model, wishes: Overrides) -> spec.Rope:
    theta = rope.theta if wishes.rope_theta is None else wishes.rope_theta
    for name, value, most in (
        ("scale_pos_emb", wishes.scale_pos_emb, 1e6),
        ("scale_alpha_value", wishes.scale_alpha, 1e6),
        ("rotary_embedding_base", theta, 1e38),
    ):
        if not isinstance(value, int | float) or not 0 < value < most:
            raise InputError(f"config.{name} must be a number above 0, found {shown(value)}.")
    scaling = rope.scaling
    if isinstance(scaling, spec.Linear):
        scaling = None  # its factor is what scale_pos_emb starts from
    if wishes.yarn_factor is not None:
        scaling = _yarn(scaling, model, wishes)
    return replace(
        rope,
        theta=theta,
        scaling=scaling,
        alpha=wishes.scale_alpha,
        divisor=float(wishes.scale_pos_emb),
    )


def _yarn(current: spec.Scaling | None, model: spec.Model, wishes: Overrides) -> spec.Yarn:
    factor = wishes.yarn_factor
    if not isinstance(factor, int | float) or not 1 <= factor < 1e9:
        raise InputError(f"config.yarn_rope_factor must be at least 1 and below 1e9, found {shown(factor)}.")
    known = current.original if isinstance(current, spec.Yarn) else model.max_positions
    original = wishes.yarn_original or known
    if not isinstance(original, int | float) or not 1 <= original < LIMIT:
        raise InputError(
            "config.yarn_rope_original_max_position_embeddings must be a length from 1 to "
            f"{LIMIT - 1}, found {shown(original)}."
        )
    return spec.Yarn.of(float(factor), int(original))
